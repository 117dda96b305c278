"""Saving and resuming, ours against Trainer's and Accelerate's own, in one run, alternating.

    python benchmarks/checkpoint.py -o docs/results/DATE-checkpoint.md
    python benchmarks/checkpoint.py --hidden 64 --layers 2 --rounds 1        # a look at it in seconds

Two gloo processes hold one sharded model with AdamW's state. In every round each way saves and resumes once. The stock
ways are Trainer's original methods and Accelerate's original functions (`save_fsdp_model`, `save_fsdp_optimizer`, ...)
for FULL and SHARDED state dicts; only the sharding on CPUs is ours, which stock does not do.

- save: from the call to its return on the last rank. Ours is on the disk then, hashed, and a sample of it was read
  back. Stock syncs its DCP files and nothing else, so its time until `fsync` of all its files is shown too.
- stall: how long a save with `async_save` holds training: the call, and what the optimizer's next step waits until its
  weights are copied. Copying and writing share the cores with the forward and backward between the two (of one row of
  tokens, here): its time beside them and alone is shown.
- resume: weights, optimizer and schedule; the page cache was emptied of the files before. Ours hashes every byte first.
- memory: the most anonymous memory above what the process had before, of the rank and round with most.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed.harness import run_cases

OPTIONS = "HF_FSDP_CHECKPOINT_BENCHMARK"
# Of a synchronous save.
STALL_BAR = 0.15
WAYS = ("ours sharded", "ours full", "stock sharded", "stock full")


# -- in the processes -------------------------------------------------------------------------------------------------


def measure(rank: int, world_size: int) -> dict[str, Any]:
    """Return what every round of every way took."""
    options = json.loads(os.environ[OPTIONS])
    folder = Path(options["folder"])
    trainer = _build_trainer(folder / "run", options)
    _prepare(trainer)
    assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    ways = options["ways"]
    results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    results["ours async"] = []
    for number in range(options["rounds"]):
        for way in ways:
            results[way].append(_save_and_resume(trainer, way, folder, 10 * (number + 1)))
            if rank == 0:
                print(way, results[way][-1], flush=True)
        results["ours async"].append(_stall(trainer, folder, 10 * (number + 1)))
        if rank == 0:
            print("async", results["ours async"][-1], flush=True)
    return {
        "results": results,
        "num_parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "num_state": sum(_numel(value) for state in trainer.optimizer.state.values() for value in state.values()),
    }


@functools.cache
def _patient_group() -> Any:
    """The group to wait in while another rank writes gigabytes."""
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=30))


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _build_trainer(output_dir: Path, options: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from hf_fsdp import FSDPCallback, FSDPConfig

    torch.manual_seed(0)
    hidden = options["hidden"]
    config = LlamaConfig(
        vocab_size=options["vocabulary"],
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=options["layers"],
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=64,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(getattr(torch, options["dtype"])).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.model.rotary_emb.__init__(config)  # its buffers are made from the config, not loaded
    sharding = FSDPConfig(precision="fp32" if options["dtype"] == "float32" else "bf16-true")
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        max_steps=1,
        per_device_train_batch_size=1,
        max_grad_norm=0.0,
        optim="adamw_torch",
        **sharding.trainer_kwargs(),
    )
    data = [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]}] * 4
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[FSDPCallback(sharding)])


def _prepare(trainer: Any) -> None:
    """Shard the model and fill AdamW's state, as a first step would; a step of this model takes minutes on a CPU."""
    trainer._prepare_for_training(1, trainer.get_train_dataloader(), None)
    trainer._tr_loss, trainer._globalstep_last_logged = torch.zeros(()), 0  # what `train` begins with
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def _save_and_resume(trainer: Any, way: str, folder: Path, step: int) -> dict[str, float]:
    who, format = way.split()
    output_dir = folder / way.replace(" ", "-")
    _use(trainer, output_dir, step, format)
    checkpoint = output_dir / f"checkpoint-{step}"
    numbers: dict[str, float] = {}
    with _stock_trainer() if who == "stock" else contextlib.nullcontext():
        seconds, memory = _timed(lambda: trainer._save_checkpoint(trainer.model, None))
        numbers |= {"save": seconds, "save memory": memory}
        numbers["durable"] = seconds + _timed(functools.partial(_sync_files, checkpoint))[0]
        _forget_files(checkpoint)
        load = functools.partial(_load_stock if who == "stock" else _load_ours, trainer, checkpoint)
        seconds, memory = _timed(load)
        numbers |= {"resume": seconds, "resume memory": memory}
    numbers["bytes"] = sum(path.stat().st_size for path in checkpoint.rglob("*"))
    _remove(output_dir)
    return numbers


