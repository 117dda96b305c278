"""Every private or moving name of other packages that hf_fsdp builds on, and what it expects of it.

When one of these fails, upstream has moved: the message says what in hf_fsdp has to follow.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderStateMixin,
    IterableDatasetShard,
)
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from hf_fsdp import torch_private
from hf_fsdp.integrations import accelerate as accelerate_seam
from hf_fsdp.torch_private import local_shard, read_unit_state
from tests.unit.small_models import enable_own_checkpointing, tiny_llama

# -- torch ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_mesh() -> Iterator[Any]:
    """A mesh of two ranks without processes: collectives do nothing, which is enough to look at structure."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def test_composable_checkpoint_takes_the_random_state_and_knows_its_modules() -> None:
    layer = nn.Linear(2, 2)
    assert checkpoint.state(layer) is None, "torch_private.is_checkpointed asks `checkpoint.state(module) is None`"
    assert checkpoint(layer, preserve_rng_state=True) is layer, (
        "torch_private.checkpoint_block changes the module in place"
    )
    assert checkpoint.state(layer) is not None, "torch_private.is_checkpointed would say no for every block"
    with pytest.raises(ValueError, match="Unexpected keyword arguments"):
        checkpoint(nn.Linear(2, 2), no_such_option=True)  # or a dropped option would be swallowed


def test_composable_checkpoint_keeps_the_random_state() -> None:
    linear = nn.Linear(64, 64)
    drop = nn.Sequential(linear, nn.Dropout(0.5))
    checkpoint(drop, preserve_rng_state=True)
    x = torch.ones(4, 64, requires_grad=True)
    out = drop(x)
    (grad,) = torch.autograd.grad(out.sum(), linear.bias)
    kept = (out != 0).sum(0) * 2.0
    assert torch.equal(grad, kept), "torch_private.checkpoint_block: the recompute draws another dropout mask"


def test_the_state_of_a_unit_is_where_the_audit_looks(fake_mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard([model[0], model[1]], mesh=fake_mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model[2], mesh=fake_mesh, reshard_after_forward=True)
    fully_shard(model, mesh=fake_mesh)

    pair, single, root = (read_unit_state(module) for module in (model[0], model[2], model))
    assert pair and single and root, "torch_private.read_unit_state: FSDPModule._get_fsdp_state moved"
    assert {id(p) for p in pair.parameters} == {id(p) for part in (model[0], model[1]) for p in part.parameters()}, (
        "torch_private.read_unit_state: the parameters of a unit are no longer in its groups' fsdp_params"
    )
    assert pair.mixed_precision == policy, "torch_private.read_unit_state: state._mp_policy is not what was given"
    assert not pair.reshard_after_forward
    assert read_unit_state(model[1]) == pair, "audit: modules of one unit no longer share their state"
    assert single.reshard_after_forward, "torch_private.read_unit_state: post_forward_mesh_info moved"
    assert root.parameters == (), "audit: an empty root unit no longer reads as empty"
    assert read_unit_state(nn.Linear(2, 2)) is None


def test_a_sharded_module_keeps_parameters_class_prefix_and_methods(fake_mesh: Any) -> None:
    class Layer(nn.Linear):
        """A class of its own: torch keeps one sharded class for each, and `apply_fsdp` gives it the old name back."""

    layer = Layer(5, 5)
    fully_shard(layer, mesh=fake_mesh)
    assert type(layer).__name__ == "FSDPLayer", "policies.blocks.class_name strips the prefix FSDP"
    assert isinstance(layer, FSDPModule) and isinstance(layer.weight, DTensor), "audit: units and parameters by type"
    assert local_shard(layer.weight).shape == (3, 5), (
        "torch_private.local_shard: DTensor._local_tensor is not the shard"
    )
    assert local_shard(layer.weight).numel() == layer.weight.to_local().numel()
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "reshard"):
        assert callable(getattr(layer, name, None)), f"sharding.apply calls FSDPModule.{name}"


