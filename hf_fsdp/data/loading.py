"""Examples from a hub dataset, a local file or a local folder, with errors that name the file, line and repair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp.data.unreadable import check_json_start, explain_unreadable
from hf_fsdp.errors import DataError, nearest_names

if TYPE_CHECKING:
    from datasets import Dataset

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_SUFFIXES = ", ".join(_BUILDERS)
_SPLIT_NAMES = {"train": "train", "test": "test", "validation": "validation", "valid": "validation",
                "val": "validation", "dev": "validation", "eval": "test"}  # fmt: skip


def load_splits(name: str, *, config: str | None = None) -> dict[str, Dataset]:
    """Load every split of a dataset.

    Args:
        name: a hub id, a JSON, JSONL or Parquet file (one split, ``train``), or a folder: of such files, whose
            names say the split (``train.jsonl``, ``test-0001.parquet``; otherwise ``train``), of pictures, or one
            that ``save_to_disk`` wrote.
        config: the hub dataset's configuration, if it has several.

    Returns:
        Split name -> dataset, none of them empty.

    Raises:
        DataError: missing, empty, unreadable (with the line), of mixed file types, or gated.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        splits = _load_folder(path)
    elif path.is_file():
        splits = {"train": _load_files([path])}
    elif path.suffix.lower() in _BUILDERS or name.startswith((".", "/", "~")) or name.count("/") > 1:
        _raise_missing(name, path)
    else:
        splits = _load_hub(name, config)
    empty = [split for split, dataset in splits.items() if len(dataset) == 0]
    if empty:
        raise DataError(f"dataset {name!r} has no examples in split {empty[0]!r}", fix="give a dataset with examples")
    return splits


def select_eval_examples(
    splits: Mapping[str, Dataset],
    train_split: str,
    eval_split: str | None,
    *,
    eval_file: str | None = None,
    eval_fraction: float | None = None,
    seed: int = 42,
) -> tuple[Dataset, Dataset | None]:
    """Return (training, held-out) examples: held out from a file, a fraction of the training split, or a split.

    Args:
        splits: what `load_splits` returned.
        train_split: the split to train on.
        eval_split: the split to hold out when neither `eval_file` nor `eval_fraction` is given; None holds nothing
            out then.
        eval_file: a file or folder with the held-out examples.
        eval_fraction: share of the training split to hold out, above 0 and below 1; drawn with `seed`.
        seed: which examples are drawn.

    Raises:
        DataError: both ways at once, a fraction that leaves a side empty, or a split that does not exist.
    """
    train = pick_split(splits, train_split, "dataset_train_split")
    if eval_file and eval_fraction:
        raise DataError(
            f"eval_file={eval_file!r} and eval_fraction={eval_fraction} are two ways to hold examples out",
            fix="leave one of them out",
        )
    if eval_file:
        held_out = _load_eval_file(eval_file)
        return train, held_out.get(eval_split or "test") or next(iter(held_out.values()))
    if eval_fraction is not None:
        num_held_out = round(len(train) * eval_fraction)
        if not 0 < eval_fraction < 1 or not 0 < num_held_out < len(train):
            raise DataError(
                f"eval_fraction={eval_fraction} of {len(train)} training examples holds out {num_held_out}",
                fix=f"eval_fraction: {max(0.05, round(1 / max(len(train), 2), 4))}" if len(train) > 1 else "eval_file",
            )
        parts = train.train_test_split(test_size=num_held_out, seed=seed)
        return parts["train"], parts["test"]
    if eval_split is None:
        return train, None
    if eval_split == train_split:
        raise DataError(
            f"dataset_test_split={eval_split!r} is the training split: the loss on it would say nothing",
            fix="eval_fraction: 0.05",
        )
    if eval_split not in splits:
        raise DataError(
            f"dataset_test_split={eval_split!r} does not exist; the dataset has: {', '.join(splits)}",
            near=", ".join(nearest_names(eval_split, splits)) or None,
            fix="eval_fraction: 0.05   or   eval_file: FILE   or   eval_strategy: 'no'",
        )
    return train, splits[eval_split]


def _load_eval_file(eval_file: str) -> dict[str, Dataset]:
    """Load held-out examples; what is wrong with them is told by the key that they were given by."""
    try:
        return load_splits(eval_file)
    except DataError as error:
        problems = [
            replace(
                item, **{name: getattr(item, name).replace("dataset_name", "eval_file") for name in ("message", "fix")}
            )
            for item in error.problems
        ]
        raise DataError(problems) from error


def pick_split(splits: Mapping[str, Dataset], split: str, key: str) -> Dataset:
    """Return one split.

    Raises:
        DataError: it does not exist, naming those that do.
    """
    if split not in splits:
        near = nearest_names(split, splits) or list(splits)
        raise DataError(
            f"{key}={split!r} does not exist; the dataset has: {', '.join(splits)}", fix=f"{key}: {near[0]}"
        )
    return splits[split]


