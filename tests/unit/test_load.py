"""Models left in their files, in one process: `from_pretrained`'s models, and nothing is read too early."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, modeling_utils

from hf_fsdp import load_sharded
from hf_fsdp.checkpoint.manifest import Manifest
from hf_fsdp.errors import CheckpointError
from hf_fsdp.sharding import load
from hf_fsdp.sharding.read import read_into_model
from hf_fsdp.sharding.unread import UnreadParameter, read_all
from hf_fsdp.storage.files import files_under, hash_file
from hf_fsdp.storage.safetensors_file import TensorToWrite, write_safetensors
from hf_fsdp.storage.tensor_source import SafetensorsSource, TensorInfo, hf_folder_source
from tests.distributed.tiny_models import CONFIGS, build_model
from tests.unit.small_models import text_models, tiny_llama, vision_language_models

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    **text_models(),
    **{f"{name} vision" if name == "gemma3" else name: build for name, build in vision_language_models().items()},
    **{
        f"tiny {family} {'tied' if tied else 'untied'}": functools.partial(build_model, family, tied=tied)
        for family in CONFIGS
        for tied in (True, False)
    },
}


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes `load_sharded` leave weights in their files; no process group is needed for that."""
    monkeypatch.setattr(load, "_world_size", lambda: 2)


def unread(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, UnreadParameter)}