def test_fully_shard_takes_what_apply_gives_it() -> None:
    parameters = inspect.signature(fully_shard).parameters
    for name in ("mesh", "reshard_after_forward", "mp_policy", "ignored_params"):
        assert name in parameters, f"sharding.apply: fully_shard({name}=...) is gone"
    fields = {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"}
    assert fields <= set(MixedPrecisionPolicy.__dataclass_fields__), "policies.precision builds MixedPrecisionPolicy"


# -- Accelerate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """A single-process accelerator whose seams are taken out again."""
    for name in ("prepare", "backward", "get_state_dict"):
        monkeypatch.setattr(Accelerator, name, getattr(Accelerator, name))
    monkeypatch.setattr(AcceleratorState, "__init__", AcceleratorState.__init__)
    for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "FORK_LAUNCHED"):
        monkeypatch.delenv(variable, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize(
    ("owner", "name", "arguments"),
    [
        (Accelerator, "prepare", ["args"]),
        (Accelerator, "_prepare_one", ["obj", "first_pass"]),
        (Accelerator, "backward", ["loss", "kwargs"]),
        (Accelerator, "get_state_dict", ["model", "unwrap"]),
        (AcceleratorState, "__init__", ["fsdp_plugin"]),
        (Trainer, "save_model", ["output_dir", "_internal_call"]),
        (
            Trainer,
            "evaluation_loop",
            ["dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"],
        ),
        (Trainer, "prediction_step", ["model", "inputs", "prediction_loss_only", "ignore_keys"]),
        (Seq2SeqTrainer, "prediction_step", ["model", "inputs", "prediction_loss_only", "ignore_keys"]),
        (SFTTrainer, "prediction_step", ["model", "inputs", "prediction_loss_only", "ignore_keys"]),
    ],
)
def test_a_method_that_a_seam_replaces_or_calls_takes_these_arguments(
    owner: type, name: str, arguments: list[str]
) -> None:
    parameters = inspect.signature(getattr(owner, name)).parameters
    missing = [argument for argument in arguments if argument not in parameters]
    assert not missing, f"integrations: {owner.__name__}.{name} no longer takes {missing}"


def test_accelerate_drops_fsdp_on_cpu_which_the_state_seam_mends() -> None:
    source = inspect.getsource(AcceleratorState.__init__)
    assert "ACCELERATE_USE_FSDP" in source and "self.fsdp_plugin = fsdp_plugin" in source, (
        "integrations.accelerate._init_state sets distributed_type and fsdp_plugin as AcceleratorState.__init__ does"
    )
    assert DistributedType.MULTI_CPU and DistributedType.FSDP and DynamoBackend.NO
    assert "fsdp_plugin=fsdp_plugin" in inspect.getsource(Accelerator.__init__), (
        "integrations.accelerate._init_state reads the plugin from the keyword fsdp_plugin"
    )


def test_the_states_are_shared_as_the_seams_write_to_them(accelerator: Accelerator) -> None:
    assert PartialState._shared_state["distributed_type"] == accelerator.distributed_type, (
        "integrations.accelerate._init_state writes PartialState._shared_state['distributed_type']; saving reads it"
    )
    assert AcceleratorState._shared_state, "integrations.accelerate.current_plugin asks whether a state exists"
    assert AcceleratorState().__dict__ is accelerator.state.__dict__
    accelerate_seam.set_sync_each_batch(True)
    assert accelerator.gradient_state.plugin_kwargs["sync_each_batch"] is True, (
        "integrations.accelerate.set_sync_each_batch writes GradientState().plugin_kwargs"
    )
    assert accelerator.gradient_accumulation_steps == 2, "set_sync_each_batch must not lose the other settings"


def test_the_attributes_of_an_accelerator_that_the_seam_touches_exist(accelerator: Accelerator) -> None:
    assert isinstance(accelerator._models, list), "integrations.accelerate._prepare appends to Accelerator._models"
    assert hasattr(accelerator, "native_amp"), "integrations.accelerate._prepare switches Accelerator.native_amp off"
    assert "self.native_amp" in inspect.getsource(Accelerator.prepare_model) + inspect.getsource(
        Accelerator.autocast
    ), "integrations.accelerate._prepare: autocast no longer follows native_amp"
    assert accelerator.state.dynamo_plugin.backend == DynamoBackend.NO, "torch_compile is refused by this attribute"
    config = accelerate.ParallelismConfig()
    for name in ("tp_size", "cp_size", "sp_size"):
        assert getattr(config, name) == 1, f"integrations.accelerate.check_parallelism reads ParallelismConfig.{name}"


def test_accelerates_own_accumulation_asks_the_same_switch() -> None:
    assert 'plugin_kwargs.get("sync_each_batch"' in inspect.getsource(Accelerator.accumulate), (
        "integrations.accelerate.set_sync_each_batch has no effect in loops that use accelerator.accumulate"
    )


def test_the_plugin_has_the_fields_that_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Building a plugin sets this variable for good.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    for name in ("fsdp_version", "activation_checkpointing", "cpu_offload", "state_dict_type"):
        assert hasattr(plugin, name), f"integrations.trainer reads FullyShardedDataParallelPlugin.{name}"
    plugin.state_dict_type = "FULL_STATE_DICT"
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type), "integrations.trainer.save_model sets it for one save"


