"""The planner's job of a training that runs is that training's own: method, loss, optimizer, batch."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from hf_fsdp import FSDPConfig, MemoryPlanCallback, set_trainable
from hf_fsdp.errors import PlanError
from hf_fsdp.integrations.memory_record import Measured, MemoryRecord
from hf_fsdp.integrations.plan_link import memory_followed_no_longer
from hf_fsdp.integrations.prediction import Prediction
from hf_fsdp.integrations.running_job import build_running_job, count_parameters
from hf_fsdp.integrations.seen_batches import SeenBatches, describe_batch
from hf_fsdp.plan.job import Batch, Job
from hf_fsdp.plan.simulation import PhasePeak, Simulation, Work
from hf_fsdp.policies.lora_targets import plan_lora

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH = Batch(micro_batch_size=2, num_tokens=16)


def build_llama(cls: Any = LlamaForCausalLM) -> Any:
    return cls(LlamaConfig(**TEXT, pad_token_id=0))


def build_llava() -> Any:
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_index=63)
    )


def add_lora(model: Any, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": "all-linear", **settings}))


def job_of(model: Any, tmp_path: Path, optimizer: Any = None, **arguments: Any) -> Job:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **arguments)
    return build_running_job(
        model,
        args=args,
        optimizer=optimizer,
        batch=BATCH,
        config=FSDPConfig(precision="bf16-mixed", activation_checkpointing="full"),
        world_size=4,
    )


def test_full_fine_tuning_is_read_off_model_optimizer_and_arguments(tmp_path: Path) -> None:
    model = build_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    job = job_of(model, tmp_path, optimizer, gradient_accumulation_steps=3, max_grad_norm=0.0, optim="sgd")
    assert (job.method.name, job.method.load_dtype, job.method.trainable) == ("full", "float32", ())
    assert (job.optimizer, job.num_micro_batches, job.max_grad_norm) == ("adamw_torch", 3, None)
    assert (job.strategy, job.world_size, job.device, job.loss) == ("fsdp", 4, "cpu", "logits")
    assert job.fsdp.activation_checkpointing.mode == "full"
    assert job.model.config["num_hidden_layers"] == 2 and job.batch == BATCH
    assert Job.from_json(job.to_json()) == job


def test_a_sharded_model_is_still_of_its_own_class(tmp_path: Path) -> None:
    model = build_llama()
    # As `fully_shard` and then `apply_fsdp` leave it.
    model.__class__ = type("LlamaForCausalLM", (FSDPModule, LlamaForCausalLM), {})
    assert job_of(model, tmp_path).model.name == "LlamaForCausalLM"


def test_without_an_optimizer_the_arguments_name_it(tmp_path: Path) -> None:
    assert job_of(build_llama(), tmp_path, optim="adamw_torch_fused").optimizer == "adamw_torch_fused"


def test_lora_on_all_linear_layers(tmp_path: Path) -> None:
    method = job_of(add_lora(build_llama().bfloat16(), r=8, lora_dropout=0.1), tmp_path).method
    assert (method.name, method.lora_r, method.lora_dropout, method.load_dtype) == ("lora", 8, 0.1, "bfloat16")
    assert method.lora_targets == ("all-linear",) and method.lora_parts == ()


def test_lora_on_some_layers_is_named_by_their_names(tmp_path: Path) -> None:
    method = job_of(add_lora(build_llama(), target_modules=["q_proj", "v_proj"]), tmp_path).method
    assert method.lora_targets == ("q_proj", "v_proj")


def test_lora_on_single_layers_is_named_by_paths(tmp_path: Path) -> None:
    only = "model.layers.1.mlp.up_proj"
    assert job_of(add_lora(build_llama(), target_modules=[only]), tmp_path).method.lora_targets == (only,)


def test_lora_on_the_language_model_beside_a_projector_trained_in_full(tmp_path: Path) -> None:
    model = build_llava()
    plan = plan_lora(model, ["language"], "all-linear", train_in_full=["projector"])
    model = add_lora(model, target_modules=plan.target_modules, modules_to_save=plan.modules_to_save)
    method = job_of(model, tmp_path).method
    assert (method.lora_parts, method.lora_full, method.lora_targets) == (
        ("language",),
        ("projector",),
        ("all-linear",),
    )


def test_frozen_parts_are_named_by_those_that_are_trained(tmp_path: Path) -> None:
    model = build_llava()
    set_trainable(model, ["language", "projector"])
    job = job_of(model, tmp_path)
    assert (job.method.name, job.method.trainable) == ("full", ("language", "projector"))
    assert job.model.config["vision_config"]["num_hidden_layers"] == 2


def test_qlora_is_found_by_its_packed_layers(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from tests.distributed.qlora_models import build_qlora

    model = build_qlora(torch.bfloat16, double=True)
    method = job_of(model, tmp_path).method
    assert (method.name, method.double_quantization, method.load_dtype) == ("qlora", True, "bfloat16")
    num_parameters, num_trained, _ = count_parameters(model)
    assert num_parameters > sum(parameter.numel() for parameter in model.parameters())
    assert num_trained == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_a_single_process_is_simulated_unsharded_under_trainers_own_settings(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], bf16=True)
    args.gradient_checkpointing = True
    job = build_running_job(build_llama(), args=args, optimizer=None, batch=BATCH, config=None, world_size=1)
    assert (job.strategy, job.world_size, job.fsdp.precision.preset) == ("ddp", 1, "bf16-mixed")
    assert job.fsdp.activation_checkpointing.mode == "full"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: build_llama(LlamaForSequenceClassification), "LlamaForSequenceClassification is not LlamaForCausalLM"),
        (lambda: add_lora(build_llama(), use_dora=True), "use_dora=True"),
        (lambda: add_lora(build_llama(), layers_to_transform=[0], target_modules=["q_proj"]), "layers_to_transform"),
        (lambda: add_lora(build_llama(), modules_to_save=["lm_head"]), "modules_to_save in the language"),
        (lambda: torch.nn.Linear(2, 2), "is not a model of transformers"),
    ],
    ids=["class", "dora", "layers", "saved", "plain"],
)
def test_what_no_job_can_say_is_a_reason_and_no_figure(build: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        job_of(build(), tmp_path)


def test_all_that_cannot_be_said_is_said_at_once(tmp_path: Path) -> None:
    model = build_llama()
    model.model.embed_tokens.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(PlanError) as error:
        job_of(model, tmp_path, optimizer, label_smoothing_factor=0.1)
    said = [problem.message for problem in error.value.problems]
    assert any("only some weights of the language" in line for line in said)
    assert any("SGD(momentum=0.9)" in line for line in said)
    assert any("label_smoothing_factor=0.1" in line for line in said)


# -- batches ----------------------------------------------------------------------------------------------------------


def test_the_largest_training_batch_is_seen_and_no_evaluation() -> None:
    model = build_llama()
    seen = SeenBatches(model)
    ids = torch.ones(2, 6, dtype=torch.long)
    model.eval()
    model(input_ids=torch.ones(4, 9, dtype=torch.long))
    model.train()
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert seen.largest == Batch(micro_batch_size=2, num_tokens=6)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    model(input_ids=ids, attention_mask=mask)
    assert seen.largest == Batch(micro_batch_size=2, num_tokens=6, padded=True)
    model(input_ids=ids[:1])
    seen.end_step()
    assert seen.most_forwards == 3 and seen.largest.micro_batch_size == 2
    assert describe_batch(seen.largest) == "2 rows of 6 tokens, padded"
    seen.close()
    model(input_ids=torch.ones(4, 9, dtype=torch.long))
    assert seen.largest.num_tokens == 6


def test_a_batch_that_cannot_be_read_is_a_reason_and_no_error_of_the_forward() -> None:
    model = build_llama()
    model.config.vision_config = SimpleNamespace(patch_size=14)
    seen = SeenBatches(model)
    model.train()
    ids = torch.ones(2, 5, dtype=torch.long)
    seen._look(model, (), {"input_ids": ids, "image_grid_thw": torch.zeros(0, 3, dtype=torch.long)})
    assert seen.failure is None and seen.largest is not None and seen.largest.num_images == 0
    seen._look(model, (), {"input_ids": torch.ones(4, 5), "image_grid_thw": torch.zeros(2, dtype=torch.long)})
    assert "cannot be read" in str(seen.failure) and not model._forward_pre_hooks


def test_pictures_of_a_batch_are_seen() -> None:
    model = build_llava()
    seen = SeenBatches(model)
    ids = torch.full((2, 8), 5)
    ids[:, 1:5] = 63  # four patches
    model(input_ids=ids, pixel_values=torch.zeros(2, 3, 8, 8))
    assert seen.largest == Batch(micro_batch_size=2, num_tokens=8, num_images=1, image_size=(8, 8))
    seen.close()


# -- the record -------------------------------------------------------------------------------------------------------


def small_simulation() -> Simulation:
    peak = PhasePeak(name="forward: head", num_bytes=3 * 2**20, categories={"parameters": 2**20, "activations": 2**21})
    state = {"parameters": 2**20, "gradients": 2**20, "optimizer": 2**21}
    work = Work(forward_flops=1.0, backward_flops=2.0, recompute_flops=0.0)
    return Simulation(phases=(peak,), state_bytes=state, work=work, num_parameters=10, num_trained=10)


def test_predicted_and_measured_stand_side_by_side(tmp_path: Path) -> None:
    job = job_of(build_llama(), tmp_path)
    measured = Measured(kind="count", first_step=2, last_step=3, by_phase={"optimizer": 4 * 2**20})
    record = MemoryRecord(job=job, simulation=small_simulation(), measured=measured)
    record.compare_model(10, 10, 2**20)
    line = "memory: predicted 3.0 MiB (simulated), measured 4.0 MiB (allocator count, steps 2 to 3): 25.0% under"
    assert record.closing_lines() == [line]
    record.compare_model(12, 10, 2**20)
    assert record.closing_lines()[1:] == ["memory: note: the simulated model has 10 parameters, this one 12"]
    assert record.numbers()["memory_prediction_error"] == pytest.approx(-0.25)
    record.write(tmp_path / "memory.json")
    document = json.loads((tmp_path / "memory.json").read_text())
    assert document["predicted"]["label"] == "simulated" and document["measured"]["label"] == "measured"
    assert document["measured"]["peak_bytes"] == 4 * 2**20


def test_a_second_prediction_says_what_it_is_for(tmp_path: Path) -> None:
    job = job_of(build_llama(), tmp_path)
    measured = Measured(kind="count", first_step=2, last_step=3, by_phase={"optimizer": 3 * 2**20})
    record = MemoryRecord(job=job, simulation=small_simulation(), measured=measured)
    assert "(simulated; 4 rows)" in record.predicted_line("4 rows")
    smaller = Batch(micro_batch_size=job.batch.micro_batch_size, num_tokens=job.batch.num_tokens - 1)
    assert "(simulated, again for a larger batch; 4 rows)" in record.predicted_line("4 rows", smaller)
    assert "again for the batch of the measured steps" in record.predicted_line("4 rows", job.batch)
    record.compare_model(10, 10, 2**20)
    assert record.closing_lines()[0].endswith(": equal to 0.1%")


def test_without_a_prediction_its_reason_stands_beside_the_measurement() -> None:
    measured = Measured(kind="cuda", first_step=2, last_step=2, by_phase={"optimizer": 3 * 2**30})
    record = MemoryRecord(measured=measured, failure="DoRA is not simulated")
    assert record.closing_lines() == [
        "memory: measured 3.00 GiB (torch.cuda.max_memory_allocated, step 2); no prediction: DoRA is not simulated"
    ]


def test_a_run_that_goes_on_reads_its_prediction(tmp_path: Path) -> None:
    job, other = job_of(build_llama(), tmp_path), job_of(build_llama(), tmp_path, gradient_accumulation_steps=2)
    MemoryRecord(job=job, simulation=small_simulation()).write(tmp_path / "memory.json")
    prediction = Prediction(tmp_path / "memory.json")
    prediction.ask(job)
    answer = prediction.take()
    assert answer is not None and answer.was_read and answer.simulation == small_simulation()
    assert prediction.take() is None
    assert other.to_json() not in prediction._known
    prediction.close()


def test_a_broken_file_of_an_earlier_run_is_no_prediction(tmp_path: Path) -> None:
    (tmp_path / "memory.json").write_text('{"versions": ')
    assert Prediction(tmp_path / "memory.json")._known == {}


# -- the callback -----------------------------------------------------------------------------------------------------


class Refusing:
    """In place of the planner's service: no process, and no simulation."""

    def __init__(self, num_workers: int | None = None):
        pass

    def simulate(self, jobs: Any) -> Any:
        raise PlanError("this model cannot be simulated", fix="another model")

    def close(self) -> None:
        pass


