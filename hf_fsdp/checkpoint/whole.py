"""Whether a save is whole: asked of its plan before the first step, and of its files before it is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from hf_fsdp.checkpoint.model_state import ModelState, expected_names
from hf_fsdp.errors import Problem
from hf_fsdp.storage.safetensors_file import TensorEntry
from hf_fsdp.storage.tensor_source import TensorInfo, check_coverage

OWN_FOLDERS = ("model", "optimizer", "state")
_REPORT = "report this with the model's class and PEFT config"


def check_parts(expected: Mapping[str, TensorInfo], parts: Mapping[str, Sequence[TensorEntry]]) -> list[Problem]:
    """Return what is wrong when `parts` of all ranks do not make up each expected tensor, each value once."""
    problems = [
        Problem(message=f"{name} was written and is not part of the save", fix=_REPORT)
        for name in parts
        if name not in expected
    ]
    coverage = (check_coverage(name, info, parts.get(name, ())) for name, info in expected.items())
    return [*problems, *(problem for problem in coverage if problem is not None)]


def check_adapters(adapters: Mapping[str, Mapping[str, str]]) -> list[Problem]:
    """Return a problem for every adapter that would be saved empty, or where a checkpoint keeps something else."""
    problems = [
        Problem(
            message=f"the adapter is named {folder!r}, which is a folder of every checkpoint",
            fix="another adapter_name: any but model, optimizer and state",
        )
        for folder in adapters
        if folder.split("/")[0] in OWN_FOLDERS
    ]
    return problems + [
        Problem(
            message=f"the adapter {folder!r} has no tensor: it would be saved empty",
            fix="give get_peft_model a config whose target_modules are in the model",
        )
        for folder, keys in adapters.items()
        if not keys
    ]


def check_names(model: nn.Module, state: ModelState) -> list[Problem]:
    """Return a problem for every tensor of a whole model that would not be saved; an adapter leaves its base out."""
    if state.adapters:
        return []
    aliases = {name for names in state.ties.values() for name in names}
    left_out = expected_names(model) - set(state.tensors) - aliases
    return [Problem(message=f"{name} would not be saved", fix=_REPORT) for name in sorted(left_out)]