def _stall(trainer: Any, folder: Path, step: int) -> dict[str, float]:
    from hf_fsdp.integrations.checkpoint_seams import checkpoints_of

    output_dir = folder / "ours-async"
    _use(trainer, output_dir, step, "sharded", async_save=True)
    checkpoints: Any = checkpoints_of(trainer)
    alone, usual = _timed(lambda: _forward_and_backward(trainer))
    call, memory = _timed(lambda: trainer._save_checkpoint(trainer.model, None))
    beside, more = _timed(lambda: _forward_and_backward(trainer))
    wait, _ = _timed(checkpoints.let_weights_change)
    rest, most = _timed(checkpoints.finish)
    assert (output_dir / f"checkpoint-{step}" / "manifest.json").exists()
    _remove(output_dir)
    trainer.optimizer.zero_grad()
    return {
        "stall": call + wait,
        "call": call,
        "alone": alone,
        "beside": beside,
        "until committed": call + beside + wait + rest,
        "save memory": max(memory, more - usual, most),
    }


def _forward_and_backward(trainer: Any) -> None:
    """What lies between a save and the next step of the optimizer, of which more tokens would make more."""
    tokens = torch.tensor([[3, 4, 5, 6]])
    trainer.model(input_ids=tokens, labels=tokens).loss.backward()


def _use(trainer: Any, output_dir: Path, step: int, format: str, async_save: bool = False) -> None:
    from hf_fsdp.config.schema import CheckpointConfig
    from hf_fsdp.integrations.accelerate import set_checkpoint_format
    from hf_fsdp.integrations.checkpoint_seams import checkpoints_of

    checkpoints: Any = checkpoints_of(trainer)
    checkpoints.use(CheckpointConfig(format=format, async_save=async_save))
    set_checkpoint_format(format)
    trainer.args.output_dir = str(output_dir)
    trainer.state.global_step = step


@contextlib.contextmanager
def _stock_trainer() -> Iterator[None]:
    """Give Trainer and Accelerator their own methods back for saving and loading; sharding stays."""
    from accelerate import Accelerator
    from transformers import Trainer

    from hf_fsdp.integrations.accelerate import is_seam

    seams = [
        (cls, name, value)
        for cls in (Trainer, Accelerator)
        for name, value in vars(cls).items()
        if is_seam(value) and any(word in name for word in ("save", "load", "state_dict"))
    ]
    for cls, name, value in seams:
        setattr(cls, name, value.__wrapped__)
    try:
        yield
    finally:
        for cls, name, value in seams:
            setattr(cls, name, value)


def _load_ours(trainer: Any, checkpoint: Path) -> None:
    from hf_fsdp.integrations.checkpoint_seams import checkpoints_of

    checkpoints: Any = checkpoints_of(trainer)
    folder = checkpoints.resume.resolve(trainer, str(checkpoint))
    trainer._load_from_checkpoint(folder, trainer.model)
    trainer._load_optimizer_and_scheduler(folder)
    checkpoints.resume.restore_running_loss()  # closes the files


def _load_stock(trainer: Any, checkpoint: Path) -> None:
    trainer._load_from_checkpoint(str(checkpoint), trainer.model)
    trainer._load_optimizer_and_scheduler(str(checkpoint))