def build_trainer(tmp_path: Path, callback: MemoryPlanCallback, cls: Any = Trainer, **arguments: Any) -> Any:
    ids = torch.randint(3, 64, (8, 12), generator=torch.Generator().manual_seed(0)).tolist()
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 3}
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, **{**settings, **arguments})
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return cls(model=build_llama(), args=args, train_dataset=rows, callbacks=[callback])


def test_a_prediction_that_fails_is_a_line_beside_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hf_fsdp.integrations.prediction.Service", Refusing)
    callback = MemoryPlanCallback()
    trainer = build_trainer(tmp_path, callback)
    trainer.train()
    assert trainer.state.global_step == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if "memory: " in line]
    assert lines[0] == "hf-fsdp: memory: no prediction: this model cannot be simulated"
    assert lines[-1].startswith("hf-fsdp: memory: measured ") and "(allocator count, steps 2 to 3)" in lines[-1]
    document = json.loads((tmp_path / "memory.json").read_text())
    assert document["failure"] == "this model cannot be simulated" and document["predicted"] is None
    assert document["measured"]["peak_bytes"] > 4 * 4 * sum(p.numel() for p in trainer.model.parameters())


def test_a_finished_run_that_is_resumed_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_fsdp.integrations.prediction.Service", Refusing)
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    build_trainer(tmp_path, MemoryPlanCallback(), **settings).train()
    before = (tmp_path / "memory.json").read_text()
    build_trainer(tmp_path, MemoryPlanCallback(), **settings).train(resume_from_checkpoint=True)
    assert (tmp_path / "memory.json").read_text() == before


