"""DCP's `.metadata` is a pickle: it is read for what it says, and nothing that it asks for is run."""

from __future__ import annotations

import pickle
import random
import resource
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hf_fsdp.checkpoint.foreign.dcp_metadata import read_dcp_folder
from hf_fsdp.checkpoint.foreign.dcp_source import DcpSource, read_value
from hf_fsdp.checkpoint.foreign.unpickle import Record, load_dcp_pickle
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.tensor_source import read_whole

STATE = {
    "model": {
        "a.weight": torch.arange(24, dtype=torch.float32).view(4, 6),
        "a.bias": torch.randn(5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(24, dtype=torch.float64).view(4, 6).t(),
    },
    "optimizer": {"param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": ["a.weight"]}]},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with warnings.catch_warnings():  # that there is one process
        warnings.simplefilter("ignore")
        dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    return tmp_path / "dcp"


def write_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def load_metadata(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())  # written by this test


# -- what DCP writes --------------------------------------------------------------------------------------------------


def test_every_protocol_of_dcps_metadata_reads_as_pickle_itself_reads_it(folder: Path) -> None:
    expected = load_metadata(folder)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (folder / ".metadata").write_bytes(pickle.dumps(expected, protocol))
        record = load_dcp_pickle(folder / ".metadata")
        items = record.get("state_dict_metadata")
        assert set(items) == set(expected.state_dict_metadata)
        for key, item in expected.state_dict_metadata.items():
            if isinstance(item, TensorStorageMetadata):
                assert items[key].get("properties").state[0] == item.properties.dtype
                assert items[key].get("size") == tuple(item.size)
                assert [chunk.get("offsets") for chunk in items[key].get("chunks")] == [
                    tuple(chunk.offsets) for chunk in item.chunks
                ]
        stored = {index.get("fqn"): info.get("length") for index, info in record.get("storage_data").items()}
        assert stored == {index.fqn: info.length for index, info in expected.storage_data.items()}
        assert record.get("planner_data") == expected.planner_data


def test_tensors_and_values_are_read_as_they_were_saved(folder: Path) -> None:
    content = read_dcp_folder(folder)
    source = DcpSource(content, {name: f"model.{name}" for name in STATE["model"]})
    for name, tensor in STATE["model"].items():
        assert source.tensors[name].dtype == tensor.dtype
        assert torch.equal(read_whole(source, name), tensor), name
    box = torch.empty(2, 3, dtype=torch.bfloat16)  # cast on the way, from the middle
    source.read("a.weight", (1, 2), box)
    assert torch.equal(box, STATE["model"]["a.weight"][1:3, 2:5].to(torch.bfloat16))
    box = torch.empty(3, 2, dtype=torch.float64)  # of a tensor whose values do not lie in order
    source.read("turned", (2, 1), box)
    assert torch.equal(box, STATE["model"]["turned"][2:5, 1:3])
    source.close()
    keys = {path[-1]: key for key, path in content.paths.items() if path[0] == "optimizer"}
    assert {name: read_value(content, key) for name, key in keys.items()} == STATE["optimizer"]["param_groups"][0]


def test_an_enum_as_python_3_11_wrote_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    enum = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    member = b"cbuiltins\ngetattr\n" + enum + b"X\x17\x00\x00\x00TORCH_CONTIGUOUS_FORMAT\x86R"
    path.write_bytes(_metadata_with(member))
    found = load_dcp_pickle(path).get("planner_data")
    assert isinstance(found, Record) and found.arguments == ("TORCH_CONTIGUOUS_FORMAT",)


# -- what nobody should write -----------------------------------------------------------------------------------------


def _metadata_with(value: bytes) -> bytes:
    """A pickle of `Metadata` whose planner_data is what the instructions `value` leave on the stack."""
    name = b"planner_data"
    body = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}X" + struct.pack("<I", len(name)) + name
    return b"\x80\x02" + body + value + b"sb."


class Attack:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_command_in_the_metadata_is_refused_by_name_and_not_run(protocol: int, folder: Path, tmp_path: Path) -> None:
    import os

    victim = tmp_path / "ran"
    attack = Attack(os.system, f"touch {victim}")
    metadata = load_metadata(folder)
    metadata.planner_data = attack
    for content in (attack, metadata, [attack]):
        (folder / ".metadata").write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(CheckpointError, match="nothing of it was run") as caught:
            read_dcp_folder(folder)
        if protocol >= 2 or content is attack:
            assert "system" in str(caught.value)
        assert not victim.exists()
    pickle.loads((folder / ".metadata").read_bytes())  # what any other reader would have done
    assert victim.exists()


