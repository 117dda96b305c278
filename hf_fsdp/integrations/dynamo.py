"""What Trainer and Accelerate mean by torch.compile, the whole model in one, becomes `compile.blocks`.

Around a sharded model, one graph would hold every gather, and names would get `_orig_mod.`; so the request is read,
carried out block by block, and taken back where Accelerate would carry it out itself.
"""

from __future__ import annotations

from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from transformers import TrainingArguments

from hf_fsdp.config.precedence import Stated
from hf_fsdp.config.schema import FSDPConfig


def read_compile_arguments(args: TrainingArguments) -> dict[str, Stated]:
    """Return what ``TrainingArguments(torch_compile=True, ...)`` says, as dotted config keys."""
    if not args.torch_compile:
        return {}
    name = type(args).__name__
    source = f"{name}(torch_compile=True)"
    stated = {"compile.blocks": Stated(True, source, typed=True)}
    if args.torch_compile_backend not in (None, "inductor"):  # inductor is what Trainer fills in
        source = f"{name}(torch_compile_backend={args.torch_compile_backend!r})"
        stated["compile.backend"] = Stated(args.torch_compile_backend, source, typed=True)
    if args.torch_compile_mode is not None:
        source = f"{name}(torch_compile_mode={args.torch_compile_mode!r})"
        stated["compile.mode"] = Stated(args.torch_compile_mode, source, typed=True)
    return stated


def read_dynamo_plugin(args: TrainingArguments) -> dict[str, Stated]:
    """Return what `dynamo_config` in Accelerate's launch file says, as dotted config keys."""
    plugin = getattr(AcceleratorState(), "dynamo_plugin", None) if AcceleratorState._shared_state else None
    if args.torch_compile or plugin is None or plugin.backend == DynamoBackend.NO:
        return {}  # with torch_compile, the plugin only repeats the arguments
    backend = plugin.backend.value.lower()
    source = f"Accelerate's launch file (dynamo_backend: {backend})"
    stated = {"compile.blocks": Stated(True, source), "compile.backend": Stated(backend, source)}
    if plugin.mode not in (None, "default"):
        stated["compile.mode"] = Stated(plugin.mode, f"Accelerate's launch file (dynamo_mode: {plugin.mode})")
    return stated


def take_over_compilation(args: TrainingArguments, config: FSDPConfig) -> list[str]:
    """Tell Trainer and Accelerate that somebody else compiles; return the line that says so, if they were to."""
    state = AcceleratorState()
    asked = args.torch_compile or state.dynamo_plugin.backend != DynamoBackend.NO
    args.torch_compile = False
    state.dynamo_plugin.backend = DynamoBackend.NO
    if not asked or not config.compile.blocks:
        return []
    lines = [
        f"torch.compile: every block for itself ({config.compile.backend}), not the whole model around its gathers"
    ]
    if state.dynamo_plugin.fullgraph or state.dynamo_plugin.dynamic is not None:
        lines.append(
            "torch.compile: dynamo_use_fullgraph and dynamo_use_dynamic are not used; the first length is compiled "
            "as it is, others as one dynamic graph"
        )
    return lines
