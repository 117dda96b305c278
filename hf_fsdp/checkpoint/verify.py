"""Whether a committed checkpoint still is what its manifest says: every file, every byte, every tensor whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hf_fsdp.checkpoint.manifest import MANIFEST_FILE, Manifest
from hf_fsdp.errors import CheckpointError, HfFsdpError, Problem
from hf_fsdp.sharding.mesh import agree_all, rank, world_size
from hf_fsdp.storage.files import DAMAGED_FIX, files_under, hash_file, safe_join
from hf_fsdp.storage.safetensors_file import read_header
from hf_fsdp.storage.tensor_source import SafetensorsSource

HASH_THREADS = 4
ADAPTER_FILE = "adapter_model.safetensors"


def verify_checkpoint(
    folder: Path, *, hashes: bool = True, on_bytes: Callable[[int], None] | None = None
) -> list[Problem]:
    """Return everything that is wrong with a checkpoint, nothing when it is whole; in one process.

    Args:
        folder: of the checkpoint.
        hashes: whether every byte is read; sizes, headers and the cover of every tensor are checked in any case.
        on_bytes: called with the number of bytes of every piece that was hashed, from several threads.
    """
    try:
        manifest = Manifest.read(folder)
        problems = check_structure(folder, manifest)
    except HfFsdpError as error:
        return list(error.problems)
    if hashes:
        known = {problem.message for problem in problems}
        found = check_hashes(folder, manifest, sorted(manifest.files), on_bytes)
        problems += [problem for problem in found if problem.message not in known]
    strangers = sorted(set(files_under(folder)) - set(manifest.files) - {MANIFEST_FILE})
    problems += [
        Problem(message=f"{name} is in the folder and not in its manifest", fix=f"delete it: {name}")
        for name in strangers
        if name.endswith(".safetensors")
    ]
    return problems


def verify_together(folder: Path, manifest: Manifest) -> list[Problem]:
    """Return what is wrong with a checkpoint, the same on all ranks, which share the reading; collective."""
    mine: list[Problem] = []
    try:
        if rank() == 0:
            mine += check_structure(folder, manifest)
        # By size, so that every rank reads about as much.
        names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))[rank() :: world_size()]
        mine += check_hashes(folder, manifest, names)
    except Exception as error:  # also what a hostile folder makes Python stumble over; the others wait
        mine += error.problems if isinstance(error, HfFsdpError) else [Problem(message=str(error), fix=DAMAGED_FIX)]
    return list({problem.message: problem for theirs in agree_all(mine) for problem in theirs}.values())


def check_structure(folder: Path, manifest: Manifest) -> list[Problem]:
    """Return what is wrong with sizes, headers and the cover of every tensor."""
    problems = []
    for name, record in manifest.files.items():
        path = safe_join(folder, name)
        if not path.is_file():
            problems.append(Problem(message=f"{name} is missing", fix=DAMAGED_FIX))
        elif path.stat().st_size != record.size:
            problems.append(
                Problem(message=f"{name} has {path.stat().st_size} bytes, not {record.size}", fix=DAMAGED_FIX)
            )
    if problems:
        return problems
    try:
        for source in open_sources(folder, manifest):
            source.close()
    except CheckpointError as error:
        problems += error.problems
    return problems


def check_hashes(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str],
    on_bytes: Callable[[int], None] | None = None,
) -> list[Problem]:
    """Return the files of `names` whose bytes are not those that were written."""

    is_over = False

    def count(num_bytes: int) -> None:
        if is_over:
            raise InterruptedError
        if on_bytes is not None:
            on_bytes(num_bytes)

    def check(name: str) -> Problem | None:
        try:
            record = hash_file(safe_join(folder, name), count)
        except FileNotFoundError:
            return Problem(message=f"{name} is missing", fix=DAMAGED_FIX)
        if record == manifest.files[name]:
            return None
        return Problem(message=f"{name} was changed after it was written: its hash differs", fix=DAMAGED_FIX)

    pool = ThreadPoolExecutor(HASH_THREADS)
    try:
        return [problem for problem in pool.map(check, names) if problem is not None]
    finally:  # at once, when it was interrupted
        is_over = True
        pool.shutdown(cancel_futures=True)


def open_sources(folder: Path, manifest: Manifest) -> tuple[SafetensorsSource, SafetensorsSource]:
    """Return the model's and the optimizer's tensors, checked against the manifest.

    Raises:
        CheckpointError: a file is damaged, or a tensor is not whole.
    """
    model = open_model_source(folder, manifest)
    files = [safe_join(folder, name) for name in manifest.files if name.endswith(".safetensors")]
    files = [path for path in files if path.parent.name == "optimizer"]
    return model, SafetensorsSource(files, expected=manifest.optimizer)


def open_model_source(folder: Path, manifest: Manifest) -> SafetensorsSource:
    """Return the model's tensors alone, which an optimizer that is lost or damaged does not touch.

    Raises:
        CheckpointError: a file is damaged, or a tensor is not whole.
    """
    files = [safe_join(folder, name) for name in manifest.files if name.endswith(".safetensors")]
    renames: dict[Path, Mapping[str, str]] = {}
    for adapter, keys in manifest.adapters.items():
        path = folder / adapter / ADAPTER_FILE
        renames[path] = keys
        if keys and not (path in files and read_header(path).entries):
            raise CheckpointError(f"{path} is empty", fix=DAMAGED_FIX)
    files = [path for path in files if path.parent.name != "optimizer"]
    return SafetensorsSource(files, renames, expected=manifest.model)