def test_a_prediction_that_never_comes_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end several may be pending; other processes may wait for this one, so they share one time."""
    waited: list[float] = []

    class Hanging(Refusing):
        def simulate(self, jobs: Any) -> Any:
            ended.wait(60)

    def wait(prediction: Any, seconds: float) -> None:
        waited.append(seconds)
        original(prediction, seconds)

    ended, original = threading.Event(), Prediction.wait
    monkeypatch.setattr("hf_fsdp.integrations.prediction.Service", Hanging)
    monkeypatch.setattr(Prediction, "wait", wait)
    build_trainer(tmp_path, MemoryPlanCallback(wait_seconds=0.5)).train()
    ended.set()
    assert waited[0] <= 0.5 and waited[1:] == [0.0] * (len(waited) - 1) and len(waited) > 1


def test_one_step_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_fsdp.integrations.prediction.Service", Refusing)
    callback = MemoryPlanCallback()
    build_trainer(tmp_path, callback, max_steps=1).train()
    assert callback.record is not None and callback.record.measured is not None
    assert (callback.record.measured.first_step, callback.record.measured.last_step) == (1, 1)


def test_a_loss_of_two_forwards_is_not_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoForwards(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss + super().compute_loss(model, inputs, *args, **kwargs)

    monkeypatch.setattr("hf_fsdp.integrations.prediction.Service", Refusing)
    callback = MemoryPlanCallback()
    build_trainer(tmp_path, callback, TwoForwards).train()
    assert callback.record is not None
    assert "2 training forwards in the 1 micro-batches" in str(callback.record.failure)


def test_a_training_that_fails_is_no_longer_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    class Failing(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 1:
                raise RuntimeError("the second step fails")
            return super().compute_loss(*args, **kwargs)

    monkeypatch.setattr("hf_fsdp.integrations.prediction.Service", Refusing)
    trainer = build_trainer(tmp_path, MemoryPlanCallback(), Failing)
    with pytest.raises(RuntimeError, match="the second step fails"), memory_followed_no_longer(trainer):
        trainer.train()
    assert _get_current_dispatch_mode() is None
    assert not trainer.model._forward_pre_hooks


def test_an_error_of_the_callback_itself_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("hf_fsdp.integrations.memory_watch.MemoryMeter.begin_step", fail)
    monkeypatch.setattr("hf_fsdp.integrations.prediction.Service", Refusing)
    trainer = build_trainer(tmp_path, MemoryPlanCallback())
    trainer.train()
    assert trainer.state.global_step == 3
    assert "memory: no longer followed: RuntimeError: no such luck" in capsys.readouterr().out
