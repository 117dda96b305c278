"""TRL's other trainers under `FSDPCallback`: other preferences, teachers, and models trained on what they generate."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from hf_fsdp import FSDPCallback
from tests.distributed import dpo_cases, trainer_kinds_cases
from tests.distributed.sft_cases import build_tokenizer
from tests.distributed.tiny_models import build_model
from tests.distributed.trainer_kinds_cases import (
    FP32,
    GradientRecorder,
    classifier,
    held,
    move_weights,
    observe,
    on_rank_0,
    preference_rows,
    quiet_folder,
    run_arguments,
    words,
)

CHAT = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def _train(
    world_size: int,
    trainer_class: type[Trainer],
    config_class: type,
    rows: Sequence[dict[str, Any]],
    *,
    models: Sequence[str] = (),
    arguments: dict[str, Any] | None = None,
    **trainer_arguments: Any,
) -> dict[str, Any]:
    """Train a Llama that was saved in a folder, where TRL reads its reference again; report the models beside it."""
    recorder = GradientRecorder()
    with quiet_folder() as (folder, printed):
        on_rank_0(lambda: build_model("llama", tied=False).save_pretrained(f"{folder}/model"))
        model = type(build_model("llama", tied=False)).from_pretrained(f"{folder}/model")
        move_weights(model)
        tokenizer = build_tokenizer()
        tokenizer.chat_template = CHAT
        callback = FSDPCallback(FP32)
        trainer = trainer_class(
            model=model,
            args=config_class(**run_arguments(folder, world_size, **(arguments or {})), **FP32.trainer_kwargs()),
            train_dataset=Dataset.from_list(list(rows)),
            processing_class=tokenizer,
            callbacks=[callback, recorder],
            **trainer_arguments,
        )
        with _sampling_by_place():
            trainer.train()
        result = observe(trainer, recorder, printed)
        result["beside"] = {name: held(_find(trainer, name)) for name in models}
        result["frozen"] = not any(p.requires_grad for name in models for p in _find(trainer, name).parameters())
        result["num_frozen_audits"] = len(callback.frozen_audits)
        return result


def _find(trainer: Trainer, name: str) -> nn.Module:
    value = getattr(trainer, name)
    return value[0] if isinstance(value, list) else value


def kto(rank: int, world_size: int) -> dict[str, Any]:
    """Without the KL term, whose pairs TRL makes within one process's batch, so that they depend on its size."""
    arguments = {"max_length": 24, "loss_type": "apo_zero_unpaired"}
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen" if index % 2 else "rejected"], "label": bool(index % 2)}
        for index, row in enumerate(preference_rows())
    ]
    return _train(world_size, KTOTrainer, KTOConfig, rows, models=["ref_model"], arguments=arguments)


def even_rows() -> list[dict[str, str]]:
    """Rows of one length: these trainers average over the tokens of one process, so uneven ones would differ."""
    generator = torch.Generator().manual_seed(8)
    names = {"prompt": 3, "chosen": 6, "rejected": 5}
    return [
        {name: " " * (name != "prompt") + words(generator, length, length + 1) for name, length in names.items()}
        for _ in range(12)
    ]


def orpo(rank: int, world_size: int) -> dict[str, Any]:
    return _train(world_size, ORPOTrainer, ORPOConfig, even_rows(), arguments={"max_length": 24})


def cpo(rank: int, world_size: int) -> dict[str, Any]:
    return _train(world_size, CPOTrainer, CPOConfig, even_rows(), arguments={"max_length": 24})


def tpo(rank: int, world_size: int) -> dict[str, Any]:
    rows = [{**row, "reference": row["chosen"]} for row in even_rows()]
    return _train(world_size, TPOTrainer, TPOConfig, rows, arguments={"max_length": 24})


def gkd(rank: int, world_size: int) -> dict[str, Any]:
    rows = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["chosen"]},
            ]
        }
        for row in preference_rows()
    ]
    return _train(
        world_size,
        GKDTrainer,
        GKDConfig,
        rows,
        models=["teacher_model"],
        arguments={"max_length": 24, "lmbda": 0.0, "max_new_tokens": 4},
        teacher_model=build_model("llama", tied=False),
    )


