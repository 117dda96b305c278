"""Sharded loading against Accelerate's RAM-efficient loading: time until the shards hold their weights, and memory.

    python benchmarks/sharded_load.py                                  # 1.1B parameters on 2 processes
    python benchmarks/sharded_load.py --layers 4 --repeats 1           # a quick look
    python benchmarks/sharded_load.py -o docs/results/DATE-sharded-load.md

A Llama of 1.1B parameters with random weights (22 layers, 2048 wide, bf16, 2.2 GB) is written to a temporary folder.
Then fresh processes load and shard it, ours and stock taking turns:

- ours: `load_sharded` and `apply_fsdp`;
- stock: `from_pretrained` under `FSDP_CPU_RAM_EFFICIENT_LOADING`, and `Accelerator.prepare` with its FSDP2 plugin.

Time is from before the first call to after the second on the slowest rank; imports and process groups are made before.
Memory is the largest anonymous resident memory (RssAnon, read every 5 ms; mapped files do not count) above what the
process had when the clock started. Both ways must end with the same bytes in every shard.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

WAYS = ("ours", "stock")
TIME_BAR = 0.5  # of stock's
MEMORY_BAR_GIB = 0.4  # above the shard
GIB = 1024**3


def write_model(folder: Path, layers: int) -> int:
    """Write the model tensor by tensor, in files of at most 1 GB with an index; return its number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_fsdp.storage.safetensors_file import TensorToWrite, write_safetensors

    config = AutoConfig.for_model(
        "llama",
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(item.shape) for name, item in AutoModelForCausalLM.from_config(config).named_parameters()}
    files: list[list[TensorToWrite]] = [[]]
    for name, shape in shapes.items():
        item = TensorToWrite(name, torch.bfloat16, shape, lambda shape=shape: torch.randn(shape) * 0.02)  # type: ignore[misc]
        if sum(other.num_bytes for other in files[-1]) + item.num_bytes > 10**9:
            files.append([])
        files[-1].append(item)
    weight_map: dict[str, str] = {}
    for index, items in enumerate(files, start=1):
        file = f"model-{index:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(folder / file, items)
        weight_map |= {item.name: file for item in items}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(torch.Size(shape).numel() for shape in shapes.values())


# -- in a process -----------------------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """Return this process's anonymous resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status: this needs Linux")