def _raise_missing(name: str, path: Path) -> None:
    parent = path.parent
    files = [child.name for child in parent.iterdir()] if parent.is_dir() else []
    near = [str(parent / child) for child in nearest_names(path.name, files)]
    if near:
        fix = f"dataset_name: {near[0]}"
    elif parent.is_dir():
        fix = f"give an existing {_SUFFIXES} file; {parent} has {len(files)} entries, none of a similar name"
    else:
        fix = f"give an existing {_SUFFIXES} file; the folder {parent} does not exist either"
    raise DataError(f"dataset_name={name!r}: there is no such file or folder", near=", ".join(near) or None, fix=fix)


def _load_folder(folder: Path) -> dict[str, Dataset]:
    from datasets import Dataset, load_from_disk

    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        loaded = load_from_disk(str(folder))
        return {"train": loaded} if isinstance(loaded, Dataset) else {str(k): v for k, v in loaded.items()}
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in _BUILDERS)
    if not files:
        from hf_fsdp.data.images.folders import holds_pictures, load_image_folder

        if holds_pictures(folder):
            return load_image_folder(folder)
        found = sorted({path.suffix or path.name for path in folder.iterdir()})
        raise DataError(
            f"dataset_name={str(folder)!r} holds no {_SUFFIXES} file and no pictures "
            f"(found: {', '.join(found) or 'nothing'})",
            fix=f"put {_SUFFIXES} files in it, or give one file",
        )
    builders = {_BUILDERS[path.suffix.lower()] for path in files}
    if len(builders) > 1:
        raise DataError(
            f"dataset_name={str(folder)!r} mixes JSON and Parquet files, so one schema cannot be read from it",
            near=", ".join(path.name for path in files[:4]),
            fix=f"keep one kind in the folder, or give one file: dataset_name: {files[0]}",
        )
    by_split: dict[str, list[Path]] = {}
    for path in files:
        words = path.stem.lower().replace("-", " ").replace("_", " ").replace(".", " ").split()
        split = next((_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES), "train")
        by_split.setdefault(split, []).append(path)
    return {split: _load_files(paths) for split, paths in by_split.items()}


def _load_files(files: list[Path]) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    for path in files:
        if path.suffix.lower() not in _BUILDERS:
            raise DataError(
                f"dataset_name={str(path)!r} is not a {_SUFFIXES} file", fix=f"convert it to one of: {_SUFFIXES}"
            )
        if path.stat().st_size == 0 or (path.stat().st_size < 4096 and not path.read_bytes().strip()):
            raise DataError(
                f"dataset_name={str(path)!r} is empty",
                fix='write one JSON object a line, e.g. {"messages": [{"role": "user", "content": "..."}, '
                '{"role": "assistant", "content": "..."}]}',
            )
    builder = _BUILDERS[files[0].suffix.lower()]
    if builder == "json":
        for path in files:
            check_json_start(path)
    try:
        return load_dataset(builder, data_files=[str(path) for path in files], split="train")
    except (DatasetGenerationError, ValueError) as error:
        for path in files:
            explain_unreadable(path, error)
        if "corresponds to no data" in str(error):
            raise DataError(
                f"dataset_name={str(files[0])!r} has no examples", fix="give a file with at least one example"
            ) from error
        raise DataError(
            f"dataset_name={str(files[0])!r} could not be read: {error.__cause__ or error}",
            fix="give every row the same columns, each of one type",
        ) from error


def _load_hub(name: str, config: str | None) -> dict[str, Dataset]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    page = f"https://huggingface.co/datasets/{name}"
    try:
        return {str(split): dataset for split, dataset in load_dataset(name, config).items()}
    except DatasetNotFoundError as error:
        if "gated" in str(error):
            raise DataError(
                f"dataset_name={name!r} is gated, and this account has no access to it yet",
                fix=f"accept its terms at {page}, then run: hf auth login",
            ) from error
        raise DataError(
            f"dataset_name={name!r}: no such file or folder here, and the hub knows no such dataset (or it is private)",
            fix=f"check the spelling at {page}, or give a {_SUFFIXES} file; for a private one run: hf auth login",
        ) from error
    except (ConnectionError, OSError) as error:
        raise DataError(
            f"dataset_name={name!r} is not in the local cache, and the hub cannot be reached "
            "(offline, or HF_HUB_OFFLINE is set)",
            fix=f"with a connection run: hf download --repo-type dataset {name}   or give a {_SUFFIXES} file",
        ) from error
    except ValueError as error:
        raise DataError(
            f"dataset_name={name!r}: {str(error).splitlines()[0]}",
            fix="set dataset_config to one of its configurations",
        ) from error
