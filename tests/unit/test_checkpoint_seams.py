"""What the checkpoint seams expect of Trainer and of torch's storage; fails when upstream moves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from accelerate.data_loader import DataLoaderShard, DataLoaderStateMixin, SkipBatchSampler, skip_first_batches
from torch.distributed.checkpoint import _hf_utils
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerState

from hf_fsdp.integrations.checkpoint_seams import install_checkpoint_seams
from hf_fsdp.storage import safetensors_file


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("create_accelerator_and_postprocess", []),
        ("_save_checkpoint", ["model", "trial"]),
        ("_load_from_checkpoint", ["resume_from_checkpoint", "model"]),
        ("_load_optimizer_and_scheduler", ["checkpoint"]),
        ("_load_scaler", ["checkpoint"]),
        ("_load_rng_state", ["checkpoint"]),
        ("_load_best_model", []),
        ("_push_from_checkpoint", ["checkpoint_folder"]),
        ("_get_output_dir", ["trial"]),
        ("_save", ["output_dir", "state_dict"]),
    ],
)
def test_a_method_that_saves_or_resumes_takes_these_arguments(name: str, parameters: list[str]) -> None:
    install_checkpoint_seams()
    assert list(inspect.signature(inspect.unwrap(getattr(Trainer, name))).parameters) == ["self", *parameters]


def test_train_takes_the_checkpoint_first() -> None:
    assert list(inspect.signature(inspect.unwrap(Trainer.train)).parameters)[1] == "resume_from_checkpoint"


@pytest.mark.parametrize(
    ("caller", "calls"),
    [
        ("_maybe_log_save_evaluate", ["self._save_checkpoint("]),
        ("_prepare_for_training", ["self._load_from_checkpoint(", "_load_optimizer_and_scheduler(", "_load_scaler("]),
        ("_run_epoch", ["self._load_rng_state("]),
        ("_finalize_training", ["self._load_best_model()"]),
        ("create_accelerator_and_postprocess", ["self.args.save_only_model"]),
        ("train", ["self._load_from_checkpoint(", "TrainerState.load_from_json("]),
    ],
)
def test_trainer_saves_and_resumes_through_the_methods_that_are_replaced(caller: str, calls: list[str]) -> None:
    source = inspect.getsource(inspect.unwrap(getattr(Trainer, caller)))
    for call in calls:
        assert call in source, f"Trainer.{caller} no longer calls {call}, which the checkpoint seams wait for"


def test_trainer_counts_the_running_loss_where_a_resumed_run_restores_it() -> None:
    source = inspect.getsource(inspect.unwrap(Trainer._inner_training_loop))
    reset = source.index("self._tr_loss = torch.tensor(0.0")
    assert reset < source.index("on_train_begin"), "the running loss is restored in on_train_begin, after this reset"
    assert "self._globalstep_last_logged = self.state.global_step" in source


def test_the_state_names_the_best_step_and_callbacks_export_theirs() -> None:
    state = TrainerState()
    assert state.best_global_step is None and state.best_model_checkpoint is None
    assert isinstance(state.stateful_callbacks, dict)
    assert callable(ExportableState.state)


def test_parts_are_described_as_torchs_hugging_face_storage_does() -> None:
    assert _hf_utils.CUSTOM_METADATA_KEY == safetensors_file.SHARDING_INFO
    assert _hf_utils.SAVED_OFFSETS_KEY == safetensors_file.SAVED_OFFSETS
    assert _hf_utils._gen_file_name(1, 1, 2) == "shard-00002-model-00001-of-00001.safetensors"


def test_accelerates_loader_builds_its_batches_where_the_generators_are_noted() -> None:
    source = inspect.getsource(inspect.unwrap(DataLoaderShard.__iter__))
    asked, built, given = (
        source.index(text)
        for text in ("self.base_dataloader.__iter__()", "next_batch = next(dataloader_iter)", "yield current_batch")
    )
    assert asked < built < given, "the loader no longer asks its base, builds a batch ahead and then gives one"
    assert "self.gradient_state._add_dataloader(self)" in inspect.getsource(DataLoaderStateMixin.begin)


def test_trainer_restores_the_generators_once_after_the_first_batches_of_a_resumed_epoch() -> None:
    source = inspect.getsource(Trainer._run_epoch)
    skipped, asked, built = (
        source.index(text) for text in ("skip_first_batches(", "iter(train_dataloader)", "self.get_batch_samples(")
    )
    assert skipped < asked < built < source.rindex("self._load_rng_state(")


@pytest.mark.parametrize("dataset", [list(range(8)), _Stream()], ids=["map", "stream"])
def test_a_loader_that_leaves_batches_out_is_known_as_one(dataset: Any) -> None:
    loader = skip_first_batches(DataLoaderShard(dataset, batch_size=2), 2)
    assert isinstance(loader.batch_sampler, SkipBatchSampler) or loader.skip_batches == 2