def described(model: Any) -> dict[str, Any]:
    """Everything of a model that must not depend on how it was loaded."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {
        "parameters": {n: (p.dtype, p.requires_grad, type(p)) for n, p in model.named_parameters()},
        "buffers": {n: b.dtype for n, b in model.named_buffers()},
        "kept": sorted(model.state_dict()),
        "ties": sorted(ties for ties in names.values() if len(ties) > 1),
        "training": model.training,
        "generation": getattr(model, "generation_config", None) and model.generation_config.to_dict(),
        "name": model.config.name_or_path,
    }


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, None) for family in FAMILIES), *((family, torch.bfloat16) for family in ("jamba", "t5", "llava"))],
)
def test_a_model_left_in_its_files_is_the_one_that_from_pretrained_loads(
    family: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model: Any = FAMILIES[family]()
    with torch.no_grad():
        for buffer in model.buffers():  # saved ones must come back, others must be computed anew
            buffer.add_(1)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    kwargs = {} if dtype is None else {"dtype": dtype}
    expected, expected_info = type(model).from_pretrained(tmp_path, output_loading_info=True, **kwargs)
    found, found_info = load_sharded(type(model), tmp_path, output_loading_info=True, **kwargs)

    sharded = {name for name, parameter in found.named_parameters() if parameter.dim()}
    assert unread(found) == sharded and found_info == expected_info
    read_all(found.parameters())
    assert described(found) == described(expected)
    others = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    for name, tensor in {**dict(found.named_parameters()), **dict(found.named_buffers())}.items():
        assert torch.equal(tensor, others[name]), name


def test_one_process_loads_in_the_ordinary_way(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    model = load_sharded(AutoModelForCausalLM, tmp_path, dtype=torch.float16)
    assert not unread(model) and model.dtype is torch.float16 and isinstance(model, LlamaForCausalLM)


@pytest.mark.usefixtures("two_processes")
def test_transformers_is_left_as_it_was(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    before = PreTrainedModel.__dict__["_load_pretrained_model"]
    load_sharded(AutoModelForCausalLM, tmp_path)
    assert PreTrainedModel.__dict__["_load_pretrained_model"] is before
    with pytest.raises(OSError, match="nowhere"):
        load_sharded(AutoModelForCausalLM, tmp_path / "nowhere")
    assert PreTrainedModel.__dict__["_load_pretrained_model"] is before
    assert not unread(AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.usefixtures("two_processes")
def test_a_weight_whose_values_are_wanted_whole_is_whole(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    loaded = load_sharded(AutoModelForCausalLM, tmp_path)
    ids = torch.arange(4, 12)[None]
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)  # not sharded, and yet right
    assert not unread(loaded)


# -- checkpoints of ours ----------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, model: Any, **changes: Any) -> Path:
    """A checkpoint as two ranks would have written it: float32, halves of every tensor."""
    model.config.save_pretrained(folder)
    (folder / "model").mkdir()
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for rank in range(2):
        items = []
        for name, tensor in tensors.items():
            middle = (len(tensor) + 1) // 2
            start, end = ((0, middle), (middle, len(tensor)))[rank]
            part = tensor[start:end]
            offsets = (start, *[0] * (tensor.dim() - 1))
            items.append(TensorToWrite(name, tensor.dtype, tuple(part.shape), part.clone, offsets, tuple(tensor.shape)))
        write_safetensors(folder / "model" / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", items)
    Manifest(
        step=1,
        world_size=2,
        model_class=type(model).__name__,
        model={name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()},
        files={name: hash_file(folder / name) for name in files_under(folder)},
        **changes,
    ).write(folder)
    return folder


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_of_ours_is_loaded(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_world_size", lambda: world_size)
    model = tiny_llama(tie_word_embeddings=True)
    folder = write_checkpoint(tmp_path / "checkpoint-1", model)
    loaded = load_sharded(AutoModelForCausalLM, folder)
    assert bool(unread(loaded)) == (world_size == 2) and loaded.config.name_or_path == str(folder)
    read_all(loaded.parameters())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight and loaded.dtype is torch.float32
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    rounded = load_sharded(AutoModelForCausalLM, folder, dtype=torch.bfloat16)
    assert torch.equal(rounded.model.norm.weight, model.model.norm.weight.bfloat16())


def test_a_checkpoint_that_from_pretrained_would_load_in_part_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint-1", tiny_llama(), adapters={".": {}})
    with pytest.raises(CheckpointError, match="an adapter and trained weights beside it") as caught:
        load_sharded(AutoModelForCausalLM, folder)
    assert "resume_from_checkpoint" in str(caught.value)


def test_a_checkpoint_with_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint-1", tiny_llama())
    (folder / "model" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard-00002.* is missing"):
        load_sharded(AutoModelForCausalLM, folder)


# -- filling a model --------------------------------------------------------------------------------------------------


def emptied(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.zero_()
    return model


def test_a_model_is_filled_in_its_own_dtypes(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    source = hf_folder_source(tmp_path)
    counted: list[int] = []
    other = emptied(tiny_llama(tie_word_embeddings=True)).to(torch.bfloat16)
    report = read_into_model(other, source, on_bytes=counted.append)
    assert report.missing == report.unused == [] and report.num_tensors == len(list(model.parameters()))
    assert report.num_bytes == sum(counted) == sum(parameter.nbytes for parameter in other.parameters())
    expected = model.to(torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in other.state_dict().items())
    source.close()


def test_persistent_buffers_are_filled_and_others_are_not(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].register_buffer("cache", torch.ones(2), persistent=False)
    with torch.no_grad():
        model[1].running_mean.fill_(3.0)  # type: ignore[operator]
    state = model.state_dict()
    items = [TensorToWrite(name, t.dtype, tuple(t.shape), t.clone) for name, t in state.items()]
    write_safetensors(tmp_path / "m.safetensors", items)
    source = SafetensorsSource([tmp_path / "m.safetensors"])
    read_into_model(emptied(model), source)
    assert model[1].running_mean.tolist() == [3.0, 3.0] and model[0].cache.tolist() == [0.0, 0.0]  # type: ignore[operator]
    source.close()


def test_differences_are_all_named_before_a_byte_is_read(tmp_path: Path) -> None:
    tiny_llama(2, vocab_size=70).save_pretrained(tmp_path)
    source = hf_folder_source(tmp_path)
    model = emptied(tiny_llama(1))
    with pytest.raises(CheckpointError) as caught:
        read_into_model(model, source)
    text = str(caught.value)
    assert "model.embed_tokens.weight is [64, 32] in the model and [70, 32] in the files" in text
    assert text.count("is in the files and not in the model") == 3 and "model.layers.1." in text  # 5 are shown
    assert not any(parameter.any() for parameter in model.parameters())
    with pytest.raises(CheckpointError, match="x is no parameter or persistent buffer of LlamaForCausalLM"):
        read_into_model(model, source, {"x": "model.norm.weight"})
    source.close()


def test_named_tensors_alone_are_filled_from_other_names(tmp_path: Path) -> None:
    torch.manual_seed(1)
    write_safetensors(tmp_path / "a", [TensorToWrite("saved", torch.float32, (32,), lambda: torch.arange(32.0))])
    source = SafetensorsSource([tmp_path / "a"])
    model = emptied(tiny_llama(1))
    report = read_into_model(model, source, {"model.norm.weight": "saved"})
    assert report.num_tensors == 1 and torch.equal(model.get_parameter("model.norm.weight"), torch.arange(32.0))
    assert not model.get_parameter("lm_head.weight").any()
    report = read_into_model(model, source, {"model.norm.weight": "gone"}, strict=False)
    assert report.missing == ["model.norm.weight"] and report.unused == ["saved"] and not report.num_tensors
    source.close()


# -- the seams --------------------------------------------------------------------------------------------------------


def test_the_private_names_of_transformers_are_what_load_stands_in_for() -> None:
    """Moved upstream, weights would be loaded whole by every process, or not at all."""
    assert isinstance(PreTrainedModel.__dict__["_load_pretrained_model"], staticmethod)
    assert list(inspect.signature(PreTrainedModel._load_pretrained_model).parameters) == [
        "model",
        "state_dict",
        "checkpoint_files",
        "load_config",
        "expected_keys",
    ]
    source = inspect.getsource(PreTrainedModel.from_pretrained)
    assert "checkpoint_files, sharded_metadata = _get_resolved_checkpoint_files(" in source
    assert "cls._load_pretrained_model(\n                model, state_dict, checkpoint_files, load_config" in source
    config = {item.name for item in dataclasses.fields(modeling_utils.LoadStateDictConfig)}
    assert config >= {"hf_quantizer", "device_map", "device_mesh", "weight_mapping", "pretrained_model_name_or_path"}