class _Recorder:
    """A backend that only writes down what it was called with."""

    def __init__(self) -> None:
        self.sharded: list[tuple[nn.Module, list[Any]]] = []
        self.frozen: list[nn.Module] = []
        self.losses: list[float] = []

    def shard(self, model: nn.Module, optimizers: list[Any], device_type: str) -> None:
        assert device_type == "cpu"
        self.sharded.append((model, optimizers))

    def shard_frozen(self, model: nn.Module, device_type: str) -> None:
        self.frozen.append(model)

    def after_scaled_step(self, optimizer: Any) -> None: ...

    def set_scaler(self, accelerator: Any, optimizers: list[Any]) -> None:
        pass

    def observe_loss(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss.detach()))


def test_prepare_and_backward_go_through_an_attached_backend(accelerator: Accelerator) -> None:
    accelerate_seam.install_seams()
    accelerator.state.fsdp_plugin = SimpleNamespace()
    backend = _Recorder()
    accelerate_seam.attach_backend(backend)
    assert (
        accelerate_seam.active_backend() is backend
        and accelerate_seam.current_plugin() is accelerator.state.fsdp_plugin
    )

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    prepared_model, prepared_optimizer, prepared_scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert backend.sharded == [(model, [optimizer])]
    assert prepared_model is model and model in accelerator._models
    assert prepared_optimizer.optimizer is optimizer and prepared_scheduler.optimizers == [prepared_optimizer]
    accelerator.prepare(model)
    assert accelerator._models.count(model) == 1, "a model prepared twice is known once"

    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert len(backend.losses) == 1 and model.weight.grad is not None


def test_without_a_backend_accelerate_does_what_it_always_did(accelerator: Accelerator) -> None:
    accelerate_seam.install_seams()
    model = nn.Linear(2, 1)
    prepared = accelerator.prepare(model)
    assert prepared is model and accelerator._models == [model]
    assert accelerate_seam.active_backend() is None and accelerate_seam.current_plugin() is None
    assert set(accelerator.get_state_dict(model)) == {"weight", "bias"}


def test_several_models_are_sharded_each_with_its_own_optimizer(accelerator: Accelerator) -> None:
    from hf_fsdp.errors import IntegrationError

    accelerate_seam.install_seams()
    accelerator.state.fsdp_plugin = SimpleNamespace()
    backend = _Recorder()
    accelerate_seam.attach_backend(backend)
    first, second = nn.Linear(1, 1), nn.Linear(2, 1)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(IntegrationError, match="one SGD holds parameters of 2 models") as refused:
        accelerator.prepare(first, second, both)
    assert backend.sharded == [] and "one optimizer for each model" in str(refused.value)
    with pytest.raises(IntegrationError, match="SGD holds no parameter of the 2 models given with it"):
        accelerator.prepare(first, second, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (second, first)]
    accelerator.prepare(first, second, *optimizers)
    assert backend.sharded == [(first, [optimizers[1]]), (second, [optimizers[0]])]
    assert accelerator._models == [second, first], "save_state writes optimizer i with model i"


def test_a_model_that_is_only_run_is_sharded_frozen_and_not_listed(accelerator: Accelerator) -> None:
    accelerate_seam.install_seams()
    accelerator.state.fsdp_plugin = SimpleNamespace()
    backend = _Recorder()
    accelerate_seam.attach_backend(backend)
    model = nn.Linear(1, 1)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert backend.frozen == [model] and accelerator._models == []
    accelerator.prepare_model(model)
    assert backend.sharded == [(model, [])] and accelerator._models == [model]


