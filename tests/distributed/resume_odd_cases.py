"""Runs with state of unusual kinds: optimizers, modules, adapters and callbacks that keep more than a Trainer knows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_fsdp.errors import HfFsdpError
from hf_fsdp.sharding.mesh import rank as this_rank
from tests.distributed.resume_answers_cases import PLAIN
from tests.distributed.resume_compare import cut_in_two
from tests.distributed.resume_models import llama, lora
from tests.distributed.resuming import Kind, Outcome, build_trainer, live, on_rank_0, saving, shared_folder
from tests.distributed.tiny_models import build_model

# -- optimizers -------------------------------------------------------------------------------------------------------


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, of which each subclass keeps the momentum in its own way."""

    def __init__(self, parameters: Any, lr: float = 1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.moved(parameter), alpha=-group["lr"])

    def moved(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        state["momentum.1"] = 0.9 * state.get("momentum.1", 0.0) + parameter.grad
        return state["momentum.1"]


class LocalMomentum(Momentum):
    """Keeps a plain tensor of this rank's part."""

    def moved(self, parameter: Any) -> Any:
        state, gradient = self.state[parameter], parameter.grad
        state["momentum"] = 0.9 * state.get("momentum", 0.0) + gradient.to_local()
        return torch.distributed.tensor.DTensor.from_local(
            state["momentum"],
            gradient.device_mesh,
            gradient.placements,
            run_check=False,
            shape=gradient.shape,
            stride=gradient.stride(),
        )


class NestedMomentum(Momentum):
    def moved(self, parameter: Any) -> Any:
        held = self.state[parameter].setdefault("held", {})
        held["momentum"] = 0.9 * held.get("momentum", 0.0) + parameter.grad
        return held["momentum"]


class GlobalCount(Momentum):
    def moved(self, parameter: Any) -> Any:
        self.state["all"]["count"] = self.state["all"].get("count", 0) + 1
        return parameter.grad


class OwnStateDict(Momentum):
    count = 0

    def moved(self, parameter: Any) -> Any:
        self.count += 1
        return parameter.grad

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}


class CountByRank(Momentum):
    def moved(self, parameter: Any) -> Any:
        self.state[parameter]["count"] = this_rank()
        return parameter.grad


