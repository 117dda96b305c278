"""Loss scaling under `fp16-mixed` on every device: small gradients survive, an overflow skips the step on all ranks.

Accelerate makes a scaler only for its own fp16 on accelerators and none on CPU, without a word. Here the backend gives
Accelerate the scaler before the optimizer is prepared, so that its own `backward`, `clip_grad_norm_` and optimizer use
it: the loss is multiplied, gradients are divided again before they are clipped or applied, and where any of them is not
finite on any rank, no rank takes the step and the scale is halved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as optimizer_states
from accelerate import Accelerator
from torch.amp import GradScaler
from torch.optim import Optimizer

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import NumericsError
from hf_fsdp.integrations.optimizers import raw_optimizer

FP16_PRESET = "fp16-mixed"
_SEAM = "_hf_fsdp_state_seam"
# From here on the overflow does not come from scaling, and halving further would only make gradients vanish.
LOWEST_USEFUL_SCALE = 1.0


class LossScaler(GradScaler):
    """Torch's scaler, which Accelerate's `load_state` may prepare a second time (it raises there)."""

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._scale is None:
            super()._lazy_init_scale_growth_tracker(dev)


def install_state_seam() -> None:
    """Let the state of an optimizer be made past the scaler; calling it again changes nothing.

    To load the state of an optimizer that has none, torch makes it by a step on zero gradients. Through Accelerate's
    optimizer that step would go to the scaler, which has no scale yet and raises, or would count it as one that was
    taken.
    """
    original = optimizer_states._init_optim_state
    if getattr(original, _SEAM, False):
        return

    @functools.wraps(original)
    def init_state(optim: Optimizer) -> None:
        original(raw_optimizer(optim))

    setattr(init_state, _SEAM, True)
    optimizer_states._init_optim_state = init_state


def set_scaler(accelerator: Accelerator, config: FSDPConfig, optimizers: Sequence[Optimizer] = ()) -> None:
    """Give `accelerator` a scaler under `fp16-mixed`, and take one away under any other precision.

    Args:
        accelerator: before it wraps its optimizers, which keep a reference to the scaler.
        config: the config in force.
        optimizers: torch's own, not wrapped.
    """
    if config.precision.preset != FP16_PRESET:
        accelerator.scaler = None
    elif accelerator.scaler is None or not accelerator.scaler.is_enabled():
        # Offloaded gradients are in host memory, and so is the search for values that are not finite.
        device = "cpu" if config.offload.parameters else accelerator.device.type
        handler = accelerator.scaler_handler
        accelerator.scaler = LossScaler(device, **(handler.to_kwargs() if handler is not None else {}))
    if accelerator.scaler is not None:
        for optimizer in optimizers:
            # Fused ones would skip inside their kernel: Accelerate would count the step, and the schedule go on.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def unscale_gradients(original: Callable[..., Any], accelerator: Accelerator, optimizer: Any = None) -> Any:
    """Divide gradients by the scale before they are clipped; Accelerate asks its autocast switch, which is off here."""
    if accelerator.scaler is None:
        return original(optimizer)
    chosen = accelerator._optimizers if optimizer is None else optimizer
    for item in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
        accelerator.scaler.unscale_(raw_optimizer(item))


class LossScale:
    """Follows the scale over one `train()` and says which steps were skipped."""

    def __init__(self) -> None:
        self.num_skipped = 0
        self.scale: float | None = None

    def after_step(self, scaler: GradScaler, step: int, *, was_skipped: bool) -> str | None:
        """Look at the step that was just tried; return a line when it was skipped.

        Args:
            scaler: the one in force.
            step: counted from 1.
            was_skipped: as the optimizer that tried it says; the same on all ranks.

        Raises:
            NumericsError: it overflowed at a scale of one: the values themselves leave the range of fp16.
        """
        before, self.scale = self.scale, scaler.get_scale()
        if not was_skipped:
            return None
        self.num_skipped += 1
        if before is not None and before <= LOWEST_USEFUL_SCALE:
            raise NumericsError(
                f"step {step}: gradients are not finite at a loss scale of {before:g}, so values of the model itself "
                "leave the range of fp16 (65504). The step was not taken",
                fix="precision: bf16-mixed where the GPU has bf16, else precision: fp32; or a lower learning rate",
            )
        return (
            f"step {step} skipped on all ranks: gradients overflowed fp16; loss scale is now {self.scale:g} "
            "(a loss logged for it leaves out what was not finite)"
        )
