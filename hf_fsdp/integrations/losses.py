"""What Trainer and TRL can switch on that reads sharded weights by itself: proven equal to one process, or refused.

Since TRL 1.16 every loss of its trainers (`nll`, `dft`, label smoothing's extra forward, DPO's and GRPO's) goes through
one fused head, which `policies/raw_reads.py` finds and keeps in the root unit; parity tests show them equal to one
process. What replaces the model's code by GPU kernels or streams cannot be shown here and is refused.
"""

from __future__ import annotations

from transformers import TrainingArguments

from hf_fsdp.errors import Problem

_LIGER = (
    "replaces norms, attention parts and the loss by Triton kernels that read the head's weight themselves; no test of "
    "this release runs them on sharded weights"
)
# The switch: why, and what to write instead. `use_liger_loss` is the older name in TRL's preference trainers.
_UNPROVEN = {
    "use_liger_kernel": (_LIGER, "use_liger_kernel=False; TRL's trainers compute the loss in chunks without it"),
    "use_liger_loss": (_LIGER, "use_liger_loss=False; TRL's trainers compute the loss in chunks without it"),
    "activation_offloading": (
        "moves activations by TRL's own GPU streams, which no test of this release runs on sharded weights",
        "activation_offloading=False and FSDPConfig(offload='activations')   (offload: activations in YAML)",
    ),
}


def check_unproven(args: TrainingArguments) -> list[Problem]:
    """Return the switches in `args` that sharded training cannot be trusted with."""
    name = type(args).__name__
    return [
        Problem(message=f"{switch}=True {why}", fix=fix, source=f"{name}(...)")
        for switch, (why, fix) in _UNPROVEN.items()
        if getattr(args, switch, False)
    ]