@pytest.mark.parametrize(
    ("instructions", "says"),
    [
        (b"cbuiltins\neval\nX\x03\x00\x00\x001+1\x85R", "asks for builtins.eval"),
        (b"cbuiltins\nexec\n", "asks for builtins.exec"),
        (b"ctorch\nload\n", "asks for torch.load"),
        (b"ctorch\nfloat32\n)R", "calls a dtype"),
        (b"ctorch\n_C\n", "asks for torch._C"),
        (b"ctorch.distributed.checkpoint.metadata\nos.system\n", "asks for torch.distributed"),
        (b"cbuiltins\ngetattr\nctorch\nfloat32\nX\x09\x00\x00\x00__class__\x86R", "cannot be read"),
        # The class itself is no record, so its attributes stay what they are.
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x01\x00\x00\x00aK\x01sb", "changes torch.distributed"),
        (b"(ios\nsystem\n", "the pickle instruction b'i'"),
        (b"(cos\nsystem\no", "asks for os.system"),
        (b"\x82\x01", "the pickle instruction b'\\\\x82'"),
        (b"Pabc\n", "the pickle instruction b'P'"),
        (b"N\x88Q", "the pickle instruction b'Q'"),
        (b"\x96\x00\x00\x00\x00\x00\x00\x00\x7f", "the pickle instruction"),
        (b"I" + b"9" * 5000 + b"\n", "the pickle instruction b'I'"),
        (b"}(K\x01K\x02\x86K\x03u", "sets a tuple in a dict"),
        (b"ctorch\nSize\n(" + b"K\x01" * 1000 + b"t\x85R", "no list of sizes"),
    ],
)
def test_only_the_names_and_instructions_of_dcp_are_followed(instructions: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(_metadata_with(instructions))
    with pytest.raises(CheckpointError, match=says):
        load_dcp_pickle(path)


def test_a_few_bytes_cannot_ask_for_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for claim in (
        b"Nr\xff\xff\xff\xff",
        b"X\xff\xff\xff\x7fabc",
        b"\x8b\xff\xff\xff\x7f",
        b"\x95" + b"\xff" * 7 + b"\x7f",
    ):
        path.write_bytes(b"\x80\x04" + claim + b".")
        with pytest.raises(CheckpointError):
            load_dcp_pickle(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_metadata_cut_off_anywhere_or_with_flipped_bytes_is_an_error_or_still_metadata(folder: Path) -> None:
    path = folder / ".metadata"
    data = path.read_bytes()
    for end in range(0, len(data), 7):
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointError):
            read_dcp_folder(folder)
    generator = random.Random(0)
    refused = 0
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(generator.randint(1, 3)):
            broken[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(bytes(broken))
        try:
            read_dcp_folder(folder)
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_metadata_that_is_missing_is_a_save_that_was_cut_off(folder: Path) -> None:
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="DCP writes it last, so this save was cut off"):
        read_dcp_folder(folder)


# -- what the metadata says about files -------------------------------------------------------------------------------


def test_a_missing_and_a_cut_off_file_are_named_once(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"is cut off: it has {len(data) - 1} of {len(data)} bytes") as caught:
        read_dcp_folder(folder)
    assert len(caught.value.problems) == 1
    file.unlink()
    with pytest.raises(CheckpointError, match="distcp is missing; it holds parts of 7 of the values"):
        read_dcp_folder(folder)
    file.write_bytes(data)
    read_dcp_folder(folder)


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "link.distcp"])
def test_files_outside_of_the_folder_are_not_read(name: str, folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    outside = folder.parent / "outside.distcp"
    outside.write_bytes(file.read_bytes())
    (folder / "link.distcp").symlink_to(outside)
    metadata = load_metadata(folder)
    metadata.storage_data = {
        index: _StorageInfo(name, info.offset, info.length) for index, info in metadata.storage_data.items()
    }
    write_metadata(folder, metadata)
    with pytest.raises(CheckpointError, match="lies outside of it"):
        read_dcp_folder(folder)


def test_a_link_to_metadata_outside_is_not_followed(folder: Path) -> None:
    (folder / ".metadata").rename(folder.parent / "elsewhere")
    (folder / ".metadata").symlink_to(folder.parent / "elsewhere")
    with pytest.raises(CheckpointError, match="lies outside of it"):
        read_dcp_folder(folder)


def _two_chunks(second_offset: int, second_rows: int = 2) -> Metadata:
    properties = TensorProperties(dtype=torch.float32)
    chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3])),
        ChunkStorageMetadata(torch.Size([second_offset, 0]), torch.Size([second_rows, 3])),
    ]
    return Metadata(
        state_dict_metadata={"w": TensorStorageMetadata(properties, torch.Size([4, 3]), chunks)},
        planner_data={"w": ("w",)},
        storage_data={
            MetadataIndex("w", chunk.offsets): _StorageInfo("data.distcp", index * 100, 100)
            for index, chunk in enumerate(chunks)
        },
    )


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (_two_chunks(1), "overlap"),
        (_two_chunks(2, 1), "hold 9 of 12 values"),
        (_two_chunks(3, 2), "is not whole"),
        (_two_chunks(2, 50), "600 bytes of w are said to lie in 100"),
    ],
)
def test_parts_that_do_not_make_up_the_tensor_are_found_before_reading(
    metadata: Metadata, says: str, tmp_path: Path
) -> None:
    (tmp_path / "data.distcp").write_bytes(b"\0" * 1000)
    write_metadata(tmp_path, _two_chunks(2))
    read_dcp_folder(tmp_path)
    write_metadata(tmp_path, metadata)
    with pytest.raises(CheckpointError, match=says):
        read_dcp_folder(tmp_path)


