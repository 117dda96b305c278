"""What ``--gpus`` and ``--gpu-memory`` say: machines, GPUs of each, and which GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from hf_fsdp.config.gpus import GPUS, Gpu, unknown_gpu
from hf_fsdp.errors import ConfigError, nearest_names

__all__ = ["GPUS", "Gpu", "GpuRequest", "parse_gpu_memory", "parse_gpus", "unknown_gpu"]

_BYTES = {"gib": 1024**3, "mib": 1024**2, "gb": 10**9, "g": 10**9, "mb": 10**6}
_TIMES = r"\s*(?:[x*×]\s*(?=\S)|$)"


@dataclass(frozen=True, kw_only=True)
class GpuRequest:
    """What ``--gpus`` says.

    Args:
        count: GPUs of one machine.
        gpu: which GPU, if it was named.
        num_nodes: machines, each with `count` GPUs.
    """

    count: int
    gpu: Gpu | None = None
    num_nodes: int = 1

    @property
    def num_gpus(self) -> int:
        """GPUs of all machines, one process each."""
        return self.count * self.num_nodes


def parse_gpus(text: str, *, takes_memory: bool = False) -> GpuRequest:
    """Return what ``--gpus`` says: ``8``, ``8xA100-80G``, ``A100-80G`` for one, ``2x8xA100-80G`` for two machines.

    Args:
        text: as typed.
        takes_memory: the command has ``--gpu-memory``, which does for a GPU that is not known and which a number alone
            needs; errors advise it.

    Raises:
        ConfigError: no such GPU, or no positive number of them.

    Example:
        >>> request = parse_gpus("2x8xH100")
        >>> request.num_nodes, request.count, request.gpu.name
        (2, 8, 'H100-80G')
    """
    pattern = rf"\s*(?:(?P<first>[+-]?\d+){_TIMES})?(?:(?P<second>[+-]?\d+){_TIMES})?(?P<name>.*?)\s*"
    match = re.fullmatch(pattern, text, re.IGNORECASE)
    numbers = [number for number in (match["first"], match["second"]) if number] if match else []
    name = match["name"] if match else text
    if numbers and not name and _find_exact(numbers[-1]):
        name = numbers.pop()  # `8x4090` means the card, not 4090 GPUs on each of 8 machines
    can_be = all(int(number) >= 1 for number in numbers)
    prefix = "".join(f"{number}x" for number in numbers) if can_be else ""  # an error advises what was typed
    gpu = _find_gpu(name, text, prefix, takes_memory) if name else None
    if not name and not numbers:
        raise ConfigError(f"--gpus {text!r} is empty", fix="--gpus 8, or --gpus 8xA100-80G")
    if not can_be:
        raise ConfigError(
            f"--gpus {text} is not a positive number of GPUs", fix=f"--gpus 1{'x' + gpu.name if gpu else ''}"
        )
    num_nodes = int(numbers[0]) if len(numbers) == 2 else 1
    return GpuRequest(count=int(numbers[-1]) if numbers else 1, gpu=gpu, num_nodes=num_nodes)


def parse_gpu_memory(text: str) -> int:
    """Return the bytes that ``--gpu-memory`` says: ``40GiB``, ``40960MiB``, ``40GB`` or ``40G``.

    GiB and MiB are powers of two, as torch and nvidia-smi print them; GB, G and MB are powers of ten, as in a shop.
    Of a card that is sold with N GB a program gets between 0.98 and 1.07 times N x 10^9 bytes (L4, A100-80G), so GiB
    as torch prints them are the better choice.

    Raises:
        ConfigError: no number, no unit, or a size that no GPU has.

    Example:
        >>> parse_gpu_memory("40GiB")
        42949672960
    """
    match = re.fullmatch(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)\s*", text, re.IGNORECASE)
    if match is None or match["unit"].lower() not in {*_BYTES, ""}:
        raise ConfigError(
            f"--gpu-memory {text!r} is not a size",
            fix=f"--gpu-memory {match['number']}GiB" if match and float(match["number"]) else "--gpu-memory 40GiB",
            near=", ".join(("40GiB", "40960MiB", "40GB")),
        )
    if not match["unit"]:
        raise ConfigError(
            f"--gpu-memory {text.strip()} has no unit",
            fix=f"--gpu-memory {match['number'] if float(match['number']) else 40}GiB",
            near="GiB as torch prints it, GB as a shop does",
        )
    size = int(Fraction(match["number"]) * _BYTES[match["unit"].lower()])
    if not 10**9 <= size <= 10**12:
        raise ConfigError(
            f"--gpu-memory {text.strip()} is {'less than a gigabyte' if size < 10**9 else 'more than any GPU has'}",
            fix="--gpu-memory 40GiB",
        )
    return size


def _find_gpu(name: str, text: str, prefix: str, takes_memory: bool) -> Gpu:
    exact = _find_exact(name)
    if exact is not None:
        return exact
    family = [gpu for gpu in GPUS if _plain(gpu.family) == _plain(name)]
    if len(family) == 1:
        return family[0]
    names = [gpu.name for gpu in GPUS]
    near = [gpu.name for gpu in family] or nearest_names(name.strip(), names)
    rule = "could be either of several GPUs" if family else "is not a GPU that hf-fsdp knows"
    fixes = [f"--gpus {prefix}{candidate}" for candidate in near[:2]]
    if takes_memory and not family:
        numbers, some = ("1", "32GiB") if near else ("8", "40GiB")  # near a card's name: a card; else a whole machine
        fixes.append(f"{_memory_alone(name, prefix.rstrip('x') or numbers, some)}   # memory only, no speed")
    raise ConfigError(
        f"--gpus {text}: {name.strip()} {rule}",
        fix=" or ".join(fixes) or f"--gpus {prefix.rstrip('x') or 8}   # the number alone",
        near=", ".join(near) or ", ".join(names),
    )


def _memory_alone(name: str, numbers: str, some: str) -> str:
    """Return how to say GPUs that are not known: by the memory that their name states, else by some."""
    stated = re.search(r"(?<![\d.])([1-9]\d{0,2})\s*gi?b?(?![a-z\d])", name, re.IGNORECASE)
    return f"--gpus {numbers} --gpu-memory {f'{stated[1]}GiB' if stated else some}"


def _find_exact(name: str) -> Gpu | None:
    wanted = _plain(name)
    for gpu in GPUS:
        if wanted in (_plain(known) for known in (gpu.name, *gpu.aliases)):
            return gpu
    return None


def _plain(name: str) -> str:
    """Return a GPU name without case, separators and the B of GB: ``a100-80gb`` and ``A100 80G`` are one."""
    return re.sub(r"gi?b$", "g", re.sub(r"[\s_-]", "", name.lower()))