def test_clipping_by_the_accelerator_has_the_parts_that_are_called(accelerator: Accelerator) -> None:
    parameters = inspect.signature(Accelerator._clip_grad_norm_dtensor_aware).parameters
    assert {"parameters", "max_norm", "norm_type"} <= set(parameters), "integrations.accelerate._clip_grad_norm"
    assert isinstance(accelerator._optimizers, list), "integrations.accelerate._order_models reads them"
    source = inspect.getsource(Accelerator.save_state)
    assert "opt, self._models[i]" in source, "integrations.accelerate._order_models: no longer optimizer i, model i"


# -- Trainer ----------------------------------------------------------------------------------------------------------


def test_trainer_asks_whether_every_batch_synchronises_before_it_enters_no_sync() -> None:
    source = inspect.getsource(transformers.trainer)
    asked = source.find('plugin_kwargs.get("sync_each_batch"')
    assert asked >= 0, "integrations.accelerate.set_sync_each_batch has no effect any more"
    assert 0 < source.find("self.accelerator.no_sync", asked) - asked < 1500


def test_trainer_prepares_model_and_optimizer_through_the_accelerator() -> None:
    source = inspect.getsource(Trainer._prepare_for_training)
    for call in ("self.accelerator.prepare(self.model, self.optimizer)", "self.create_optimizer()"):
        assert call in source, f"integrations.accelerate._prepare waits for {call} in Trainer._prepare_for_training"
    assert "self.accelerator.prepare" in inspect.getsource(Trainer.evaluation_loop), (
        "an evaluation before training is prepared by the same seam"
    )


def test_trainer_saves_through_the_accelerators_state_dict() -> None:
    source = inspect.getsource(Trainer.save_model)
    assert "self.accelerator.get_state_dict(self.model)" in source, (
        "integrations.accelerate._get_state_dict is not asked"
    )
    assert '"FULL_STATE_DICT" in str(self.accelerator.state.fsdp_plugin.state_dict_type)' in source, (
        "integrations.trainer switches the plugin's state_dict_type for one save"
    )


def test_trainer_runs_backward_through_the_accelerator() -> None:
    assert "self.accelerator.backward(loss" in inspect.getsource(Trainer.training_step), (
        "integrations.accelerate._backward sees no loss, so a NaN would not be noticed"
    )


@pytest.mark.parametrize(
    "event",
    ["on_init_end", "on_train_begin", "on_prediction_step", "on_pre_optimizer_step", "on_optimizer_step", "on_log"],
)
def test_trainer_still_fires_the_events_that_the_callback_lives_on(event: str) -> None:
    assert hasattr(TrainerCallback, event), f"FSDPCallback.{event} is never called"
    assert f"callback_handler.{event}(" in inspect.getsource(transformers.trainer), f"Trainer no longer fires {event}"


def test_the_callback_handler_hands_over_model_and_optimizer() -> None:
    source = inspect.getsource(transformers.trainer_callback.CallbackHandler.call_event)
    assert "model=self.model" in source and "optimizer=self.optimizer" in source, (
        "FSDPCallback reads both from its events"
    )


def test_the_training_arguments_that_are_read_exist() -> None:
    names = set(TrainingArguments.__dataclass_fields__)
    needed = {"bf16", "fp16", "fsdp", "fsdp_config", "fp16_full_eval", "bf16_full_eval", "auto_find_batch_size"}
    needed |= {"enable_jit_checkpoint", "save_on_each_node", "save_only_model", "save_total_limit"}
    assert needed <= names, f"integrations.trainer reads TrainingArguments.{needed - names}"
    assert {"activation_checkpointing", "gradient_checkpointing"} & names, (
        "integrations.trainer.checkpointing_is_on knows Trainer's switch by neither of its names"
    )


def test_a_training_step_is_handed_the_items_and_computes_the_loss_with_them() -> None:
    step = inspect.unwrap(Trainer.training_step)
    assert list(inspect.signature(step).parameters) == ["self", "model", "inputs", "num_items_in_batch"], (
        "integrations.trainer._training_step stands in for Trainer.training_step"
    )
    assert "num_items_in_batch" in inspect.signature(Trainer.compute_loss).parameters
    assert "self.model_accepts_loss_kwargs" in inspect.getsource(Trainer.compute_loss), (
        "integrations.trainer._training_step sets Trainer.model_accepts_loss_kwargs, and nothing asks for it any more"
    )


# -- transformers' models ---------------------------------------------------------------------------------------------