class Peak:
    """The largest anonymous memory while it runs, above what there was at its start."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.largest = anonymous_bytes()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.stopped.wait(0.005):
            self.largest = max(self.largest, anonymous_bytes())

    def __exit__(self, *args: object) -> None:
        self.stopped.set()
        self.thread.join()
        self.largest = max(self.largest, anonymous_bytes())

    @property
    def gib(self) -> float:
        return (self.largest - self.before) / GIB


def load_ours(folder: str, precision: str) -> Any:
    from transformers import AutoModelForCausalLM

    from hf_fsdp import FSDPConfig, apply_fsdp, load_sharded

    model = load_sharded(AutoModelForCausalLM, folder)
    apply_fsdp(model, FSDPConfig(precision=precision))
    return model


def load_stock(folder: str, precision: str) -> Any:
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from transformers import AutoModelForCausalLM

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=True,
        reshard_after_forward=True,
    )
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, mixed_precision="bf16" if precision == "bf16-mixed" else "no"
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    # Accelerate shards a model together with its optimizer only; one without state costs nothing.
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def work(way: str, folder: str, precision: str, result: str) -> None:
    """Load once, in a fresh process, and write what it took."""
    import torch
    import torch.distributed as dist
    import transformers.models.llama.modeling_llama  # noqa: F401  imports are not what is measured
    import xxhash

    from hf_fsdp import apply_fsdp, load_sharded  # noqa: F401
    from hf_fsdp.integrations.accelerate import install_seams
    from hf_fsdp.sharding.mesh import agreement_group

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{result}.rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    agreement_group()
    if way == "stock":
        # On a CPU Accelerate drops its FSDP plugin; this keeps it, and without a backend all else is Accelerate's own.
        install_seams()
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true", FSDP_VERSION="2")
    dist.barrier()
    with Peak() as peak:
        started = time.perf_counter()
        model = (load_ours if way == "ours" else load_stock)(folder, precision)
        seconds = time.perf_counter() - started
    shards = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    digest = xxhash.xxh3_64()
    for name in sorted(shards):
        digest.update(name.encode() + shards[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    outcome = {
        "seconds": seconds,
        "peak_gib": peak.gib,
        "shard_gib": sum(shard.nbytes for shard in shards.values()) / GIB,
        "digest": digest.hexdigest(),
    }
    Path(f"{result}-{dist.get_rank()}.json").write_text(json.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()


# -- beside it --------------------------------------------------------------------------------------------------------


def run(way: str, folder: Path, precision: str, num_processes: int) -> list[dict[str, Any]]:
    """Return what each rank measured."""
    with tempfile.TemporaryDirectory() as results:
        result = f"{results}/rank"
        command = [sys.executable, __file__, "--work", way, str(folder), precision, result]
        common = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        sizes = {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
        processes = [
            subprocess.Popen(command, env={**os.environ, **common, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(num_processes)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{way} failed: exit codes {codes}")
        return [json.loads(Path(f"{result}-{rank}.json").read_text()) for rank in range(num_processes)]


def measure(folder: Path, precision: str, repeats: int, num_processes: int) -> dict[str, list[list[dict[str, Any]]]]:
    """Return way -> repeat -> rank -> what was measured; the files are read into the page cache before every run."""
    from hf_fsdp.storage.files import hash_file

    runs: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        for way in WAYS if repeat % 2 == 0 else reversed(WAYS):
            for file in folder.glob("*.safetensors"):
                hash_file(file)
            ranks = run(way, folder, precision, num_processes)
            runs[way].append(ranks)
            slowest = max(rank["seconds"] for rank in ranks)
            peaks = ", ".join(f"{rank['peak_gib']:.2f}" for rank in ranks)
            print(f"{precision} {way} {repeat + 1}: {slowest:.1f} s, {peaks} GiB", flush=True)
    digests = {tuple(rank["digest"] for rank in ranks) for way in WAYS for ranks in runs[way]}
    if len(digests) != 1:
        raise SystemExit(f"the shards are not the same: {digests}")
    return runs


def report(tables: dict[str, dict[str, list[list[dict[str, Any]]]]], args: Any, num_parameters: int) -> str:
    """Return the page."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    load = os.getloadavg()[1]
    idle = "" if load < args.processes + 1 else f" **The machine was not idle** (load average {load:.0f})."
    lines = [
        "# Sharded loading",
        "",
        f"A Llama of {num_parameters / 1e9:.2f}B parameters (bf16, {num_parameters * 2 / 1e9:.1f} GB in files, page "
        f"cache warm) loaded and sharded on {args.processes} gloo processes of one thread: {versions}; "
        f"{platform.machine()} CPU, {os.cpu_count()} cores, Python {platform.python_version()}; {date.today()}. "
        f"{args.repeats} runs each, taking turns, medians; in brackets the range.{idle} Written by "
        "`python benchmarks/sharded_load.py`.",
        "",
        "- **ours**: `load_sharded` and `apply_fsdp`. **stock**: `from_pretrained` and `Accelerator.prepare` with "
        "FSDP2 and RAM-efficient loading.",
        "- **seconds**: slowest rank, imports left out. **peak**: largest anonymous memory of a rank above what it "
        "had before. **above the shard**: that less the rank's shard.",
        "- Both end with the same bytes in every shard (hashed).",
        "",
        "| stored | way | seconds | peak, rank 0 | peak, other ranks | shard | above the shard |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    verdicts = []
    for precision, runs in tables.items():
        medians = {}
        for way in WAYS:
            seconds = [max(rank["seconds"] for rank in ranks) for ranks in runs[way]]
            first = [ranks[0]["peak_gib"] for ranks in runs[way]]
            others = [max(rank["peak_gib"] for rank in ranks[1:]) for ranks in runs[way]]
            shard = max(rank["shard_gib"] for rank in runs[way][0])
            above = max(max(first), max(others)) - shard
            medians[way] = (statistics.median(seconds), above)
            lines.append(
                f"| {'bf16' if precision == 'bf16-true' else 'fp32'} | {way} | {statistics.median(seconds):.1f} "
                f"({min(seconds):.1f}-{max(seconds):.1f}) | {statistics.median(first):.2f} GiB | "
                f"{statistics.median(others):.2f} GiB | {shard:.2f} GiB | {above:.2f} GiB |"
            )
        ratio = medians["ours"][0] / medians["stock"][0]
        verdicts.append(
            f"- {precision}: {ratio:.2f} of stock's time (bar {TIME_BAR}: {'met' if ratio <= TIME_BAR else 'MISSED'}), "
            f"{medians['ours'][1]:.2f} GiB above the shard at most (bar {MEMORY_BAR_GIB}: "
            f"{'met' if medians['ours'][1] <= MEMORY_BAR_GIB else 'MISSED'})."
        )
    return "\n".join([*lines, "", *verdicts, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=22, help="of the Llama; 22 make 1.1B parameters")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--precisions", nargs="+", default=["bf16-true", "bf16-mixed"])
    parser.add_argument("-o", "--output", type=Path, help="write the page here")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(*args.work)
    with tempfile.TemporaryDirectory(prefix="hf-fsdp-load-") as name:
        folder = Path(name)
        num_parameters = write_model(folder, args.layers)
        tables = {precision: measure(folder, precision, args.repeats, args.processes) for precision in args.precisions}
    page = report(tables, args, num_parameters)
    print(page)
    if args.output is not None:
        args.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
