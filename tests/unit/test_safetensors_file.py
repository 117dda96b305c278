"""Safetensors files: what is written comes back, others read it, and a header is believed only when it adds up."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage import safetensors_file
from hf_fsdp.storage.files import hash_file
from hf_fsdp.storage.safetensors_file import (
    DTYPES,
    OpenFiles,
    TensorToWrite,
    read_box,
    read_header,
    write_safetensors,
)

CASTABLE = [dtype for dtype in DTYPES.values() if dtype is not torch.complex64]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Values whose every bit counts, so that an equal tensor is equal to the bit."""
    generator = torch.Generator().manual_seed(0)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def whole(name: str, tensor: torch.Tensor) -> TensorToWrite:
    return TensorToWrite(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def part(name: str, tensor: torch.Tensor, box: tuple[slice, ...]) -> TensorToWrite:
    values = tensor[box]
    offsets = tuple(item.start or 0 for item in box)
    return TensorToWrite(name, tensor.dtype, tuple(values.shape), lambda: values, offsets, tuple(tensor.shape))


def read(path: Path, name: str, offsets: tuple[int, ...], out: torch.Tensor) -> int:
    files = OpenFiles()
    try:
        return read_box(files.descriptor(path), read_header(path).entries[name], offsets, out)
    finally:
        files.close()


def write_raw(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# -- round trips ------------------------------------------------------------------------------------------------------


def test_every_dtype_comes_back_to_the_bit_here_and_in_the_safetensors_package(tmp_path: Path) -> None:
    shapes = {"matrix": (3, 5), "scalar": (), "empty": (0, 4), "none_wide": (4, 0), "one": (1,), "deep": (2, 3, 2)}
    tensors = {
        f"{name}.{str(dtype).removeprefix('torch.')}": random_tensor(dtype, shape)
        for name, shape in shapes.items()
        for dtype in DTYPES.values()
    }
    path = tmp_path / "all.safetensors"
    record = write_safetensors(path, [whole(name, tensor) for name, tensor in tensors.items()], {"a": "b"})

    assert record == hash_file(path)
    header = read_header(path)
    assert header.metadata == {"format": "pt", "a": "b"} and header.entries.keys() == tensors.keys()
    theirs = safetensors.torch.load_file(path)
    for name, tensor in tensors.items():
        out = torch.empty_like(tensor)
        assert read(path, name, (0,) * tensor.dim(), out) == tensor.numel()
        for other in (out, theirs[name]):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape
            assert other.flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8)), name


def test_a_file_of_the_safetensors_package_is_read(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    tensors = {"a": random_tensor(torch.bfloat16, (3, 4)), "b": random_tensor(torch.int64, (2,))}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})

    for name, tensor in tensors.items():
        out = torch.empty_like(tensor)
        read(path, name, (0,) * tensor.dim(), out)
        assert out.equal(tensor)


def test_tensors_are_cast_when_written_and_need_not_be_contiguous(tmp_path: Path) -> None:
    path = tmp_path / "cast.safetensors"
    values = torch.randn(4, 6, requires_grad=True)
    write_safetensors(path, [TensorToWrite("t", torch.bfloat16, (6, 4), lambda: values.t())])

    assert safetensors.torch.load_file(path)["t"].equal(values.detach().t().bfloat16())


def test_a_tensor_that_changed_its_shape_is_not_written_as_another(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"w changed its shape from \(3,\) to \(2,\)"):
        write_safetensors(tmp_path / "a", [TensorToWrite("w", torch.float32, (3,), lambda: torch.zeros(2))])
    with pytest.raises(ValueError, match="w is in one file twice"):
        write_safetensors(tmp_path / "b", [whole("w", torch.zeros(2))] * 2)


# -- boxes ------------------------------------------------------------------------------------------------------------

BOXES: list[tuple[slice, ...]] = [
    (slice(0, 7), slice(0, 5), slice(0, 6)),
    (slice(2, 5), slice(0, 5), slice(0, 6)),
    (slice(0, 7), slice(1, 4), slice(0, 6)),
    (slice(0, 7), slice(0, 5), slice(2, 3)),
    (slice(3, 4), slice(2, 5), slice(1, 6)),
    (slice(6, 7), slice(4, 5), slice(5, 6)),
]