def test_the_models_own_checkpointing_is_the_attribute_that_is_switched_off() -> None:
    model = tiny_llama(1)
    enable_own_checkpointing(model)
    assert [name for name, part in model.named_modules() if getattr(part, "gradient_checkpointing", False)], (
        "policies.activation.turn_off_model_checkpointing looks for the attribute gradient_checkpointing"
    )


def test_models_name_their_layers_embeddings_and_head_where_the_wrap_policy_looks() -> None:
    model = tiny_llama(1)
    assert "LlamaDecoderLayer" in (model._no_split_modules or ()), "policies.blocks reads _no_split_modules"
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head


# -- TRL --------------------------------------------------------------------------------------------------------------


def test_trls_fused_head_reads_the_weight_of_the_output_embedding_in_the_forward() -> None:
    from trl.trainer import utils as trl_utilities

    add_fused_lm_head = getattr(trl_utilities, "add_fused_lm_head", None)
    if add_fused_lm_head is None:
        pytest.skip("this TRL calls the head as a module")
    from hf_fsdp.policies.raw_reads import RawRead, find_raw_reads

    model = tiny_llama(1)
    add_fused_lm_head(model)
    assert "forward" in vars(model), "policies.raw_reads looks for forwards that were replaced on the instance"
    assert RawRead("", "lm_head") in find_raw_reads(model), (
        "policies.raw_reads no longer finds TRL's read of the head: it would be a unit and hand out its shard"
    )


def test_trls_configs_are_known_by_their_module_and_turn_bf16_on(tmp_path: Any) -> None:
    from trl import SFTConfig

    assert any(cls.__module__.startswith("trl.") for cls in SFTConfig.__mro__), (
        "integrations.trainer.read_training_arguments takes TRL's defaults for typed values"
    )
    fields = SFTConfig.__dataclass_fields__
    assert fields["bf16"].default is not False, "TRL's bf16 default is off now: read_training_arguments says it is on"


# -- evaluation -------------------------------------------------------------------------------------------------------


def test_the_evaluation_loop_calls_what_is_shadowed_and_returns_metrics_that_can_be_replaced() -> None:
    loop = inspect.getsource(Trainer.evaluation_loop)
    assert "self.prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)" in loop, (
        "integrations.evaluation stands in for prediction_step on the instance"
    )
    assert 'metrics[f"{metric_key_prefix}_loss"]' in loop, "integrations.evaluation replaces this metric"
    assert "enumerate(dataloader)" in loop, "integrations.eval_batches iterates in the dataloader's place"
    assert "_get_num_items_in_batch(" in inspect.getsource(Trainer.prediction_step), (
        "integrations.evaluation answers None for it, so that each loss is the mean of its own batch"
    )
    assert "metrics" in EvalLoopOutput._fields
    for method in (Trainer.evaluate, Trainer.predict):
        assert "self.evaluation_loop(" in inspect.getsource(method)
    assert "_loss_shifts_labels" in inspect.getsource(Trainer.__init__), "it says which labels are counted"


def test_trls_sft_trainer_is_where_the_evaluation_knows_its_loss_from() -> None:
    for name in ("compute_loss", "prediction_step"):
        method = getattr(SFTTrainer, name)
        assert (method.__module__, method.__qualname__) == ("trl.trainer.sft_trainer", f"SFTTrainer.{name}")
    source = inspect.getsource(SFTTrainer.compute_loss)
    assert "outputs.label_mask.sum() if num_items_in_batch is None" in source, "a mean over the batch's own labels"


def test_batches_are_evened_out_by_an_attribute_and_streams_by_a_method_that_is_ours_for_the_time() -> None:
    sampler = BatchSamplerShard(BatchSampler(SequentialSampler(range(5)), 2, drop_last=False), 2, 1)
    assert sampler.even_batches and len(list(sampler)) == 2, "integrations.eval_batches.unrepeated_samples"
    sampler.even_batches = False
    assert len(list(sampler)) == len(sampler) == 1
    shard = IterableDatasetShard(range(5), 2, False, 2, 1)  # type: ignore[arg-type]
    for name in ("dataset", "batch_size", "num_processes", "process_index", "split_batches"):
        assert hasattr(shard, name), f"integrations.eval_batches._UnfilledShard reads {name}"
    source = inspect.getsource(DataLoaderDispatcher.__iter__)
    assert "self.remainder = observed_batch_size" in source and "self.end_of_dataloader = True" in source, (
        "integrations.eval_batches: which rows of a dispatched last batch are real"
    )
    source = inspect.getsource(DataLoaderStateMixin.begin)
    assert "self.remainder = length % self.total_batch_size" in source, "and of an evened-out one"


