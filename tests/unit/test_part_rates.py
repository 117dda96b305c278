"""Learning rate and weight decay by part: groups, schedules, logs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_fsdp.errors import ConfigError
from hf_fsdp.integrations.part_rates import check_part_rates, current_rates, set_part_rates
from hf_fsdp.policies.lora_targets import plan_lora
from hf_fsdp.policies.model_parts import find_parts, set_trainable
from tests.distributed.training import QUIET_ARGUMENTS
from tests.distributed.vlm_part_models import build_llava, build_rows
from tests.unit.test_lora_targets import adapted


def build_trainer(folder: Path, model: Any, trainer_class: Any = Trainer, **arguments: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        **QUIET_ARGUMENTS,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch",
        **arguments,
    }
    return trainer_class(model=model, args=TrainingArguments(**settings), train_dataset=build_rows())


def groups_of(trainer: Any) -> dict[str, set[tuple[float, float]]]:
    """Part -> the (peak rate, decay) that its parameters are in groups with."""
    found = find_parts(trainer.model).by_parameter()
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups: dict[str, set[tuple[float, float]]] = {}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            part = found[names[id(parameter)]]
            groups.setdefault(part, set()).add((group.get("initial_lr", group["lr"]), group["weight_decay"]))
    return groups


def test_each_part_has_its_rate_and_decay_and_norms_stay_without(tmp_path: Path, capsys: Any) -> None:
    trainer = build_trainer(tmp_path, build_llava())
    set_part_rates(trainer, {"projector": 2e-5, "vision": 2e-6}, {"vision": 0.05})
    trainer.create_optimizer_and_scheduler(4)
    assert groups_of(trainer) == {
        "language": {(1e-3, 0.1), (1e-3, 0.0)},
        "projector": {(2e-5, 0.1), (2e-5, 0.0)},
        "vision": {(2e-6, 0.05), (2e-6, 0.0)},
    }
    decaying = set(trainer.get_decay_parameter_names(trainer.model))
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        assert {names[id(p)] in decaying for p in group["params"]} == {group["weight_decay"] > 0}
    held = [id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(names)
    printed = capsys.readouterr().out
    assert "projector: 2112 parameters trained at learning rate 2e-05, weight decay 0.1 for 2048, 0 for 64" in printed
    assert printed.count("parameters trained at learning rate") == 3


def test_the_logged_rate_is_the_runs_where_every_part_has_a_setting(tmp_path: Path) -> None:
    model = build_llava()
    set_trainable(model, ["language", "projector"])
    trainer = build_trainer(tmp_path, model, logging_steps=1)
    set_part_rates(trainer, {"projector": 2e-5}, {"language": 0.01})
    trainer.train()
    first = next(log for log in trainer.state.log_history if "learning_rate" in log)
    assert first["learning_rate"] == first["learning_rate_language"] > 10 * first["learning_rate_projector"] > 0


def test_a_decay_of_a_part_holds_where_the_run_has_none(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, build_llava(), weight_decay=0.0)
    set_part_rates(trainer, weight_decays={"vision": 0.2})
    trainer.create_optimizer()
    assert groups_of(trainer)["vision"] == {(1e-3, 0.2), (1e-3, 0.0)}
    assert groups_of(trainer)["language"] == {(1e-3, 0.0)}


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad"])
def test_any_optimizer_of_trainer_trains_at_these_rates(optim: str, tmp_path: Path) -> None:
    """A part at a thousandth of the rate moves a thousandth as far, under a schedule and over several steps."""
    moved: dict[str, float] = {}
    for rate in (1e-3, 1e-6):
        trainer = build_trainer(tmp_path, build_llava(), optim=optim, weight_decay=0.0, max_grad_norm=0.0, max_steps=1)
        before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        set_part_rates(trainer, {"projector": rate})
        trainer.train()
        name = "model.multi_modal_projector.linear_1.weight"
        moved[str(rate)] = float((dict(trainer.model.named_parameters())[name].detach() - before[name]).norm())
    assert moved["0.001"] > 0 and moved["1e-06"] == pytest.approx(moved["0.001"] * 1e-3, rel=0.05)


def test_the_schedule_scales_each_rate_and_logs_name_it(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, build_llava(), warmup_steps=1, max_steps=4)
    set_part_rates(trainer, {"projector": 1e-4})
    trainer.train()
    logged = [log for log in trainer.state.log_history if "learning_rate" in log]
    assert len(logged) == 4
    for log in logged:
        assert log["learning_rate_projector"] == pytest.approx(log["learning_rate"] * 0.1)
    assert len({log["learning_rate_projector"] for log in logged}) > 2
    assert current_rates(trainer.optimizer).keys() == {"learning_rate_projector"}


def test_adapters_count_as_the_part_that_they_are_on(tmp_path: Path) -> None:
    model = build_llava()
    plan = plan_lora(model, ["language", "vision"], train_in_full="projector")
    trainer = build_trainer(tmp_path, adapted(model, plan))
    set_part_rates(trainer, {"projector": 2e-5, "vision": 1e-5})
    trainer.create_optimizer()
    groups = groups_of(trainer)
    assert {part: {rate for rate, _ in values} for part, values in groups.items()} == {
        "language": {1e-3},
        "vision": {1e-5},
        "projector": {2e-5},
    }


def test_a_sft_trainer_needs_nothing_else(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    class Sft(SFTTrainer):
        """TRL's, with an optimizer step of a subclass's own in the way."""

        def create_optimizer(self, model: Any = None) -> Any:
            self.was_asked = True
            return super().create_optimizer(model)

    arguments = {**QUIET_ARGUMENTS, "output_dir": str(tmp_path), "max_steps": 1, "bf16": False, "learning_rate": 1e-3}
    arguments |= {"gradient_checkpointing": False, "activation_checkpointing": False}
    known = {key: value for key, value in arguments.items() if key in SFTConfig.__dataclass_fields__}
    trainer = Sft(
        model=build_llava(),
        args=SFTConfig(**known, dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False),
        train_dataset=build_rows(),
        data_collator=_collate,
        processing_class=_stand_in_tokenizer(),
    )
    set_part_rates(trainer, {"projector": 2e-5})
    trainer.train()
    assert trainer.was_asked
    assert {rate for rate, _ in groups_of(trainer)["projector"]} == {2e-5}
    assert "learning_rate_projector" in trainer.state.log_history[0]


def _collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def _stand_in_tokenizer() -> Any:
    from tests.distributed.sft_cases import build_tokenizer

    return build_tokenizer()


@pytest.mark.parametrize(
    ("rates", "decays", "message", "fix"),
    [
        ({"visoin": 1e-5}, {}, "part_learning_rate names visoin, which is no part of LlavaFor", "language, projector"),
        ({"vision": 1e-5}, {}, "the vision is frozen", "trainable: [language, projector, vision]"),
        ({}, {"vision": 0.1}, "part_weight_decay gives the vision 0.1", "leave vision out of part_weight_decay"),
        ({"projector": 0}, {}, "is no learning rate", "leave it out of trainable"),
        ({"projector": -1e-5}, {}, "is no learning rate", "part_learning_rate: {projector: 2.0e-5}"),
        ({"projector": "2e-5"}, {}, "YAML reads 2e-5 as text", "{projector: 2.0e-5}"),
        ({"projector": True}, {}, "is no number", "part_learning_rate"),
        ({}, {"projector": float("nan")}, "is no weight decay", "part_weight_decay: {projector: 0.0}"),
    ],
)
def test_rates_that_mean_nothing_are_refused_with_advice(
    rates: dict[str, Any], decays: dict[str, Any], message: str, fix: str, tmp_path: Path
) -> None:
    model = build_llava()
    set_trainable(model, ["language", "projector"])
    (problem,) = check_part_rates(model, rates, decays)
    assert message in problem.message and fix in problem.fix
    with pytest.raises(ConfigError):
        set_part_rates(build_trainer(tmp_path, model), rates, decays)


def test_an_optimizer_that_is_there_already_is_its_owners(tmp_path: Path) -> None:
    model = build_llava()
    trainer = build_trainer(tmp_path, model)
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="beside an optimizer that is built already"):
        set_part_rates(trainer, {"projector": 1e-5})


def test_nothing_said_changes_nothing(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, build_llava())
    set_part_rates(trainer)
    trainer.create_optimizer()
    assert "create_optimizer" not in vars(trainer) and len(trainer.optimizer.param_groups) == 2


def test_a_text_model_has_one_part(tmp_path: Path) -> None:
    from tests.unit.small_models import tiny_llama

    (problem,) = check_part_rates(tiny_llama(), {"projector": 1e-5}, {})
    assert "no part of LlamaForCausalLM" in problem.message
