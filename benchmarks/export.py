"""Exporting a sharded model: `hf-fsdp checkpoint export` against `accelerate merge-weights`, whole commands, in turn.

    python benchmarks/export.py                    # 0.55B parameters that 2 processes saved; 12 GB of disk
    python benchmarks/export.py --runs 5 -o docs/results/DATE-export.md

One model, sharded on two processes with float32 masters, is saved twice: as a checkpoint of ours and as Accelerate
writes it under SHARDED_STATE_DICT. Both programs write float32. Ours also writes configs, checks the hashes of what it
reads, makes the files durable (fsync) and reads every tensor back. Bars: time ratio < 1, and a peak of anonymous memory
of 1 GiB plus the largest tensor.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from hf_fsdp.checkpoint.manifest import Manifest
from hf_fsdp.storage.tensor_source import hf_folder_source, read_whole
from tests.distributed.harness import run_cases

MODULE = "benchmarks.export"
GIB = 1024**3
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
SHARDS = "pytorch_model_fsdp_0"


def build(rank: int, world_size: int) -> bool:
    """Save one sharded model in both layouts."""
    import torch.distributed.checkpoint as dcp
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_fsdp import FSDPConfig, apply_fsdp
    from hf_fsdp.checkpoint.save import SaveRequest, save_checkpoint

    folder = Path(os.environ["EXPORT_FOLDER"])
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    apply_fsdp(model, FSDPConfig(precision="bf16-mixed"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-4)  # float32 values that bfloat16 does not have

    def write_extras(staging: Path) -> None:
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(staging)

    save_checkpoint(
        SaveRequest(output_dir=folder / "ours", step=1, model=model, optimizer=None, write_extras=write_extras)
    )
    theirs = folder / "theirs" / "checkpoint-1"
    dcp.save({"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter(theirs / SHARDS))
    if rank == 0:
        model.config.save_pretrained(theirs)
        (theirs / "trainer_state.json").write_text("{}")
    return True


CASES = {"build": build}


def measure(folder: Path) -> dict[str, int]:
    """Return how large the saved model is."""
    infos = Manifest.read(folder / "ours" / "checkpoint-1").model.values()
    counts = [math.prod(info.shape) for info in infos]
    return {"parameters": sum(counts), "bytes": 4 * sum(counts), "largest": 4 * max(counts)}


@dataclass
class Runs:
    """What the runs of one command took."""

    name: str
    command: list[str]
    output: Path
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Run the command once and watch its anonymous memory."""
        shutil.rmtree(self.output, ignore_errors=True)
        os.sync()
        before = os.times()
        began = time.perf_counter()
        with subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            peak = 0
            while process.poll() is None:
                peak = max(peak, anonymous_bytes(process.pid))
                time.sleep(0.01)
            self.seconds.append(time.perf_counter() - began)
            if process.returncode != 0:
                assert process.stderr is not None
                raise SystemExit(process.stderr.read().decode())
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        self.processor_seconds.append(used)
        self.peak_bytes.append(peak)


def anonymous_bytes(process: int) -> int:
    """Return the anonymous memory that a process has now: mapped files and page cache are not in it."""
    try:
        match = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def commands(folder: Path) -> list[Runs]:
    """Return what is compared; the first one is Accelerate's."""
    scripts = Path(sys.executable).parent
    ours = [sys.executable, "-m", "hf_fsdp", "checkpoint", "export"]
    shards = folder / "theirs" / "checkpoint-1" / SHARDS
    names = ["merged", "from_ours", "from_theirs", "bf16"]
    merged, from_ours, from_theirs, bf16 = (folder / name for name in names)
    checkpoint, foreign = folder / "ours" / "checkpoint-1", folder / "theirs" / "checkpoint-1"
    options = ["--dtype", "saved", "--max-shard-size", "50GB"]
    return [
        Runs(
            "accelerate merge-weights, its own checkpoint",
            [str(scripts / "accelerate"), "merge-weights", str(shards), str(merged)],
            merged,
        ),
        Runs("hf-fsdp export, our checkpoint", [*ours, str(checkpoint), "-o", str(from_ours), *options], from_ours),
        Runs("hf-fsdp export, Accelerate's", [*ours, str(foreign), "-o", str(from_theirs), *options], from_theirs),
        Runs("hf-fsdp export, ours, in bf16 (default)", [*ours, str(checkpoint), "-o", str(bf16)], bf16),
    ]


