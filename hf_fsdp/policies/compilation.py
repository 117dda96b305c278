"""`torch.compile` block by block: one graph serves all blocks of a kind, and FSDP's gathers stay between the graphs.

A compiled whole model would have every gather inside one graph, and its names would get `_orig_mod.`. Here the
`forward` of each block is compiled in place: hooks (gather, recompute, offload) run around it as ever, and no name
changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_fsdp.config.schema import CompileConfig
from hf_fsdp.errors import Problem, ShardingError, nearest_names
from hf_fsdp.policies.operators import KeptOperators
from hf_fsdp.torch_private import RecompileLimitHit, recompile_limit

# Graphs of one block's forward: a few shapes, with and without a mask, trained and frozen. torch's own limit (8) counts
# blocks of all towers and kinds that share code.
MAX_GRAPHS = 16


def check_backend(config: CompileConfig, source: str | None = None) -> list[Problem]:
    """Return the problem of a backend that this torch does not have."""
    known = torch.compiler.list_backends(exclude_tags=())
    if not config.blocks or config.backend in known:
        return []
    near = nearest_names(config.backend, known)
    return [
        Problem(
            message=f"compile.backend={config.backend!r} is not a backend of this torch ({torch.__version__})",
            near=", ".join(near) or ", ".join(known),
            fix=f"compile: {{blocks: true, backend: {near[0] if near else 'inductor'}}}",
            source=source,
        )
    ]


def compile_block(block: nn.Module, name: str, config: CompileConfig, kept: KeptOperators | None = None) -> None:
    """Compile the training forward of `block` in place; before `fully_shard`.

    Evaluation and generation run as they are: their caches differ from layer to layer and from token to token, so each
    would be a graph of its own.

    Args:
        block: its `forward` is replaced.
        name: its path, for messages.
        config: backend and mode are passed on as they are.
        kept: checkpoint inside the graph, keeping these operators' outputs: from outside, a compiled forward is one
            operator. The graph must then be whole, else torch would run everything uncompiled without a word.

    Raises:
        ShardingError: from a forward, when it needs more than `MAX_GRAPHS` graphs.
    """
    plain = block.forward
    traced: Callable[..., Any] = plain if kept is None else _checkpointed(plain, kept)
    mode = None if config.mode == "default" else config.mode
    compiled = torch.compile(traced, backend=config.backend, mode=mode, fullgraph=kept is not None)

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        try:
            with recompile_limit(MAX_GRAPHS):
                return compiled(*args, **kwargs)
        except RecompileLimitHit as error:
            raise ShardingError(_too_many_graphs(name, block, error)) from error

    block.forward = forward


def _checkpointed(forward: Callable[..., Any], kept: KeptOperators) -> Callable[..., Any]:
    contexts = kept.contexts_to_trace

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, context_fn=contexts, **kwargs)

    return run


def _too_many_graphs(name: str, block: nn.Module, error: Exception) -> Problem:
    reason = " ".join(str(error).split())[:300]
    return Problem(
        message=f"compile.blocks: {name} ({type(block).__name__}) needs more than {MAX_GRAPHS} graphs, and torch would "
        f"go on uncompiled: {reason}",
        fix="pad batches to few lengths (pad_to_multiple_of, or packing); if blocks of this model differ in code, "
        "compile: none",
    )
