"""What resuming answers when it cannot go on as asked, the best checkpoint, and a fresh optimizer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from hf_fsdp.errors import HfFsdpError
from tests.distributed.resume_cases import GroupsTrainer, evaluating, settings
from tests.distributed.resume_models import llama, lora
from tests.distributed.resuming import Kind, Life, Outcome, live, on_rank_0, saving, shared_folder
from tests.distributed.tiny_models import CONFIGS
from tests.distributed.training import build_dataset, whole

FRESH = settings(checkpoint={"optimizer": "fresh"})
PLAIN = Kind(model=llama(), num_steps=2, save_step=1)
ADAPTER = Kind(model=lora(dropout=0.0), num_steps=2, save_step=1)


def _saved(kind: Kind, folder: str, world_size: int, **overrides: Any) -> str:
    """Save the first step of `kind` and nothing else; return the checkpoint."""
    live(kind, folder, world_size, max_steps=1, **saving(1), **overrides)
    return f"{folder}/checkpoint-1"


def _error(kind: Kind, folder: str, world_size: int, resume: Any, **overrides: Any) -> str:
    try:
        live(kind, folder, world_size, resume=resume, **overrides)
    except HfFsdpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- other models, other optimizers, other paths ----------------------------------------------------------------------


def other_models(rank: int, world_size: int) -> Outcome:
    """Each run meets a checkpoint of another model; then the run that saved it goes on."""
    with shared_folder() as folder:
        full, adapter = _saved(PLAIN, f"{folder}/full", world_size), _saved(ADAPTER, f"{folder}/adapter", world_size)
        runs: dict[str, tuple[Kind, str]] = {
            "rank": (dataclasses.replace(ADAPTER, model=lora(r=2, dropout=0.0)), adapter),
            "targets": (dataclasses.replace(ADAPTER, model=lora(target_modules=["v_proj"], dropout=0.0)), adapter),
            "size": (dataclasses.replace(PLAIN, model=_wide_llama), full),
            "full_into_adapter": (ADAPTER, full),
            "adapter_into_full": (PLAIN, adapter),
        }
        found: Outcome = {
            name: _error(kind, f"{folder}/again", world_size, checkpoint) for name, (kind, checkpoint) in runs.items()
        }
        found["same"] = _error(ADAPTER, f"{folder}/again", world_size, adapter)
        return found


def _wide_llama() -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = CONFIGS["llama"]()
    config.intermediate_size = 64
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def other_optimizers(rank: int, world_size: int) -> Outcome:
    """Another class, other groups, changed settings, and state that was lost."""
    groups = dataclasses.replace(PLAIN, trainer_class=(GroupsTrainer, TrainingArguments))
    with shared_folder() as folder:
        checkpoint = _saved(PLAIN, folder, world_size)
        changed = live(
            PLAIN, f"{folder}/again", world_size, resume=checkpoint, learning_rate=0.5, adam_beta2=0.5, weight_decay=0.0
        )
        found: Outcome = {
            "class": _error(PLAIN, f"{folder}/again", world_size, checkpoint, optim="sgd", optim_args="momentum=0.9"),
            "groups": _error(groups, f"{folder}/again", world_size, checkpoint),
            "settings": [(group["initial_lr"], group["betas"]) for group in changed.groups],
            "lines": changed.lines,
        }
        on_rank_0(lambda: _lose_optimizer_state(Path(checkpoint)))
        found["lost"] = _error(PLAIN, f"{folder}/again", world_size, checkpoint)
        return found


def _lose_optimizer_state(folder: Path) -> None:
    """Leave a checkpoint that is whole by its manifest, and whose optimizer has no state: a save that went wrong."""
    from hf_fsdp.checkpoint.manifest import Manifest
    from hf_fsdp.storage.files import write_json

    manifest = Manifest.read(folder)
    groups = json.loads((folder / "optimizer" / "groups.json").read_text())
    files = {name: record for name, record in manifest.files.items() if not name.startswith("optimizer/")}
    shutil.rmtree(folder / "optimizer")
    files["optimizer/groups.json"] = write_json(folder / "optimizer" / "groups.json", groups)
    dataclasses.replace(manifest, optimizer={}, files=files).write(folder)


def other_base(rank: int, world_size: int) -> Outcome:
    """An adapter goes on another base: it can, and it is said."""

    def moved() -> nn.Module:
        model = lora(dropout=0.0)()
        with torch.no_grad():
            model.get_parameter("base_model.model.model.norm.weight").add_(1.0)
        return model

    with shared_folder() as folder:
        checkpoint = _saved(ADAPTER, folder, world_size)
        lines = [
            live(kind, f"{folder}/again", world_size, resume=checkpoint).lines
            for kind in (ADAPTER, dataclasses.replace(ADAPTER, model=moved))
        ]
        return {"same": lines[0], "other": lines[1]}


def paths(rank: int, world_size: int) -> Outcome:
    """A run's folder, a name that is not there, a file, and a folder that was never committed."""
    with shared_folder() as folder:
        checkpoint = _saved(PLAIN, f"{folder}/run", world_size)
        on_rank_0(lambda: shutil.copytree(checkpoint, f"{folder}/killed/checkpoint-1"))
        on_rank_0(lambda: Path(folder, "killed/checkpoint-1/manifest.json").unlink())
        asked = {
            "run": f"{folder}/run",
            "missing": f"{folder}/run/checkpoint-7",
            "file": f"{checkpoint}/manifest.json",
            "killed": f"{folder}/killed/checkpoint-1",
        }
        found: Outcome = {name: _error(PLAIN, f"{folder}/again", world_size, path) for name, path in asked.items()}
        found["none"] = _error(PLAIN, f"{folder}/killed", world_size, True)
        found["checkpoint"] = checkpoint
        return found