def test_the_events_hand_over_what_the_samples_are_made_from() -> None:
    source = inspect.getsource(transformers.trainer_callback.CallbackHandler.call_event)
    for name in ("processing_class", "eval_dataloader"):
        assert f"{name}=self.{name}" in source, f"integrations.samples reads {name} from its events"
    assert "synced_gpus" in inspect.signature(transformers.GenerationMixin.generate).parameters


# -- torch: activations -----------------------------------------------------------------------------------------------


def test_a_recompute_can_be_told_from_a_forward() -> None:
    seen: list[bool] = []

    class Layer(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(torch_private.is_recomputing(self))
            return super().forward(input).square()

    layer = Layer(2, 2)
    torch_private.checkpoint_block(layer)
    layer(torch.ones(1, 2)).sum().backward()
    assert seen == [False, True], "policies.offload must leave the recompute alone: `state.enable_hook` moved"


def test_the_dispatcher_tells_its_operators_and_which_are_composite() -> None:
    names = torch_private.operator_names()
    assert {"aten::mm", "aten::linear", "aten::_scaled_dot_product_flash_attention"} <= set(names)
    assert torch_private.is_composite(torch.ops.aten.linear.default)
    assert not torch_private.is_composite(torch.ops.aten.mm.default)


def test_a_storage_has_one_name_until_it_is_written_to() -> None:
    tensor = torch.ones(4)
    kept, name = torch_private.storage_key(tensor)
    assert torch_private.storage_key(tensor[1:])[1] == name, "policies.offload would copy views apart"
    tensor.add_(1)
    assert torch_private.storage_key(tensor)[1] != name, "policies.offload would hand back old values"
    del tensor
    assert kept.expired(), "policies.offload would keep what it moved"


def test_dynamo_can_be_told_to_raise_at_its_limit() -> None:
    config = torch._dynamo.config
    before = (config.recompile_limit, config.fail_on_recompile_limit_hit)
    with torch_private.recompile_limit(3):
        assert (config.recompile_limit, config.fail_on_recompile_limit_hit) == (3, True)
    assert (config.recompile_limit, config.fail_on_recompile_limit_hit) == before == (before[0], False)


def test_torch_makes_optimizer_state_by_a_function_that_can_be_replaced() -> None:
    import torch.distributed.checkpoint.state_dict as optimizer_states
    from accelerate.optimizer import AcceleratedOptimizer

    from hf_fsdp.integrations.loss_scaling import install_state_seam

    install_state_seam()
    made = optimizer_states._init_optim_state
    install_state_seam()
    assert optimizer_states._init_optim_state is made, "the seam must be put in place once"
    assert "_init_optim_state(optim)" in inspect.getsource(optimizer_states), (
        "torch makes the state some other way: a resumed fp16 run would step through the scaler"
    )
    assert list(inspect.signature(AcceleratedOptimizer.step).parameters) == ["self", "closure"]


def test_accelerate_prepares_the_scaler_by_a_method_that_ours_answers_twice() -> None:
    from hf_fsdp.integrations.loss_scaling import LossScaler

    scaler = LossScaler("cpu", init_scale=4.0)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))  # torch's own raises here
    assert scaler.get_scale() == 4.0


def test_a_models_dtype_is_a_property_of_one_class_and_forwards_cast_by_it() -> None:
    from transformers import PreTrainedModel
    from transformers.models.smolvlm import modeling_smolvlm

    owners = [cls for cls in PreTrainedModel.__mro__ if isinstance(vars(cls).get("dtype"), property)]
    assert owners, "sharding.compute_dtype replaces the property PreTrainedModel.dtype, and it is none any more"
    assert "self.dtype" in inspect.getsource(modeling_smolvlm.SmolVLMModel)


def test_trainer_reads_from_the_class_whether_a_loss_takes_keywords() -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    assert "accepts_loss_kwargs" in inspect.getsource(inspect.unwrap(Trainer.__init__)), (
        "integrations.trainer.doubt_class_attribute takes back what Trainer reads from the class"
    )
    assert Qwen2_5_VLForConditionalGeneration.accepts_loss_kwargs is False
    assert "**kwargs" in inspect.getsource(Qwen2_5_VLForConditionalGeneration.forward)