def _score_by_place(world_size: int) -> Callable[..., list[float]]:
    """Rewards by the place in the global batch."""

    def score(completions: list[str], **kwargs: Any) -> list[float]:
        start = int(os.environ.get("RANK", 0)) * len(completions)
        return [(start + index) * 7 % 5 / 5 for index in range(len(completions))]

    return score


@contextlib.contextmanager
def _sampling_by_place() -> Iterator[None]:
    """Sample by the place in the global batch and the count of draws, so that one process draws what two draw."""
    draws = 0

    def draw(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        nonlocal draws
        draws += 1
        start = int(os.environ.get("RANK", 0)) * len(probabilities)
        places = torch.arange(start, start + len(probabilities), dtype=torch.float64)
        level = (places * 0.618034 + draws * 0.4142136).remainder(1).unsqueeze(1)
        return (probabilities.double().cumsum(-1) < level).sum(-1, keepdim=True).clamp(max=probabilities.shape[-1] - 1)

    original, torch.multinomial = torch.multinomial, draw  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.multinomial = original


_SAMPLED = {"max_completion_length": 5, "num_generations": 2, "beta": 0.1, "temperature": 1.0}


def grpo(rank: int, world_size: int) -> dict[str, Any]:
    """Completions of uneven length from the sharded model itself, a reference model, two steps for each generation."""
    rows = [{"prompt": row["prompt"]} for row in preference_rows()]
    arguments = {**_SAMPLED, "num_iterations": 2, "max_steps": 4}
    score = _score_by_place(world_size)
    return _train(
        world_size, GRPOTrainer, GRPOConfig, rows, models=["ref_model"], arguments=arguments, reward_funcs=score
    )


def grpo_with_a_reward_model(rank: int, world_size: int) -> dict[str, Any]:
    # Not divided by the spread of a group: special tokens are left out of the scored text, so it can be rounding only.
    rows = [{"prompt": row["prompt"]} for row in preference_rows()]
    tokenizer = build_tokenizer()
    return _train(
        world_size,
        GRPOTrainer,
        GRPOConfig,
        rows,
        models=["ref_model", "reward_funcs"],
        arguments={**_SAMPLED, "scale_rewards": "none"},
        reward_funcs=classifier(0, num_labels=1),
        reward_processing_classes=tokenizer,
    )


def rloo(rank: int, world_size: int) -> dict[str, Any]:
    rows = [{"prompt": row["prompt"]} for row in preference_rows()]
    return _train(
        world_size,
        RLOOTrainer,
        RLOOConfig,
        rows,
        models=["ref_model"],
        arguments=_SAMPLED,
        reward_funcs=_score_by_place(world_size),
    )


def gmpo(rank: int, world_size: int) -> dict[str, Any]:
    rows = [{"prompt": row["prompt"]} for row in preference_rows()]
    return _train(
        world_size,
        GMPOTrainer,
        GMPOConfig,
        rows,
        models=["ref_model"],
        arguments=_SAMPLED,
        reward_funcs=_score_by_place(world_size),
    )


def sdft(rank: int, world_size: int) -> dict[str, Any]:
    """A teacher that TRL loads itself and moves after the student."""
    rows = [{"prompt": row["prompt"], "privileged_context": row["chosen"]} for row in preference_rows()]
    arguments = {"max_completion_length": 5, "num_generations": 2, "distillation_topk": 8}
    return _train(world_size, SDFTTrainer, SDFTConfig, rows, models=["teacher_model"], arguments=arguments)


CASES: dict[str, Callable[[int, int], Any]] = {
    **dpo_cases.CASES,  # one spawn for all of them
    **trainer_kinds_cases.CASES,
    **{
        function.__name__: function
        for function in (kto, orpo, cpo, tpo, gkd, grpo, grpo_with_a_reward_model, rloo, gmpo, sdft)
    },
}