# -- without the optimizer --------------------------------------------------------------------------------------------


def model_only(rank: int, world_size: int) -> Outcome:
    """`save_only_model`: the error names the fix, and the fix goes on in the middle of the schedule."""
    kind = dataclasses.replace(PLAIN, num_steps=4, save_step=2)
    fresh = dataclasses.replace(kind, config=FRESH)
    with shared_folder() as folder:
        first = live(kind, folder, world_size, save_only_model=True, **saving(2))
        checkpoint = f"{folder}/checkpoint-2"
        found: Outcome = {
            "path": _error(kind, f"{folder}/again", world_size, checkpoint),
            "newest": _error(kind, folder, world_size, True),
            "optimizer_files": [path.name for path in Path(checkpoint, "optimizer").glob("*")],
        }
        on_rank_0(lambda: shutil.rmtree(f"{folder}/checkpoint-4"))
        for name, resume in (("fresh_path", checkpoint), ("fresh_newest", True)):
            again = live(fresh, folder, world_size, resume=resume)
            found[name] = _fresh(first, again, 2)
        return found


def fresh_optimizer(rank: int, world_size: int) -> Outcome:
    """A whole checkpoint, of which the optimizer is not wanted: another class, rate or grouping is not in the way."""
    kind = dataclasses.replace(PLAIN, num_steps=4, save_step=2)
    fresh = dataclasses.replace(kind, config=FRESH)
    with shared_folder() as folder:
        first = live(kind, folder, world_size, **saving(2))
        checkpoint = f"{folder}/checkpoint-2"
        again = live(fresh, f"{folder}/again", world_size, resume=checkpoint)
        faster = live(fresh, f"{folder}/again", world_size, resume=checkpoint, optim="sgd", learning_rate=0.1)
        grouped = dataclasses.replace(fresh, trainer_class=(GroupsTrainer, TrainingArguments))
        return {
            **_fresh(first, again, 2),
            "other_class": [values[2] for values in faster.logs.values()],
            "other_groups": _error(grouped, f"{folder}/again", world_size, checkpoint),
        }


def _fresh(first: Life, again: Life, save_step: int) -> Outcome:
    next_step = save_step + 1
    return {
        # The same weights on the same samples: the loss of the first step, at the learning rate of the schedule.
        "loss": (first.logs[next_step][0], again.logs[next_step][0]),
        "rate": (first.logs[next_step][2], again.logs[next_step][2]),
        "steps": sorted({float(value) for name, value in again.optimizer.items() if name.endswith(".step")}),
        "lines": again.lines,
    }


# -- the best checkpoint ----------------------------------------------------------------------------------------------


class _Scores(TrainerCallback):
    """Keeps the weights of every step; `score` gives the evaluations of a run their order: the second is the best."""

    def __init__(self) -> None:
        self.step = 0
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.step = state.global_step
        self.weights[self.step] = {n: whole(p).clone() for n, p in model.named_parameters() if p.requires_grad}

    def score(self, prediction: Any) -> dict[str, float]:
        return {"score": [0.0, 1.0, 3.0, 2.0, 0.5][self.step]}


def best(kind: Kind) -> Callable[[int, int], Outcome]:
    """The best of the evaluations is loaded and kept, also when another life of the run had it."""

    def case(rank: int, world_size: int) -> Outcome:
        first, second = _Scores(), _Scores()

        def with_scores(scores: _Scores) -> Kind:
            def extra(model: nn.Module) -> dict[str, Any]:
                return {
                    "eval_dataset": build_dataset(4),
                    "compute_metrics": scores.score,
                    "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
                    "callbacks": [scores],
                }

            return dataclasses.replace(kind, trainer=extra)

        arguments = evaluating(metric_for_best_model="score", greater_is_better=True, load_best_model_at_end=True)
        with shared_folder() as folder:
            how = {**arguments, **saving(1), "save_total_limit": 1}
            lives = [live(with_scores(first), folder, world_size, max_steps=3, **how)]
            kept = [sorted(path.name for path in Path(folder).glob("*checkpoint-*"))]
            lives.append(live(with_scores(second), folder, world_size, resume=True, max_steps=4, **how))
            kept.append(sorted(path.name for path in Path(folder).glob("*checkpoint-*")))
        return {
            "kept": kept,
            "best_steps": [life.trainer.state.best_global_step for life in lives],
            "steps": [sorted(scores.weights) for scores in (first, second)],
            "equal": [
                all(torch.equal(life.weights[name], value) for name, value in first.weights[2].items())
                for life in lives
            ],
            "last_differs": any(
                not torch.equal(value, first.weights[2][name]) for name, value in first.weights[3].items()
            ),
            "num_trained": len(first.weights[2]),
        }

    return case


CASES: dict[str, Callable[[int, int], Any]] = {
    **{
        case.__name__: case for case in (other_models, other_optimizers, other_base, paths, model_only, fresh_optimizer)
    },
    "best": best(dataclasses.replace(PLAIN, num_steps=4)),
    "best_adapter": best(dataclasses.replace(ADAPTER, num_steps=4)),
}