@pytest.mark.parametrize("piece_bytes", [16, 100, 2**24])
@pytest.mark.parametrize("box", BOXES)
def test_any_box_of_a_tensor_in_parts_is_read_whatever_fits_in_memory_at_once(
    box: tuple[slice, ...], piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random_tensor(torch.float32, (7, 5, 6))
    parts = [
        (slice(0, 3), slice(0, 5), slice(0, 6)),
        (slice(3, 7), slice(0, 2), slice(0, 6)),
        (slice(3, 7), slice(2, 5), slice(0, 4)),
        (slice(3, 7), slice(2, 5), slice(4, 6)),
    ]
    monkeypatch.setattr(safetensors_file, "PIECE_BYTES", piece_bytes)
    files = [tmp_path / f"{index}.safetensors" for index in range(len(parts))]
    for file, held in zip(files, parts, strict=True):
        write_safetensors(file, [part("t", tensor, held)])
    expected = tensor[box]
    offsets = tuple(item.start for item in box)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full(expected.shape, -1, dtype=dtype)
        strided = torch.full((*expected.shape[:-1], 2 * expected.shape[-1]), -1, dtype=dtype)[..., ::2]
        assert sum(read(file, "t", offsets, out) for file in files) == expected.numel()
        assert sum(read(file, "t", offsets, strided) for file in files) == expected.numel()
        assert out.equal(expected.to(dtype)) and strided.equal(expected.to(dtype))


@pytest.mark.parametrize("stored", CASTABLE, ids=str)
def test_values_are_cast_as_torch_casts_them(stored: torch.dtype, tmp_path: Path) -> None:
    tensor = random_tensor(stored, (4, 3))
    tensor = tensor.abs() if stored.is_signed else tensor
    path = tmp_path / "t.safetensors"
    write_safetensors(path, [whole("t", tensor)])
    for wanted in CASTABLE:
        out = torch.empty((4, 3), dtype=wanted)
        read(path, "t", (0, 0), out)
        assert out.flatten().view(torch.uint8).equal(tensor.to(wanted).flatten().view(torch.uint8)), wanted


@pytest.mark.parametrize(
    ("shape", "box", "dtype"),
    [
        ((64, 4096), (slice(10, 50), slice(0, 4096)), torch.bfloat16),  # cast on the way
        ((64, 4096), (slice(0, 64), slice(5, 4000)), torch.float32),  # columns
        ((2, 512, 256), (slice(0, 2), slice(0, 512), slice(3, 200)), torch.float32),  # rows larger than a piece
        ((1, 2**18), (slice(0, 1), slice(2**17, 2**18)), torch.float32),  # one long row
    ],
)
def test_no_buffer_is_larger_than_a_piece(
    shape: tuple[int, ...],
    box: tuple[slice, ...],
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = random_tensor(torch.float32, shape)
    path = tmp_path / "t.safetensors"
    write_safetensors(path, [whole("t", tensor)])
    out = torch.zeros(tensor[box].shape, dtype=dtype)
    largest = 0
    original = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal largest
        made = original(*args, **kwargs)
        largest = max(largest, made.numel() * made.element_size())
        return made

    piece_bytes = 2**16
    monkeypatch.setattr(safetensors_file, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(torch, "empty", empty)
    read(path, "t", tuple(item.start for item in box), out)

    assert out.equal(tensor[box].to(dtype))
    assert largest <= piece_bytes


def test_no_more_files_are_open_than_a_process_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "MAX_OPEN_FILES", 3)
    files = OpenFiles()
    paths = [tmp_path / str(index) for index in range(5)]
    for path in paths:
        path.write_bytes(b"x")
        files.descriptor(path)
        assert len(files.descriptors) <= 3
    files.close()
    assert not files.descriptors


def test_a_file_that_was_cut_off_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, [whole("t", torch.ones(1000))])
    header = read_header(path)
    with open(path, "rb+") as stream:
        stream.truncate(2000)
    files = OpenFiles()
    with pytest.raises(CheckpointError, match="ended while it was read"):
        read_box(files.descriptor(path), header.entries["t"], (0,), torch.empty(1000))
    files.close()


# -- torch's reader ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_dcp_reads_our_shards(tmp_path: Path) -> None:
    rows, columns, plain = torch.randn(7, 4), torch.randn(6, 5).bfloat16(), torch.randn(3)
    write_safetensors(
        tmp_path / "shard-00001-model-00001-of-00001.safetensors",
        [part("rows", rows, (slice(0, 4), slice(0, 4))), part("columns", columns, (slice(0, 6), slice(0, 2)))],
    )
    write_safetensors(
        tmp_path / "shard-00002-model-00001-of-00001.safetensors",
        [
            part("rows", rows, (slice(4, 7), slice(0, 4))),
            part("columns", columns, (slice(0, 6), slice(2, 5))),
            whole("plain", plain),
        ],
    )
    state = {"rows": torch.zeros(7, 4), "columns": torch.zeros(6, 5).bfloat16(), "plain": torch.zeros(3)}

    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)

    assert state["rows"].equal(rows) and state["columns"].equal(columns) and state["plain"].equal(plain)


