"""Folders that other programs wrote, or somebody who means harm: read for their tensors, or refused by name."""

from __future__ import annotations

import json
import os
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hf_fsdp.checkpoint.foreign import open_foreign
from hf_fsdp.checkpoint.foreign.names import live_names
from hf_fsdp.checkpoint.optimizer_state import load_optimizer_state
from hf_fsdp.checkpoint.random_state import read_random_state, set_random_state
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.tensor_source import read_whole


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)


def trained() -> tuple[TwoLayers, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TwoLayers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    model.second(model.first(torch.ones(1, 3))).sum().backward()
    optimizer.step()
    return model, optimizer


def write_folder(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The files of a Trainer in one process."""
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 3, "_last_lr": [0.1]}, folder / "scheduler.pt")
    torch.save(
        {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.random.get_rng_state()},
        folder / "rng_state.pth",
    )
    (folder / "trainer_state.json").write_text("{}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "checkpoint-1", *trained())
    return tmp_path / "checkpoint-1"


# -- what is read -----------------------------------------------------------------------------------------------------


def test_a_folder_of_one_process_is_read_with_everything_in_it(folder: Path) -> None:
    model, optimizer = trained()
    foreign = open_foreign(folder, live_names(model, optimizer))
    assert foreign.missing == []
    assert foreign.model is not None and foreign.optimizer is not None
    for name, parameter in model.named_parameters():
        assert torch.equal(read_whole(foreign.model, name), parameter)
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(read_whole(foreign.optimizer, f"state.{name}.{key}"), value)
    assert foreign.scheduler == {"last_epoch": 3, "_last_lr": [0.1]}
    assert foreign.scaler is None

    other = TwoLayers()
    fresh = torch.optim.AdamW(other.parameters(), lr=torch.tensor(1.0))
    assert load_optimizer_state(other, fresh, foreign.optimizer, foreign.groups) == 4
    assert fresh.param_groups[0]["lr"] == torch.tensor(0.01)
    foreign.close()


def test_random_states_of_trainer_can_be_set(folder: Path) -> None:
    now = read_random_state()
    try:
        foreign = open_foreign(folder)
        write_folder(folder, *trained())
        expected = read_random_state()
        torch.rand(5), random.random(), numpy.random.rand()
        state = foreign.random_state(0)
        assert state is not None
        set_random_state(state)
        assert read_random_state() == expected
        assert foreign.random_state(1) is None
    finally:
        set_random_state(now)


def test_the_random_state_of_a_ranks_own_accelerator_is_taken(folder: Path) -> None:
    states = [torch.full((4,), device, dtype=torch.uint8) for device in range(2)]
    torch.save({"cpu": torch.random.get_rng_state(), "cuda": states}, folder / "rng_state_1.pth")
    (folder / "rng_state.pth").unlink()
    foreign = open_foreign(folder)
    first, second = foreign.random_state(1, 0), foreign.random_state(1, 1)
    assert first is not None and second is not None
    assert first["torch"] == second["torch"]
    assert first["cuda"] != second["cuda"]
    assert "cuda" not in (foreign.random_state(1, 2) or {})


def test_what_is_not_there_is_said(folder: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        (folder / name).unlink()
    foreign = open_foreign(folder)
    assert [line.partition(":")[0] for line in foreign.missing] == [
        "optimizer state",
        "scheduler",
        "step and log history",
        "random states",
    ]


def test_parameters_that_never_had_a_gradient_are_said_and_can_be_resumed(folder: Path) -> None:
    model, optimizer = trained()
    del optimizer.state[model.second.bias]
    write_folder(folder, model, optimizer)
    foreign = open_foreign(folder, live_names(model, optimizer))
    assert foreign.missing == ["optimizer state of 1 parameters, the first second.bias: they never had a gradient"]
    assert foreign.groups["without_state"] == ["second.bias"]
    other = TwoLayers()
    assert foreign.optimizer is not None
    fresh = torch.optim.AdamW(other.parameters())
    assert load_optimizer_state(other, fresh, foreign.optimizer, foreign.groups) == 3


def test_state_that_is_no_tensor_comes_beside_the_tensors(folder: Path) -> None:
    model, optimizer = trained()
    for state in optimizer.state.values():
        state["step"] = 3  # as before torch 1.12
    write_folder(folder, model, optimizer)
    foreign = open_foreign(folder, live_names(model, optimizer))
    assert foreign.optimizer is not None and "state.first.bias.step" not in foreign.optimizer.tensors
    assert foreign.groups["scalars"]["first.bias"] == {"step": 3}
    other = TwoLayers()
    fresh = torch.optim.AdamW(other.parameters())
    load_optimizer_state(other, fresh, foreign.optimizer, foreign.groups)
    assert fresh.state[other.first.bias]["step"] == 3


def test_an_optimizer_that_keeps_no_state_lacks_nothing_and_one_that_should_is_missed(folder: Path) -> None:
    model, _ = trained()
    for optimizer, missing in (
        (torch.optim.SGD(model.parameters(), lr=0.1), []),
        (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), ["optimizer state: optimizer.pt holds none"]),
        (torch.optim.AdamW(model.parameters()), ["optimizer state: optimizer.pt holds none"]),
    ):
        write_folder(folder, model, optimizer)
        foreign = open_foreign(folder, live_names(model, optimizer))
        assert (foreign.optimizer is None) == bool(missing)
        assert [line.partition(",")[0] for line in foreign.missing] == missing


def test_names_of_ddp_and_of_compiled_models_are_canonical_with_and_without_the_live_model(folder: Path) -> None:
    model, optimizer = trained()
    (folder / "model.safetensors").unlink()
    state = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save({**state, "module._extra_state": 3}, folder / "pytorch_model.bin")
    for live in (None, live_names(model, optimizer)):
        foreign = open_foreign(folder, live)
        assert foreign.model is not None
        assert set(foreign.model.tensors) == set(model.state_dict())
        assert "1 values that are no tensors, the first module._extra_state, are not read" in foreign.missing


def test_a_sharded_pytorch_model_is_read_and_a_lost_file_is_named(folder: Path) -> None:
    model, optimizer = trained()
    (folder / "model.safetensors").unlink()
    state = model.state_dict()
    for index, layer in enumerate(("first", "second")):
        torch.save({k: v for k, v in state.items() if k.startswith(layer)}, folder / f"pytorch_model-{index}.bin")
    files = {name: f"pytorch_model-{int(name.startswith('second'))}.bin" for name in state}
    index_file = folder / "pytorch_model.bin.index.json"
    index_file.write_text(json.dumps({"weight_map": files}))
    foreign = open_foreign(folder, live_names(model, optimizer))
    assert foreign.model is not None and set(foreign.model.tensors) == set(state)
    index_file.write_text(json.dumps({"weight_map": {**files, "third.weight": "pytorch_model-0.bin"}}))
    with pytest.raises(CheckpointError, match="names 'third.weight', which is in none of its files"):
        open_foreign(folder)
    (folder / "pytorch_model-1.bin").unlink()
    with pytest.raises(CheckpointError, match="pytorch_model-1.bin is missing"):
        open_foreign(folder)


def test_a_model_that_transformers_writes_under_older_names_is_read_by_its_live_names(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
            text_config=LlamaConfig(**sizes, vocab_size=19, num_key_value_heads=2),
        )
    )
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in open_foreign(tmp_path).model.tensors  # type: ignore[union-attr]
    foreign = open_foreign(tmp_path, live_names(model))
    assert foreign.model is not None
    assert set(foreign.model.tensors) == set(model.state_dict())
    assert not any("weights" in line for line in foreign.missing)
    for name, tensor in model.state_dict().items():
        assert torch.equal(read_whole(foreign.model, name), tensor)


def test_adapters_get_the_names_of_the_live_model_back(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def build() -> Any:
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["first"], modules_to_save=["second"], use_dora=True)
        model = get_peft_model(TwoLayers(), config)  # type: ignore[arg-type]
        model.add_adapter("other", LoraConfig(r=3, target_modules=["first"]))
        return model

    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    with warnings.catch_warnings():  # that the base has no config
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
        live = live_names(build())
    foreign = open_foreign(tmp_path, live)
    assert foreign.model is not None
    assert set(foreign.model.tensors) == set(live.saved)
    assert "base_model.model.first.lora_magnitude_vector.default.weight" in foreign.model.tensors
    assert "base_model.model.first.lora_A.other.weight" in foreign.model.tensors
    assert "base_model.model.second.modules_to_save.default.bias" in foreign.model.tensors
    for name, parameter in model.named_parameters():
        if name in live.saved:
            assert torch.equal(read_whole(foreign.model, name), parameter), name


# -- what cannot be read, by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["pytorch_model_fsdp_rank0.bin"], "one file for each rank"),
        (["pytorch_model_fsdp_0_rank1.bin"], "one file for each rank"),
        (["optimizer_0_rank1.bin"], "one file for each rank"),
        (["pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"], "two saves were mixed"),
        (["pytorch_model_fsdp_0"], "is missing: torch DCP writes it last, so this save was cut off"),
        (["notes.txt"], "holds no weights of a Trainer or an Accelerator"),
    ],
)
def test_layouts_that_cannot_be_read_are_named(files: list[str], says: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).mkdir() if name.endswith("_0") else (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=says):
        open_foreign(tmp_path)


def test_two_optimizers_in_one_folder_are_refused(folder: Path) -> None:
    (folder / "optimizer.bin").write_bytes((folder / "optimizer.pt").read_bytes())
    with pytest.raises(CheckpointError, match="holds the optimizer twice, as optimizer.bin and optimizer.pt"):
        open_foreign(folder)


@pytest.mark.parametrize(
    "name", ["_flat_param", "_fsdp_wrapped_module.flat_param_0", "a._fsdp_wrapped_module._flat_param"]
)
def test_flat_parameters_of_fsdp1_are_refused(name: str, folder: Path) -> None:
    torch.save({name: torch.zeros(4)}, folder / "pytorch_model_fsdp.bin")
    with pytest.raises(CheckpointError, match="holds flat parameters of FSDP1"):
        open_foreign(folder)


def test_an_adapter_without_tensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="an adapter without a single tensor"):
        open_foreign(folder)


def test_two_keys_of_one_name_are_refused(folder: Path) -> None:
    torch.save({"a.b": torch.zeros(2), "a._orig_mod.b": torch.ones(2)}, folder / "pytorch_model_fsdp.bin")
    with pytest.raises(CheckpointError, match=r"a.b and a._orig_mod.b of .* are both a.b"):
        open_foreign(folder)


def test_numbers_that_stand_for_other_parameters_are_refused(folder: Path) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(4, 2)
            self.first = nn.Linear(3, 4)

    model = Turned()
    live = live_names(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(
        CheckpointError, match=r"exp_avg of parameter second.weight is \[4, 3\] in .* parameter is \[2, 4\]"
    ):
        open_foreign(folder, live)


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"state": 3},
        {"state": {}, "param_groups": [3]},
        {"state": {0: 3}, "param_groups": [{"params": [0]}]},
        {"state": {0: {}}, "param_groups": [{"params": []}]},
        {"state": {}, "param_groups": [{"params": [1.5]}]},
    ],
)
def test_an_optimizer_file_of_another_form_is_an_error(content: Any, folder: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    torch.save(content, folder / "optimizer.pt")
    with pytest.raises(CheckpointError, match="optimizer.pt"):
        open_foreign(folder, live_names(model, torch.optim.AdamW(model.parameters())))


def test_the_fix_of_a_mixed_folder_works(folder: Path) -> None:
    (folder / "optimizer.bin").write_bytes((folder / "optimizer.pt").read_bytes())
    with pytest.raises(CheckpointError, match="take a checkpoint that one run wrote"):
        open_foreign(folder)
    (folder / "optimizer.bin").unlink()
    open_foreign(folder)


# -- what somebody who means harm would write --------------------------------------------------------------------------


class Attack:
    """Pickles as a command that makes a file."""

    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.victim}",)


@pytest.mark.parametrize(
    "name",
    ["optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "pytorch_model_fsdp.bin", "pytorch_model.bin"],
)
def test_a_command_in_any_file_is_refused_by_name_and_not_run(name: str, folder: Path, tmp_path: Path) -> None:
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    torch.save({"state": Attack(tmp_path / "ran")}, folder / name)
    with pytest.raises(CheckpointError, match=rf"{name} asks for \w+\.system.*nothing of it was run"):
        open_foreign(folder).random_state(0)
    assert not (tmp_path / "ran").exists()
    torch.load(folder / name, weights_only=False)  # what it would have done
    assert (tmp_path / "ran").exists()


def test_files_that_are_not_needed_are_not_opened(folder: Path, tmp_path: Path) -> None:
    torch.save(Attack(tmp_path / "ran"), folder / "training_args.bin")
    open_foreign(folder).close()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"])
def test_links_out_of_the_folder_are_not_followed(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="lies outside of it"):
        open_foreign(folder)


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_a_link_to_a_folder_outside_is_not_followed(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / "optimizer.pt").unlink()
    (tmp_path / "outside").mkdir()
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="lies outside of it"):
        open_foreign(folder)


def test_names_in_an_index_stay_inside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = '{"weight_map": {"first.weight": "../outside.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="lies outside of it"):
        open_foreign(folder)


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _nothing(data: bytes) -> bytes:
    return b""


def _text(data: bytes) -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\n"


@pytest.mark.parametrize("damage", [_cut, _nothing, _text])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "model.safetensors", "rng_state.pth"])
def test_a_damaged_file_is_named(name: str, damage: Callable[[bytes], bytes], folder: Path) -> None:
    path = folder / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=name):
        open_foreign(folder).random_state(0)


# A pickle of {"a": a tensor} whose number of elements is left out.
_TENSOR = (
    b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x00%b\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs."
)


def _archive(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED, byteorder: str = "little") -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", byteorder)
        archive.writestr("archive/data/0", b"\0" * 16)
        archive.writestr("archive/version", "3\n")


@pytest.mark.parametrize(
    ("pickled", "compression", "byteorder", "says"),
    [
        (_TENSOR % b"K\x04", zipfile.ZIP_DEFLATED, "little", "has the compressed record 'archive/data.pkl'"),
        (_TENSOR % b"\x8a\x06\x00\x00\x00\x00\x00\x10", zipfile.ZIP_STORED, "little", "is cut off or damaged"),
        (_TENSOR % b"K\x04", zipfile.ZIP_STORED, "big", "another order of bytes"),
        (
            b"cbuiltins\nbytearray\n(\x8a\x06\x00\x00\x00\x00\x00\x10tR.",
            zipfile.ZIP_STORED,
            "little",
            "asks for builtins.bytear",
        ),
        (b"cos\nsystem\n(X\x04\x00\x00\x00truetR.", zipfile.ZIP_STORED, "little", "asks for os.system"),
        (b"not a pickle", zipfile.ZIP_STORED, "little", "pytorch_model_fsdp.bin"),
    ],
)
def test_archives_that_torch_would_not_write_are_refused(
    pickled: bytes, compression: int, byteorder: str, says: str, folder: Path
) -> None:
    path = folder / "pytorch_model_fsdp.bin"
    _archive(path, _TENSOR % b"K\x04")
    assert open_foreign(folder).model.tensors["a"].shape == (4,)  # type: ignore[union-attr]
    _archive(path, pickled, compression, byteorder)
    with pytest.raises(CheckpointError, match=says):
        open_foreign(folder)


def test_a_file_from_before_torch_1_6_is_refused_and_the_advice_works(folder: Path) -> None:
    path = folder / "optimizer.pt"
    content = torch.load(path, weights_only=True)
    torch.save(content, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="load it with the torch that wrote it and save it again"):
        open_foreign(folder)
    torch.save(torch.load(path, weights_only=True), path)
    open_foreign(folder)


def test_tensors_without_values_are_refused(folder: Path) -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(2, device="meta")):
        torch.save({"first.weight": tensor}, folder / "pytorch_model_fsdp.bin")
        with pytest.raises(CheckpointError, match="first.weight of .*fsdp.bin is a Tensor on"):
            open_foreign(folder)
