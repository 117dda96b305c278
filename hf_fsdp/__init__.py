"""Fully sharded training you can trust inside the Hugging Face Trainer.

The public names are loaded on first use, so that importing the package (and `hf-fsdp --help`) stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_fsdp.checkpoint.start import load_sharded
    from hf_fsdp.config.schema import FSDPConfig
    from hf_fsdp.integrations.callback import FSDPCallback
    from hf_fsdp.integrations.metrics import MetricsCallback
    from hf_fsdp.integrations.plain_loop import build_accelerator
    from hf_fsdp.integrations.samples import SamplesCallback
    from hf_fsdp.policies.model_parts import set_trainable
    from hf_fsdp.sharding.apply import apply_fsdp
    from hf_fsdp.sharding.audit import audit_sharding

__version__ = "0.1.0"
__all__ = [
    "FSDPCallback",
    "FSDPConfig",
    "MetricsCallback",
    "SamplesCallback",
    "__version__",
    "apply_fsdp",
    "audit_sharding",
    "build_accelerator",
    "load_sharded",
    "set_trainable",
]

_HOMES = {
    "FSDPConfig": "hf_fsdp.config.schema",
    "FSDPCallback": "hf_fsdp.integrations.callback",
    "MetricsCallback": "hf_fsdp.integrations.metrics",
    "SamplesCallback": "hf_fsdp.integrations.samples",
    "build_accelerator": "hf_fsdp.integrations.plain_loop",
    "load_sharded": "hf_fsdp.checkpoint.start",
    "set_trainable": "hf_fsdp.policies.model_parts",
    "apply_fsdp": "hf_fsdp.sharding.apply",
    "audit_sharding": "hf_fsdp.sharding.audit",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
