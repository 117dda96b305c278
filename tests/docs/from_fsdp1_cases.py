"""Runs each "after" of docs/from-fsdp1.md with the YAML above it, on a tiny Llama; used by test_from_fsdp1.py."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp.sharding.apply import get_applied_sharding
from tests.distributed.tiny_models import build_model
from tests.distributed.training import QUIET_ARGUMENTS, build_dataset
from tests.docs.from_fsdp1_page import Snippet, read_snippets

# What the page says for models of billions of parameters, for one of twenty thousand.
SMALLER = {"20000000": "4000"}


def run_snippet(snippet: Snippet, rank: int, world_size: int) -> dict[str, Any]:
    """Run one snippet in a folder of all ranks and return what it left."""
    before = Path.cwd()
    folder = Path(tempfile.gettempdir(), f"hf-fsdp-docs-{os.environ['HF_FSDP_DOCS_RUN']}")
    folder.mkdir(exist_ok=True)
    yaml = snippet.yaml
    for large, small in SMALLER.items():
        yaml = yaml.replace(large, small)
    (folder / f"fsdp-{snippet.name}-{rank}.yaml").write_text(yaml)
    quiet = ", ".join(f"{name}={value!r}" for name, value in QUIET_ARGUMENTS.items())
    code = snippet.after.replace('"out"', f'"out", {quiet}').replace("fsdp.yaml", f"fsdp-{snippet.name}-{rank}.yaml")
    names: dict[str, Any] = {"model": build_model("llama", tied=False), "dataset": build_dataset(32)}
    os.chdir(folder)
    try:
        exec(compile(code, f"docs/from-fsdp1.md: {snippet.title}", "exec"), names)
        return _what_is_left(names)
    finally:
        os.chdir(before)


def _what_is_left(names: dict[str, Any]) -> dict[str, Any]:
    model = names["model"]
    parameters = list(model.parameters())
    applied = get_applied_sharding(model)
    assert applied is not None
    config = applied.config
    return {
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
        "local_share": sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters),
        "preset": applied.precision.preset,
        "num_units": len(applied.plan.units),
        "num_checkpointed": applied.num_checkpointed,
        "offloaded": config.offload.parameters,
        "reshard": config.sharding.reshard_after_forward,
        "replicas": config.sharding.dp_replicate_size,
        "steps": names["trainer"].state.global_step if "trainer" in names else None,
        "loaded": sorted(names["loaded"].state_dict()) if "loaded" in names else [],
        "kept": sorted(name.removeprefix("module.") for name, _ in model.named_parameters()),
        "finite": all(bool(torch.isfinite(parameter.to_local()).all()) for parameter in parameters),
    }


def _as_case(snippet: Snippet) -> Callable[[int, int], dict[str, Any]]:
    return lambda rank, world_size: run_snippet(snippet, rank, world_size)


CASES = {snippet.name: _as_case(snippet) for snippet in read_snippets()}