def with_optimizer(cls: type[Momentum]) -> tuple[type, type]:
    class OwnOptimizerTrainer(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = cls(self.model.parameters())
            return self.optimizer

    return OwnOptimizerTrainer, TrainingArguments


def refused_optimizers(rank: int, world_size: int) -> Outcome:
    """Said after the first step, and not at the first save."""
    found = {}
    for cls in (NestedMomentum, GlobalCount, OwnStateDict):
        kind = replace(PLAIN, trainer_class=with_optimizer(cls), num_steps=3)
        found[cls.__name__] = _refused(kind, world_size, **saving(3))
    found["CountByRank"] = _refused(replace(PLAIN, trainer_class=with_optimizer(CountByRank)), world_size, **saving(1))
    return found


def _refused(kind: Kind, world_size: int, **overrides: Any) -> tuple[str, int]:
    """Return the error of a training, and at which step it came."""
    with shared_folder() as folder:
        trainer = build_trainer(kind, folder, world_size, **overrides)
        try:
            trainer.train()
        except HfFsdpError as error:
            return f"{type(error).__name__}: {error}", trainer.state.global_step
    return "", trainer.state.global_step


# -- models -----------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Scales by how often it was called, and keeps the count beside its tensors."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.count = inner, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.count += self.training
        return self.inner(*args, **kwargs) * (1 + 0.01 * self.count)

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def counting() -> nn.Module:
    model = build_model("llama", tied=False)
    model.lm_head = Counting(model.lm_head)
    return model


class Opaque(Counting):
    def get_extra_state(self) -> Any:
        return object()


def opaque() -> nn.Module:
    model = build_model("llama", tied=False)
    model.lm_head = Opaque(model.lm_head)
    return model


def buffers_of_each_rank() -> nn.Module:
    """Counts what this rank alone sees."""
    model = build_model("llama", tied=False)
    model.register_buffer("seen", torch.zeros(3))
    model.register_forward_hook(lambda module, inputs, output: _count(module))
    return model


def _count(module: Any) -> None:
    module.seen += this_rank()


def vera() -> nn.Module:
    """Its projections are buffers that all layers share."""
    from peft import VeraConfig, get_peft_model

    torch.manual_seed(1)
    config = VeraConfig(r=4, target_modules=["q_proj"], d_initial=0.1, task_type="CAUSAL_LM")
    model: nn.Module = get_peft_model(build_model("llama", tied=False), config)
    return model


def refused_models(rank: int, world_size: int) -> Outcome:
    named = replace(PLAIN, model=lora(adapters=("optimizer",), dropout=0.0))
    return {
        "adapter": _refused(named, world_size, **saving(1)),
        "opaque": _refused(replace(PLAIN, model=opaque), world_size, **saving(1)),
    }


def differing_buffers(rank: int, world_size: int) -> Outcome:
    with shared_folder() as folder:
        life = live(replace(PLAIN, model=buffers_of_each_rank), folder, world_size, max_steps=1, **saving(1))
        return {"printed": life.printed}


# -- runs -------------------------------------------------------------------------------------------------------------


def different_wishes(rank: int, world_size: int) -> Outcome:
    """Ranks are told different things: each pair is one error on all ranks."""
    with shared_folder() as folder:
        live(replace(PLAIN, num_steps=2), folder, world_size, **saving(1))
        first, second = f"{folder}/checkpoint-1", f"{folder}/checkpoint-2"
        found = {}
        for name, wish in {"paths": (first, second), "some": (True, None), "kinds": (True, first)}.items():
            try:
                live(PLAIN, folder, world_size, resume=wish[rank])
            except HfFsdpError as error:
                found[name] = f"{type(error).__name__}: {error}"
        return found


def other_schedules(rank: int, world_size: int) -> Outcome:
    """A schedule of another kind is an error, another curve of the same kind a line."""
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", "eval_strategy": "steps"}
    found: Outcome = {}
    with shared_folder() as folder:
        kinds = {"linear": {}, "plateau": plateau, "cosine": {"lr_scheduler_type": "cosine"}}
        evaluated = replace(PLAIN, trainer=lambda model: {"eval_dataset": PLAIN.dataset().select(range(4))})
        for name, arguments in kinds.items():
            live(evaluated, f"{folder}/{name}", world_size, max_steps=1, **arguments, **saving(1))
        for before, after in (("linear", "plateau"), ("plateau", "linear"), ("linear", "cosine")):
            checkpoint = f"{folder}/{before}/checkpoint-1"
            for name, config in (("", {}), (" fresh", {"checkpoint": {"optimizer": "fresh"}})):
                try:
                    life = live(
                        evaluated, f"{folder}/again", world_size, resume=checkpoint, config=config, **kinds[after]
                    )
                    found[f"{before} {after}{name}"] = "\n".join(life.lines)
                except HfFsdpError as error:
                    found[f"{before} {after}{name}"] = f"{type(error).__name__}: {error}"
    return found


def other_precisions(rank: int, world_size: int) -> Outcome:
    """The optimizer's state follows its parameter into another dtype; the run goes on."""
    found: Outcome = {}
    with shared_folder() as folder:
        for before, after in (("bf16-mixed", "bf16-true"), ("bf16-true", "bf16-mixed"), ("fp32", "bf16-true")):
            first = replace(PLAIN, config={"precision": before}, num_steps=2)
            live(first, f"{folder}/{before}-{after}", world_size, max_steps=1, **saving(1))
            again = replace(first, config={"precision": after})
            life = live(again, f"{folder}/again", world_size, resume=f"{folder}/{before}-{after}/checkpoint-1")
            dtypes = {str(value.dtype) for name, value in life.optimizer.items() if not name.endswith("step")}
            found[f"{before} {after}"] = [sorted(dtypes), life.lines]
    return found


def words(rank: int, world_size: int) -> Outcome:
    """``auto`` in an empty folder, after a save, and where all is damaged; ``true`` as a word; a fresh start."""
    kind = replace(PLAIN, num_steps=2)
    found: Outcome = {}
    with shared_folder() as folder:
        for name, wish in {"empty": "auto", "later": "auto", "word": "true", "fresh": None}.items():
            life = live(kind, folder, world_size, resume=wish, **saving(1))
            found[name] = [min(life.logs, default=None), life.printed]
            on_rank_0(lambda: shutil.rmtree(f"{folder}/checkpoint-2"))
        on_rank_0(lambda: Path(folder, "checkpoint-1", "config.json").write_text("{"))
        try:
            live(kind, folder, world_size, resume="auto", **saving(1))
        except HfFsdpError as error:
            found["damaged"] = str(error)
        on_rank_0(lambda: shutil.rmtree(f"{folder}/checkpoint-1"))
        on_rank_0(lambda: Path(folder, "checkpoint-1", "model").mkdir(parents=True))
        found["unfinished"] = live(kind, folder, world_size, resume="auto", save_strategy="no").printed
    return found


def best_of_saved(rank: int, world_size: int) -> Outcome:
    """Evaluated at every step and saved at every second: the best evaluation is not among those that were saved."""
    scores = {1: 9.0, 2: 4.0, 3: 8.0, 4: 6.0, 5: 1.0, 6: 5.0}
    kind = replace(
        PLAIN,
        num_steps=6,
        trainer=lambda model: {"eval_dataset": PLAIN.dataset().select(range(4))},
        arguments={"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score"},
    )

    def score(trainer: Trainer) -> None:
        trainer.compute_metrics = lambda prediction: {"score": scores[trainer.state.global_step]}

    found: Outcome = {}
    for name, every in {"second": 2, "none": 6, "others": 2}.items():
        evaluated = replace(kind, prepare=score)
        arguments = {"eval_delay": 7} if name == "none" else {}
        with shared_folder() as folder:
            if name == "others":  # another run left a checkpoint of a step that is evaluated and not saved here
                live(replace(PLAIN, num_steps=3), folder, world_size, **saving(3))
            how = {**saving(every), "load_best_model_at_end": True, "greater_is_better": True}
            how["save_total_limit"] = None if name == "others" else 1
            life = live(evaluated, folder, world_size, **how, **arguments)
            found[name] = {
                "best": Path(str(life.trainer.state.best_model_checkpoint)).name,
                "left": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
                "printed": life.printed,
            }
    return found


def trained_again(rank: int, world_size: int) -> Outcome:
    """A plain training after a resumed one in the same process logs all of its steps."""
    with shared_folder() as folder:
        kind = replace(PLAIN, num_steps=4)
        live(kind, folder, world_size, **saving(3))
        trainer = build_trainer(kind, folder, world_size)
        steps = []
        for resume in (f"{folder}/checkpoint-3", None):
            trainer.train(resume_from_checkpoint=resume)
            steps.append([entry["step"] for entry in trainer.state.log_history if "loss" in entry])
        return {"steps": steps}


def lost_best(rank: int, world_size: int) -> Outcome:
    class Lose(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                on_rank_0(lambda: shutil.rmtree(state.best_model_checkpoint))

    kind = replace(
        PLAIN,
        num_steps=2,
        trainer=lambda model: {"eval_dataset": PLAIN.dataset().select(range(4)), "callbacks": [Lose()]},
        arguments={"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score"},
        prepare=_worse_and_worse,
    )
    with shared_folder() as folder:
        try:
            live(kind, folder, world_size, load_best_model_at_end=True, **saving(1))
        except HfFsdpError as error:
            return {"error": str(error), "left": sorted(path.name for path in Path(folder).glob("checkpoint-*"))}
    return {}


def _worse_and_worse(trainer: Trainer) -> None:
    trainer.compute_metrics = lambda prediction: {"score": -float(trainer.state.global_step)}


def numbers_in_logs(rank: int, world_size: int) -> Outcome:
    """NumPy's and torch's numbers in the log are kept; what JSON has no word for is named."""
    found: Outcome = {}
    for name, value in {"number": numpy.float32(0.5), "tensor": torch.tensor(0.5), "set": {1}}.items():

        class Log(TrainerCallback):
            value: Any = None

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                state.log_history.append({"mine": self.value, "step": state.global_step})

        Log.value = value
        kind = replace(PLAIN, trainer=lambda model: {"callbacks": [Log()]})  # noqa: B023  # used before the next one
        found[name] = _refused(kind, world_size, max_steps=1, **saving(1))[0]
    return found


CASES: dict[str, Callable[[int, int], Any]] = {
    "dotted": cut_in_two(Kind(model=llama(), trainer_class=with_optimizer(Momentum))),
    "local": cut_in_two(Kind(model=llama(), trainer_class=with_optimizer(LocalMomentum))),
    "extra_state": cut_in_two(Kind(model=counting)),
    "vera": cut_in_two(Kind(model=vera)),
    "refused_optimizers": refused_optimizers,
    "refused_models": refused_models,
    "differing_buffers": differing_buffers,
    "different_wishes": different_wishes,
    "other_schedules": other_schedules,
    "other_precisions": other_precisions,
    "words": words,
    "best_of_saved": best_of_saved,
    "trained_again": trained_again,
    "lost_best": lost_best,
    "numbers_in_logs": numbers_in_logs,
}