# -- hostile headers --------------------------------------------------------------------------------------------------

_METADATA = {"DCP_SHARDING_INFO": json.dumps({"t": {"saved_offsets": [3], "whole_shape": [4]}})}
HOSTILE: dict[str, tuple[Any, bytes, str]] = {
    "overlapping": ({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, bytes(12), "do not follow"),
    "same bytes": ({"a": entry([2], [0, 8]), "b": entry([2], [0, 8])}, bytes(8), "do not follow"),
    "gap": ({"a": entry([1], [0, 4]), "b": entry([1], [8, 12])}, bytes(12), "do not follow"),
    "beyond the end": ({"a": entry([4], [0, 16])}, bytes(8), "its header describes"),
    "trailing bytes": ({"a": entry([1], [0, 4])}, bytes(9), "its header describes"),
    "backwards": ({"a": entry([1], [4, 0])}, bytes(4), "bytes, which is not"),
    "size and shape": ({"a": entry([3], [0, 8])}, bytes(8), "bytes, which is not"),
    "negative size": ({"a": entry([-2], [0, 8])}, bytes(8), "is not a size"),
    "two negative sizes": ({"a": entry([-2, -1], [0, 8])}, bytes(8), "is not a size"),
    "bool as size": ({"a": entry([True, 2], [0, 8])}, bytes(8), "is not a size"),
    "float as size": ({"a": entry([2.0], [0, 8])}, bytes(8), "is not a size"),
    "huge size": ({"a": entry([2**70, 0], [0, 0])}, b"", "is not a size"),
    "text as shape": ({"a": entry("12", [0, 8])}, bytes(8), "is not a list of sizes"),
    "many dimensions": ({"a": entry([1] * 17, [0, 4])}, bytes(4), "is not a list of sizes"),
    "three offsets": ({"a": entry([1], [0, 4, 4])}, bytes(4), "ValueError"),
    "unknown dtype": ({"a": entry([1], [0, 4], "F33")}, bytes(4), "unknown dtype 'F33'"),
    "list as dtype": ({"a": entry([1], [0, 4], ["F32"])}, bytes(4), "TypeError"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4), "KeyError"),
    "entry is text": ({"a": "F32"}, b"", "TypeError"),
    "duplicate names": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', b"x", "twice"),
    "not a mapping": ([1, 2], b"", "not a mapping"),
    "not JSON": (b"{" * 8, b"", "cannot be read"),
    "not text": (b"\xff\xfe\x00\x01", b"", "cannot be read"),
    "deep JSON": (b'{"a":' + b" " * 500_000 + b"[" * 50_000 + b"]" * 50_000 + b"}", b"", "cannot be read"),
    "very many lists": (b'{"a":[' + b"[]," * 100_000 + b"0]}", b"", "more lists than tensors"),
    "metadata is a list": ({"__metadata__": ["x"]}, b"", "not a mapping to text"),
    "metadata holds numbers": ({"__metadata__": {"x": 1}}, b"", "not a mapping to text"),
    "sharding is no JSON": ({"__metadata__": {"DCP_SHARDING_INFO": "{"}}, b"", "cannot be read"),
    "sharding is a list": ({"__metadata__": {"DCP_SHARDING_INFO": "[]"}, "t": entry([1], [0, 4])}, bytes(4), "cannot"),
    "part outside": ({"__metadata__": _METADATA, "t": entry([2], [0, 8])}, bytes(8), "outside of its whole tensor"),
    "part of other dims": ({"__metadata__": _METADATA, "t": entry([1, 1], [0, 4])}, bytes(4), "dimensions"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_does_not_describe_its_file_is_an_error(name: str, tmp_path: Path) -> None:
    header, data, message = HOSTILE[name]
    path = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match="is cut off or damaged") as caught:
        read_header(path)
    assert message in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9, 3, 0])
def test_a_wrong_header_length_is_an_error_and_allocates_nothing(length: int, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"a": entry([1], [0, 4])}, bytes(4), length=length)
    with pytest.raises(CheckpointError, match="is cut off or damaged"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7, 8, 9, 60])
def test_a_truncated_file_is_an_error(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, [whole("t", torch.ones(10))])
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="is cut off or damaged"):
        read_header(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="x is missing"):
        read_header(tmp_path / "x")
