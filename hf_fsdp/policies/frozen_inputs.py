"""Hooks that make a frozen tower keep its activations, taken off again.

Reentrant checkpointing loses gradients when no input of a block asks for one, so transformers, PEFT and TRL hook every
input embedding and mark its output as needing gradients. The vision tower's patch embedding is one of them: a frozen
tower would then keep all its activations and be walked through in backward, for gradients that nobody reads.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def release_frozen_inputs(model: nn.Module) -> int:
    """Remove the hooks of ``enable_input_require_grads``; return how many there were.

    The checkpointing of this package follows the parameters inside a block and needs no such mark.

    Args:
        model: of transformers, maybe under PEFT; before its first forward.
    """
    removed = 0
    for module in model.modules():
        hooks: list[Any] = list(vars(module).get("_require_grads_hooks") or ())
        single = vars(module).pop("_require_grads_hook", None)  # the only name before transformers 5
        if single is not None and single not in hooks:
            hooks.append(single)
        for hook in hooks:
            hook.remove()
        if hooks:
            vars(module)["_require_grads_hooks"] = []
        removed += len(hooks)
    return removed
