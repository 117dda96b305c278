"""The image column of a dataset as lists of ``{path, bytes}``, without decoding and without Python for stored bytes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp.data.images.references import as_list, is_url, read_reference

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, Features

_BATCH = 200


@functools.cache
def reader_version() -> str:
    """Return a hash of the code that reads rows, as an argument of what `datasets` keeps on disk.

    `datasets` knows a function of a package by its name only: after an upgrade it would give the rows, and the
    problems, that the old code found.
    """
    import xxhash

    sources = sorted(Path(__file__).parent.glob("*.py"))
    return xxhash.xxh3_64_hexdigest(b"".join(path.read_bytes() for path in sources))


def undecoded(dataset: Dataset) -> Dataset:
    """Return `dataset` with every image feature kept as path and bytes, wherever it lies in a row.

    Decoding here would open each picture once more, turn every broken one into an error without a row, and hand PIL
    objects to Arrow, which writes them back as PNG.
    """
    features = {name: _without_decoding(feature) for name, feature in dataset.features.items()}
    changed = [name for name, feature in dataset.features.items() if features[name] != feature]
    for name in changed:
        dataset = dataset.cast_column(name, features[name])
    return dataset


def _without_decoding(feature: Any) -> Any:
    from datasets import Audio, Image, Video
    from datasets.features import LargeList, List

    if isinstance(feature, Image | Audio | Video):
        return type(feature)(decode=False)
    if isinstance(feature, List):
        return List(_without_decoding(feature.feature), length=feature.length)
    if isinstance(feature, LargeList):
        return LargeList(_without_decoding(feature.feature))
    if isinstance(feature, dict):
        return {name: _without_decoding(part) for name, part in feature.items()}
    return feature


def holds_bytes(dataset: Dataset, column: str) -> bool:
    """Return whether a column stores pictures themselves, as one struct or a list of structs with ``bytes``."""
    import pyarrow as pa

    kind = dataset.features.arrow_schema.field(column).type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0


def image_features() -> Any:
    """Return the feature of the column ``images``."""
    from datasets import List, Value

    return List({"path": Value("string"), "bytes": Value("binary")})


def list_stored_images(dataset: Dataset, column: str, folder: Path) -> Dataset:
    """Return a dataset with the one column ``images``, made of a column that stores bytes.

    The bytes are passed on by Arrow, batch by batch: a set of pictures does not fit into memory, and a million of them
    should not become Python objects twice.
    """
    from datasets import Features

    return (
        dataset.select_columns([column])
        .with_format("arrow")
        .map(
            _wrap_batch,
            batched=True,
            batch_size=_BATCH,
            remove_columns=[column],
            fn_kwargs={"column": column, "folder": str(folder), "reader": reader_version()},
            features=Features({"images": image_features()}),
            desc="Reading images",
        )
        .with_format(None)
    )


def _wrap_batch(table: pa.Table, column: str, folder: str, reader: str) -> pa.Table:
    import pyarrow as pa

    values = table.column(column).combine_chunks()
    rows = values.chunk(0) if isinstance(values, pa.ChunkedArray) else values
    images = _wrap(rows) if _all_hold_bytes(rows) else _resolve(rows, Path(folder))
    return pa.table({"images": images})


def _stored(rows: pa.Array) -> tuple[pa.Array, Any]:
    """Return the structs of a batch, flat, and where each row's begin."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(rows.type):
        counts = pc.cast(pc.is_valid(rows), pa.int32())
        return rows.drop_null(), counts
    return rows.flatten(), pc.fill_null(pc.cast(pc.list_value_length(rows), pa.int32()), 0)


def _all_hold_bytes(rows: pa.Array) -> bool:
    flat, _ = _stored(rows)
    return flat.null_count == 0 and flat.field("bytes").null_count == 0


def _wrap(rows: pa.Array) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    flat, counts = _stored(rows)
    paths = flat.field("path") if flat.type.get_field_index("path") >= 0 else pa.nulls(len(flat), pa.string())
    offsets = np.concatenate([[0], np.cumsum(counts.to_numpy(zero_copy_only=False))]).astype("int32")
    structs = pa.StructArray.from_arrays(
        [paths.cast(pa.string()), flat.field("bytes").cast(pa.binary())], names=["path", "bytes"]
    )
    return pa.ListArray.from_arrays(pa.array(offsets), structs)


def _resolve(rows: pa.Array, folder: Path) -> pa.Array:
    """Rows of which some hold a path only: made absolute one by one. What cannot be read is said when it is opened."""
    import pyarrow as pa

    kind = pa.list_(pa.struct([("path", pa.string()), ("bytes", pa.binary())]))
    lists = []
    for value in rows.to_pylist():
        references = [read_reference(item, folder)[0] for item in as_list(value)]
        lists.append([reference or {"path": None, "bytes": None} for reference in references])
    return pa.array(lists, type=kind)


def count_images(dataset: Dataset) -> list[int]:
    """Return how many entries ``images`` has in each row, read from Arrow's offsets."""
    import pyarrow.compute as pc

    counts: list[int] = []
    for table in dataset.select_columns(["images"]).with_format("arrow").iter(batch_size=1000):
        counts += pc.list_value_length(table.column("images")).to_pylist()
    return counts


def list_paths(dataset: Dataset) -> list[list[str]]:
    """Return the paths of each row's images that are not stored in the dataset itself."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows: list[list[str]] = []
    for table in dataset.select_columns(["images"]).with_format("arrow").iter(batch_size=1000):
        column = table.column("images").combine_chunks()
        lists = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        flat = lists.flatten()
        paths = pc.if_else(pc.is_null(flat.field("bytes")), flat.field("path"), None).to_pylist()
        counts = pc.list_value_length(lists).to_pylist()
        taken = iter(paths)
        rows += [[path for path in (next(taken) for _ in range(count or 0)) if path is not None] for count in counts]
    return rows


def split_urls(paths: list[list[str]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return (files, URLs), each once, with the first row that names it."""
    files: dict[str, int] = {}
    urls: dict[str, int] = {}
    for index, row in enumerate(paths):
        for path in row:
            (urls if is_url(path) else files).setdefault(path, index)
    return files, urls


def row_features(*, with_answers: bool) -> Features:
    """Return the features of a dataset after reading, but for the images."""
    from datasets import Features, List, Value

    turn = {"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})}
    features = {"messages": List(turn), "id": Value("string"), "problem": Value("string"), "detail": Value("string")}
    if with_answers:
        features["answers"] = List(Value("string"))
    return Features(features)