def _timed(do: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds and the added anonymous bytes of the slowest and largest rank."""
    if dist.get_rank() == 0:
        os.sync()  # what was written before is not waited for inside
    dist.barrier(_patient_group())
    peak = _Peak()
    began = time.monotonic()
    with peak:
        do()
    seconds = time.monotonic() - began
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (seconds, peak.added))
    return max(item[0] for item in gathered), max(item[1] for item in gathered)


class _Peak:
    """The most anonymous memory that this process has in a block, above what it had before; looked at every 10 ms."""

    def __init__(self) -> None:
        self.added = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._before = _anonymous_bytes()
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ends.wait(0.01):
            self.added = max(self.added, _anonymous_bytes() - self._before)


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def _sync_files(folder: Path) -> None:
    if dist.get_rank() == 0:
        for path in folder.rglob("*"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    dist.barrier(_patient_group())


def _forget_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    dist.barrier(_patient_group())


def _remove(folder: Path) -> None:
    dist.barrier(_patient_group())
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier(_patient_group())


CASES = {"measure": measure}


# -- outside ----------------------------------------------------------------------------------------------------------


def write_page(found: dict[str, Any], options: dict[str, Any], remark: str) -> str:
    """Return the Markdown page."""
    results = found["results"]

    def median(way: str, what: str) -> float:
        return statistics.median(numbers[what] for numbers in results[way])

    def most(way: str, what: str) -> float:  # a process keeps what it has freed, so later rounds add less
        return max(numbers[what] for numbers in results[way])

    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    size = median("ours sharded", "bytes")
    lines = [
        f"# Checkpoints, ours against stock, {date.today().isoformat()}",
        "",
        f"Measured on {os.cpu_count()} CPU cores ({platform.machine()}), 2 gloo processes; Python "
        f"{platform.python_version()}, {packages}. A Llama of {found['num_parameters'] / 1e9:.2f} B parameters in "
        f"{options['dtype']} with AdamW's state, {size / 1e9:.2f} GB a checkpoint. "
        f"Medians of {options['rounds']} rounds. "
        f"{remark}".rstrip(),
        f"Command: `{' '.join(['python', *sys.argv])}`. What is measured: `benchmarks/checkpoint.py`.",
        "",
        "| | save, s | until it is on the disk, s | resume, s | memory added by a save, GiB | by a resume, GiB | GB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for way in options["ways"]:
        cells = [f"{median(way, what):.2f}" for what in ("save", "durable", "resume")]
        cells += [f"{most(way, what) / 2**30:.2f}" for what in ("save memory", "resume memory")]
        lines.append(f"| {way} | {' | '.join(cells)} | {median(way, 'bytes') / 1e9:.2f} |")
    stall, whole = median("ours async", "stall"), median("ours sharded", "save")
    if set(options["ways"]) == set(WAYS):
        lines += ["", "| ours / stock, same format | sharded | full |", "|---|---:|---:|"]
    for what, words in (("save", "save"), ("durable", "until it is on the disk"), ("resume", "resume")):
        if set(options["ways"]) != set(WAYS):
            break
        ratios = [median(f"ours {format}", what) / median(f"stock {format}", what) for format in ("sharded", "full")]
        lines.append(f"| {words} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    lines += [
        "",
        f"With `async_save` a save holds training for {stall:.2f} s, {100 * stall / whole:.0f} % of the synchronous "
        f"{whole:.2f} s (bar: {100 * STALL_BAR:.0f} %), and is committed after "
        f"{median('ours async', 'until committed'):.2f} s; "
        f"it adds {most('ours async', 'save memory') / 2**30:.2f} GiB. The forward and backward that follow it take "
        f"{median('ours async', 'beside'):.2f} s beside the copy and the writing, and "
        f"{median('ours async', 'alone'):.2f} s alone.",
        "",
        "| every round, s | save | until it is on the disk | resume |",
        "|---|---|---|---|",
    ]
    for way in (*options["ways"], "ours async"):
        cells = [
            " / ".join(f"{numbers[what]:.2f}" if what in numbers else "" for numbers in results[way]).strip(" /")
            for what in (
                ("stall", "until committed", "resume") if way == "ours async" else ("save", "durable", "resume")
            )
        ]
        lines.append(f"| {way}{' (held, committed)' if way == 'ours async' else ''} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--remark", default="", help="added to the page: what else the machine did")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hf-fsdp-checkpoint-", dir=asked.folder) as folder:
        options = {name: getattr(asked, name) for name in ("rounds", "hidden", "layers", "vocabulary", "dtype", "ways")}
        options["folder"] = folder
        outcomes = run_cases(
            "benchmarks.checkpoint", ["measure"], 2, seconds_per_case=7200, environment={OPTIONS: json.dumps(options)}
        )
    page = write_page(outcomes["measure"].get()[0], options, asked.remark)
    print(page)
    if asked.output is not None:
        asked.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