def test_only_the_parts_that_a_box_overlaps_are_read(tmp_path: Path) -> None:
    metadata = _two_chunks(2)
    for number, index in enumerate(list(metadata.storage_data)):
        path = tmp_path / f"__{number}_0.distcp"
        torch.save(torch.full((2, 3), float(number)), path)
        metadata.storage_data[index] = _StorageInfo(path.name, 0, path.stat().st_size)
    write_metadata(tmp_path, metadata)
    source = DcpSource(read_dcp_folder(tmp_path), {"w": "w"})
    (tmp_path / "__1_0.distcp").write_bytes(b"\0" * 2000)
    box = torch.empty(2, 2)
    source.read("w", (0, 1), box)
    assert torch.equal(box, torch.zeros(2, 2))
    with pytest.raises(CheckpointError, match="__1_0.distcp is not of the form"):
        source.read("w", (1, 1), box)
    source.close()


def test_a_part_that_lies_in_no_file_is_named(folder: Path) -> None:
    metadata = load_metadata(folder)
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "model.a.weight"}
    write_metadata(folder, metadata)
    with pytest.raises(CheckpointError, match=r"the part of model.a.weight at \[0, 0\] is in no file"):
        read_dcp_folder(folder)


def test_a_file_that_holds_another_tensor_than_the_metadata_says_is_found_when_it_is_read(folder: Path) -> None:
    metadata = load_metadata(folder)
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    metadata.storage_data = {
        index: places["model.turned"] if index.fqn == "model.a.weight" else info
        for index, info in metadata.storage_data.items()
    }
    write_metadata(folder, metadata)
    source = DcpSource(read_dcp_folder(folder), {"a": "model.a.weight"})
    with pytest.raises(CheckpointError, match=r"holds \[6, 4\] torch.float64 where \[4, 6\] torch.float32 of a should"):
        read_whole(source, "a")


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: setattr(metadata, "state_dict_metadata", None),
        lambda metadata: setattr(metadata, "storage_data", [1, 2]),
        lambda metadata: metadata.state_dict_metadata.update(x=3),
        lambda metadata: metadata.state_dict_metadata.update({5: BytesStorageMetadata()}),
        lambda metadata: setattr(metadata.state_dict_metadata["model.a.weight"], "size", (4, -6)),
        lambda metadata: setattr(metadata.state_dict_metadata["model.a.weight"], "size", torch.Size([24])),
        lambda metadata: setattr(metadata.state_dict_metadata["model.a.weight"], "chunks", None),
        lambda metadata: setattr(metadata.state_dict_metadata["model.a.weight"], "properties", None),
        lambda metadata: metadata.planner_data.update({"model.a.weight": ("model", (1, 2))}),
    ],
)
def test_metadata_of_another_form_is_an_error(change: Any, folder: Path) -> None:
    metadata = load_metadata(folder)
    change(metadata)
    write_metadata(folder, metadata)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_dcp_folder(folder)


def test_a_folder_written_through_an_extension_is_refused_by_name(folder: Path) -> None:
    metadata = load_metadata(folder)
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd/1"]
    write_metadata(folder, metadata)
    with pytest.raises(CheckpointError, match="written through a DCP extension"):
        read_dcp_folder(folder)


@pytest.mark.parametrize("what", ["tensor", "value"])
def test_a_command_inside_of_a_distcp_file_is_refused_and_not_run(what: str, folder: Path, tmp_path: Path) -> None:
    import os

    victim = tmp_path / "ran"
    (file,) = folder.glob("*.distcp")
    begin = file.stat().st_size
    with open(file, "ab") as stream:
        torch.save(Attack(os.system, f"touch {victim}"), stream)
    metadata = load_metadata(folder)
    key = "model.a.weight" if what == "tensor" else "optimizer.param_groups.0.lr"
    (index,) = (index for index in metadata.storage_data if index.fqn == key)
    metadata.storage_data[index] = _StorageInfo(file.name, begin, file.stat().st_size - begin)
    write_metadata(folder, metadata)
    content = read_dcp_folder(folder)
    with pytest.raises(CheckpointError, match=r"asks for \w+\.system.* nothing of it was run"):
        if what == "tensor":
            read_whole(DcpSource(content, {"a": key}), "a")
        else:
            read_value(content, key)
    assert not victim.exists()
