"""Batch norms of a frozen part: their running statistics stay what they are.

`model.train()` puts every module into training mode, also those of a frozen tower. There a batch norm would go on
averaging the statistics of each batch into its buffers, so a part that nobody trains would change all the same, and
a saved adapter would not fit the base that others load. Dropout in a frozen part is left as the model has it: it
changes activations and no tensor.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_fsdp.policies.model_parts import find_parts, part_paths

_HELD = "_hf_fsdp_holds_statistics"


def hold_frozen_statistics(model: nn.Module) -> list[str]:
    """Let batch norms of parts without a trained parameter normalise by their kept statistics, in training too.

    Args:
        model: before its first training step, after everything that freezes or trains its parts; calling it again
            follows what is trained then.

    Returns:
        The names of the batch norms that are held; for most models none.
    """
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)}
    if not norms:
        return []
    named = dict(model.named_parameters())
    frozen = [
        path
        for names in find_parts(model).names.values()
        if not any(named[name].requires_grad for name in names)
        for path in part_paths(model, names)
    ]
    held = []
    for name, norm in norms.items():
        is_frozen = norm.track_running_stats and any(name == path or name.startswith(f"{path}.") for path in frozen)
        if is_frozen and not hasattr(norm, _HELD):
            norm.register_forward_pre_hook(_normalise_by_kept_statistics)
        if is_frozen or hasattr(norm, _HELD):
            setattr(norm, _HELD, is_frozen)
        held += [name] if is_frozen else []
    return held


def _normalise_by_kept_statistics(module: nn.Module, inputs: Any) -> None:
    # At each forward: every `model.train()` sets the mode again, for all modules.
    if getattr(module, _HELD, False):
        module.training = False
