"""One real training of `plan_accuracy.py` on two gloo processes of its own, with one instrument looking on."""

from __future__ import annotations

import gc
import json
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plan_accuracy_cases import WORLD_SIZE, Case, build_model, build_rows, fsdp_config

INSTRUMENTS = ("heap", "count")
TIMEOUT_SECONDS = 600
# For the process that all others are forked from; malloc reads it when a program begins. One arena, and a fixed size
# from which blocks are maps of their own, so that the count can be repeated.
MALLOC_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
_COMMON_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# Libraries that give back after each use what they else keep for good: oneDNN the code that it compiles for a shape
# (256 KiB each), MKL its buffers. They are not the training's.
_KEEP_NOTHING = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "MKL_DISABLE_FAST_MM": "1"}


def measure(case: Case, instrument: str, num_steps: int = 3, *, keep_storages: bool = False) -> dict[str, Any]:
    """Train `case` on two new processes and return what rank 0 saw.

    Each process is forked from one that has imported everything and done nothing, so its heap is as clean as that of a
    fresh one.

    Args:
        case: what is trained.
        instrument: ``heap`` or ``count``.
        num_steps: the first makes the optimizer's state; those after it are steady.
        keep_storages: of ``count``: return the storages that were alive at the peak.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.plan_accuracy_preload"])
    os.environ.update({**MALLOC_ENVIRONMENT, **_COMMON_ENVIRONMENT, **_KEEP_NOTHING})
    multiprocessing.forkserver.ensure_running()
    with tempfile.TemporaryDirectory(prefix="hf-fsdp-plan-accuracy-") as name:
        arguments = (case, instrument, num_steps, keep_storages, Path(name))
        processes = [context.Process(target=_start, args=(rank, *arguments)) for rank in range(WORLD_SIZE)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
                if any(process.exitcode not in (None, 0) for process in processes):
                    break  # the other would wait for it in a collective
                time.sleep(0.1)
            if not all(process.exitcode == 0 for process in processes):
                said = "\n".join(file.read_text(errors="replace")[-3000:] for file in sorted(Path(name).glob("said-*")))
                raise SystemExit(f"{case.name} ({instrument}) failed:\n{said}")
            outcome: dict[str, Any] = json.loads((Path(name) / "result.json").read_text())
            return outcome
        finally:
            for process in processes:
                process.kill()
                process.join()


def steady_bytes(outcome: dict[str, Any]) -> int:
    """The peak of the steps after the first."""
    return max(max(step["by_phase"].values()) for step in outcome["steps"][1:])


def first_bytes(outcome: dict[str, Any]) -> int:
    """The peak of the first step, in whose forward and backward there is no optimizer state yet."""
    return max(outcome["steps"][0]["by_phase"].values())


# -- in a process -----------------------------------------------------------------------------------------------------


def _start(rank: int, case: Case, instrument: str, num_steps: int, keep_storages: bool, folder: Path) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    os.environ.update({"WORLD_SIZE": str(WORLD_SIZE), "LOCAL_WORLD_SIZE": str(WORLD_SIZE)})
    with open(folder / f"said-{rank}", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        _work(rank, case, instrument, num_steps, keep_storages, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # no clean-up that could wait for the other process


def _work(rank: int, case: Case, instrument: str, num_steps: int, keep_storages: bool, folder: Path) -> None:
    """Train, and write (rank 0) the peaks of every step by phase and what was held at rest."""
    import torch
    import torch.distributed as dist

    from hf_fsdp.monitor.heap import HeapCount
    from hf_fsdp.monitor.memory import MemoryMeter

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    with torch.device("meta"):
        build_model(case)  # imports the model's code, so that it is in the baseline
    rows = build_rows(case, num_steps)  # pictures are no part of the training's memory
    gc.collect()
    before = HeapCount().in_use()
    meter = MemoryMeter(instrument, baseline_bytes=sum(before), keep_storages=keep_storages)
    rests: list[dict[str, int]] = []
    model = train(case, rows, meter, num_steps, folder, lambda *held: rests.append(_at_rest(*held, before)))
    if rank == 0:
        outcome = {
            "steps": [{"by_phase": step.by_phase, "at_rest": step.at_rest_bytes} for step in meter.steps],
            "rests": rests,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "storages": [{**vars(item), "dtype": str(item.dtype)} for item in meter.storages_at_peak],
        }
        (folder / "result.json").write_text(json.dumps(outcome))
    dist.barrier()
    os._exit(0)  # gloo's threads need not be waited for


def train(
    case: Case,
    rows: list[dict[str, Any]],
    meter: Any,
    num_steps: int,
    folder: Path,
    at_rest: Callable[[Any, Any], None] = lambda model, optimizer: None,
) -> Any:
    """Train `case` by Trainer, with `meter` looking on, and return the sharded model.

    Args:
        case: what is trained.
        rows: on these, from `build_rows`.
        meter: a `MemoryMeter`, not started.
        num_steps: optimizer steps.
        folder: Trainer's output.
        at_rest: called with model and optimizer after each step.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    from hf_fsdp import FSDPCallback

    class Measure(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gc.collect()  # the whole model that was cut
            meter.start(kwargs["model"], [kwargs["optimizer"]])

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            meter.begin_step()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            meter.begin_optimizer()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.end_step()
            at_rest(kwargs["model"], kwargs["optimizer"])

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            meter.stop()

    config = fsdp_config(case)
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        max_steps=num_steps,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.accumulation,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        **config.trainer_kwargs(),
    )
    trainer = Trainer(
        model=build_model(case),
        args=arguments,
        train_dataset=rows,
        data_collator=default_data_collator,
        callbacks=[FSDPCallback(config), Measure()],
    )
    trainer.train()
    return trainer.model


def _at_rest(model: Any, optimizer: Any, before: tuple[int, int]) -> dict[str, int]:
    """What the heap holds between steps, in small blocks and in maps of their own, beside the tensors of each size.

    The maps of tensors are known to the byte (whole pages, with malloc's header and alignment), so what is left of the
    heap's maps is not of the model, its gradients or its optimizer.
    """
    from hf_fsdp.monitor.heap import HeapCount
    from hf_fsdp.monitor.storage_count import StorageCount, training_tensors

    now = HeapCount().in_use()
    count = StorageCount("cpu")
    for kind, tensor in training_tensors(model, [optimizer]):
        count.count([tensor], kind)
    threshold, page = int(MALLOC_ENVIRONMENT["MALLOC_MMAP_THRESHOLD_"]), os.sysconf("SC_PAGE_SIZE")
    sizes = [item.num_bytes for item in count.storages()]
    large = [size for size in sizes if size >= threshold]
    return {
        "heap_small": now[0] - before[0],
        "heap_maps": now[1] - before[1],
        "tensors_small": sum(sizes) - sum(large),
        "tensors_maps": sum((size + 64 + 32 + page - 1) // page * page for size in large),
    }
