"""Whole tensors by name: every element once, names that stay inside their folder, hub snapshots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.files import safe_join, write_json
from hf_fsdp.storage.safetensors_file import TensorEntry, TensorToWrite, write_safetensors
from hf_fsdp.storage.tensor_source import (
    EmptySource,
    JoinedSource,
    SafetensorsSource,
    TensorInfo,
    check_coverage,
    hf_folder_source,
    read_whole,
)


def write(path: Path, **tensors: torch.Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, [TensorToWrite(n, t.dtype, tuple(t.shape), t.detach) for n, t in tensors.items()])
    return path


def write_rows(path: Path, name: str, tensor: torch.Tensor, start: int, end: int, *, says_whole: bool = True) -> Path:
    values = tensor[start:end]
    offsets = (start, *[0] * (tensor.dim() - 1))
    whole = tuple(tensor.shape) if says_whole else tuple(values.shape)
    item = TensorToWrite(name, tensor.dtype, tuple(values.shape), lambda: values, offsets, whole)
    write_safetensors(path, [item])
    return path


def box(offsets: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> TensorEntry:
    return TensorEntry("t", dtype, shape, offsets, 0, 0)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_parts_of_uneven_and_empty_shards_are_one_tensor(tmp_path: Path) -> None:
    tensor = torch.randn(5, 3)
    bounds = [(0, 2), (2, 4), (4, 5), (5, 5)]
    files = [write_rows(tmp_path / f"{i}.safetensors", "t", tensor, *ends) for i, ends in enumerate(bounds)]
    source = SafetensorsSource(files)

    assert dict(source.tensors) == {"t": TensorInfo(torch.float32, (5, 3))}
    assert read_whole(source, "t").equal(tensor)
    out = torch.empty(3, 2, dtype=torch.float64)
    source.read("t", (1, 1), out)
    assert out.equal(tensor[1:4, 1:].double())
    source.close()


@pytest.mark.parametrize("missing", range(3))
def test_a_missing_part_is_an_error_that_names_the_tensor(missing: int, tmp_path: Path) -> None:
    tensor = torch.randn(6, 3)
    files = [write_rows(tmp_path / f"{i}.safetensors", "layer.w", tensor, 2 * i, 2 * i + 2) for i in range(3)]
    with pytest.raises(CheckpointError, match=r"layer\.w \[6, 3\] is not whole: its 2 parts hold 12 of 18 values"):
        SafetensorsSource(file for index, file in enumerate(files) if index != missing)


def test_a_part_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    tensor = torch.randn(6, 3)
    ends = [(0, 3), (0, 3)]  # as many values as the whole has
    files = [write_rows(tmp_path / f"{i}.safetensors", "w", tensor, *end) for i, end in enumerate(ends)]
    with pytest.raises(CheckpointError, match="18 of 18 values and overlap"):
        SafetensorsSource(files)


def test_parts_of_two_tensors_are_not_joined(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.safetensors", "w", torch.randn(4, 3), 0, 2)
    second = write_rows(tmp_path / "b.safetensors", "w", torch.randn(6, 3), 2, 6)
    with pytest.raises(CheckpointError, match="parts of w do not belong to one tensor"):
        SafetensorsSource([first, second])
    third = write_rows(tmp_path / "c.safetensors", "w", torch.randn(4, 3).bfloat16(), 2, 4)
    with pytest.raises(CheckpointError, match="parts of w have different dtypes"):
        SafetensorsSource([first, third])


@pytest.mark.parametrize(
    ("parts", "is_covered"),
    [
        ([box((0, 0), (4, 6))], True),
        ([box((0, 0), (4, 3)), box((0, 3), (4, 3))], True),
        ([box((0, 0), (2, 6)), box((2, 0), (2, 4)), box((2, 4), (2, 2))], True),
        ([box((2, 0), (2, 6)), box((0, 0), (2, 6)), box((4, 0), (0, 6))], True),
        ([box((0, 0), (3, 6)), box((2, 0), (1, 6))], False),
        ([box((0, 0), (4, 4)), box((0, 2), (4, 2))], False),
        ([box((0, 0), (4, 3)), box((1, 3), (4, 3))], False),
        ([box((0, 0), (2, 6)), box((1, 0), (2, 3)), box((2, 3), (2, 3))], False),
        ([box((0, 0), (4, 6), torch.float16)], False),
        ([], False),
    ],
)
def test_coverage(parts: list[TensorEntry], is_covered: bool) -> None:
    assert (check_coverage("t", TensorInfo(torch.float32, (4, 6)), parts) is None) == is_covered


def test_coverage_of_scalars_and_tensors_without_values() -> None:
    scalar, empty = TensorInfo(torch.float32, ()), TensorInfo(torch.float32, (0, 3))
    assert check_coverage("t", scalar, [box((), ())]) is None
    assert check_coverage("t", scalar, [box((), ()), box((), ())]) is not None
    assert check_coverage("t", empty, [box((0, 0), (0, 3))]) is None


def test_the_parts_of_a_thousand_ranks_are_checked_quickly() -> None:
    """Pair by pair it would be half a million comparisons for every tensor."""
    import time

    parts = [box((2 * index, 0), (2, 3)) for index in range(2048)]
    started = time.process_time()
    for _ in range(20):
        assert check_coverage("t", TensorInfo(torch.float32, (4096, 3)), parts) is None
    assert time.process_time() - started < 5


def test_expected_tensors_that_are_not_there_and_others_that_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", a=torch.zeros(2), b=torch.zeros(3))
    info = TensorInfo(torch.float32, (2,))
    with pytest.raises(CheckpointError, match="c is in the manifest and in no file"):
        SafetensorsSource([path], expected={"a": info, "b": TensorInfo(torch.float32, (3,)), "c": info})
    with pytest.raises(CheckpointError, match="b is in a file and not in the manifest"):
        SafetensorsSource([path], expected={"a": info})
    with pytest.raises(CheckpointError, match=r"b is \[3\] torch.float32 in the files and \[2\]"):
        SafetensorsSource([path], expected={"a": info, "b": info})


def test_a_box_beyond_the_tensor_is_an_error(tmp_path: Path) -> None:
    source = SafetensorsSource([write(tmp_path / "a.safetensors", a=torch.arange(4.0))])
    with pytest.raises(CheckpointError, match=r"a: 1 of 2 values at \[3\] are in the files"):
        source.read("a", (3,), torch.empty(2))
    with pytest.raises(CheckpointError, match=r"a \[4\] was asked for as \[2, 2\] at \[0, 0\]"):
        source.read("a", (0, 0), torch.empty(2, 2))
    source.close()


def test_names_are_mapped_and_sources_joined(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", a=torch.zeros(2))
    first = SafetensorsSource([path], renames={path: {"a": "model.a"}})
    second = SafetensorsSource([write(tmp_path / "b.safetensors", b=torch.ones(2), **{"model.a": torch.ones(2)})])
    joined = JoinedSource([first, EmptySource(), second])

    assert set(joined.tensors) == {"model.a", "b"}
    assert read_whole(joined, "model.a").equal(torch.zeros(2)) and read_whole(joined, "b").equal(torch.ones(2))
    joined.close()


# -- folders ----------------------------------------------------------------------------------------------------------


def write_index(folder: Path, weight_map: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def test_one_file_and_an_index_are_read(tmp_path: Path) -> None:
    write(tmp_path / "one" / "model.safetensors", a=torch.ones(2))
    write(tmp_path / "two" / "x-1.safetensors", a=torch.ones(2))
    write(tmp_path / "two" / "deep" / "x-2.safetensors", b=torch.zeros(3))
    write_index(tmp_path / "two", {"a": "x-1.safetensors", "b": "deep/x-2.safetensors"})
    for folder, names in (("one", {"a"}), ("two", {"a", "b"})):
        source = hf_folder_source(tmp_path / folder)
        assert set(source.tensors) == names and read_whole(source, "a").equal(torch.ones(2))
        source.close()


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no model.safetensors"):
        hf_folder_source(tmp_path)


def test_a_name_that_its_file_does_not_hold_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", a=torch.ones(2))
    write_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    with pytest.raises(CheckpointError, match="names 'b', which is in none of its files"):
        hf_folder_source(tmp_path)
    write_index(tmp_path, {"a": "gone.safetensors"})
    with pytest.raises(CheckpointError, match=r"gone\.safetensors is missing"):
        hf_folder_source(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", "..\\x", "", "a\0b"])
def test_a_name_in_the_index_cannot_leave_the_folder(name: str, tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", a=torch.ones(2))
    write_index(tmp_path / "model", {"a": name})
    with pytest.raises(CheckpointError, match="lies outside of it"):
        hf_folder_source(tmp_path / "model")


def test_a_link_cannot_leave_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "secret" / "x.safetensors", a=torch.ones(2))
    folder = write_index(tmp_path / "model", {"a": "link.safetensors"})
    (folder / "link.safetensors").symlink_to(tmp_path / "secret" / "x.safetensors")
    with pytest.raises(CheckpointError, match="lies outside of it"):
        hf_folder_source(folder)
    (folder / "link.safetensors").unlink()
    (folder / "inside").mkdir()
    write(folder / "inside" / "x.safetensors", a=torch.ones(2))
    (folder / "link.safetensors").symlink_to("inside/x.safetensors")
    source = hf_folder_source(folder)
    assert read_whole(source, "a").equal(torch.ones(2))
    source.close()


def test_a_snapshot_of_the_hubs_cache_is_a_folder_of_links(tmp_path: Path) -> None:
    write(tmp_path / "models--a--b" / "blobs" / "0123", a=torch.ones(2))
    write(tmp_path / "models--a--b" / "secret" / "x", a=torch.ones(2))
    snapshot = write_index(tmp_path / "models--a--b" / "snapshots" / "main", {"a": "x.safetensors"})
    (snapshot / "x.safetensors").symlink_to("../../blobs/0123")
    source = hf_folder_source(snapshot)
    assert read_whole(source, "a").equal(torch.ones(2))
    source.close()
    (snapshot / "x.safetensors").unlink()
    (snapshot / "x.safetensors").symlink_to("../../secret/x")
    with pytest.raises(CheckpointError, match="lies outside of it"):
        hf_folder_source(snapshot)


@pytest.mark.parametrize("content", ["[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{", "[" * 100_000])
def test_an_index_of_another_kind_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"has no weight_map|is not valid JSON"):
        hf_folder_source(tmp_path)


def test_safe_join_returns_names_inside(tmp_path: Path) -> None:
    assert safe_join(tmp_path, "a/b.json") == tmp_path / "a" / "b.json"
    assert json.dumps(str(safe_join(tmp_path, "..a"))) == json.dumps(str(tmp_path / "..a"))