def check_equal(first: Path, second: Path) -> None:
    """Raise when two exported folders do not hold the same tensors."""
    sources = [hf_folder_source(first), hf_folder_source(second)]
    if set(sources[0].tensors) != set(sources[1].tensors):
        raise SystemExit(f"{first} and {second} hold other tensors")
    for name in sources[0].tensors:
        if not torch.equal(read_whole(sources[0], name), read_whole(sources[1], name)):
            raise SystemExit(f"{name} differs between {first} and {second}")


def report(sizes: dict[str, Any], results: list[Runs], arguments: argparse.Namespace) -> str:
    """Return the page: a row a command, medians, and the bars."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    reference = statistics.median(results[0].seconds)
    rows = []
    for runs in results:
        median, low, high = statistics.median(runs.seconds), min(runs.seconds), max(runs.seconds)
        rows.append(
            f"| {runs.name} | {median:.1f} ({low:.1f}–{high:.1f}) | {median / reference:.2f} "
            f"| {statistics.median(runs.processor_seconds):.1f} | {max(runs.peak_bytes) / GIB:.2f} |"
        )
    bar = GIB + sizes["largest"]
    met = [statistics.median(runs.seconds) < reference and max(runs.peak_bytes) <= bar for runs in results[1:]]
    return "\n".join(
        [
            f"# Export, {date.today().isoformat()}",
            "",
            f"{sizes['parameters'] / 1e9:.2f}B parameters ({sizes['bytes'] / GIB:.2f} GiB in float32, the largest "
            f"tensor {sizes['largest'] / GIB:.2f} GiB), saved by two processes. {packages}, Python "
            f"{platform.python_version()}, {os.cpu_count()} cores{arguments.note}. Whole commands, imports included, "
            f"{arguments.runs} runs each in turn, files in the page cache; both outputs were compared and are equal.",
            "",
            "| command | seconds: median (range) | of Accelerate's | processor seconds | peak anonymous GiB |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Bars: ratio < 1, peak ≤ {bar / GIB:.2f} GiB (1 GiB and the largest tensor): "
            f"{'met by all three' if all(met) else 'NOT met: ' + str(met)}. Ours also compares hashes, writes configs, "
            "waits until the files are on the disk and reads every tensor back; `merge-weights` does none of it.",
            "",
            f"`python benchmarks/export.py --runs {arguments.runs}`",
            "",
        ]
    )


def main() -> None:
    """Save, export in turn, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", help="where the checkpoints and exports go; default: a temporary folder")
    parser.add_argument("--reuse", type=Path, help="take the checkpoints that an earlier run left in this folder")
    parser.add_argument("--note", default="", help="what else is to be known of the machine")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hf-fsdp-export-", dir=arguments.folder) as name:
        folder = arguments.reuse or Path(name)
        if arguments.reuse is None:
            environment = {"EXPORT_FOLDER": str(folder)}
            run_cases(MODULE, ["build"], 2, seconds_per_case=900, environment=environment)["build"].get()
        sizes = measure(folder)
        results = commands(folder)
        for _ in range(arguments.runs):
            for runs in results:
                runs.run()
                print(f"{runs.name}: {runs.seconds[-1]:.1f} s, {runs.peak_bytes[-1] / GIB:.2f} GiB", flush=True)
        for runs in results[1:3]:
            check_equal(results[0].output, runs.output)
    page = report(sizes, results, arguments)
    print(page)
    if arguments.output is not None:
        arguments.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
