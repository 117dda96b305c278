"""What single arguments of FSDP calls mean, as settings under FSDP's own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_fsdp.config.migrate.python_values import Called, Symbol, Unreadable
from hf_fsdp.config.migrate.setting import Left, OldConfig
from hf_fsdp.errors import Problem

FSDP1_ORDER = (
    "module",
    "process_group",
    "sharding_strategy",
    "cpu_offload",
    "auto_wrap_policy",
    "backward_prefetch",
    "mixed_precision",
    "ignored_modules",
    "param_init_fn",
    "device_id",
    "sync_module_states",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "ignored_states",
    "device_mesh",
)
MIXED_PRECISION_ORDER = (
    "param_dtype",
    "reduce_dtype",
    "buffer_dtype",
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
    "_module_classes_to_ignore",
)
POLICY_ORDER = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
FUNCTION_POLICIES = "a function cannot be in a file: write FSDPConfig(wrap=function) in Python, or use class names"


def named(call: Called, order: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip(order, call.arguments, strict=False)), **call.keywords}


def as_text(value: Any) -> str:
    """Return a value as Python text on one line."""
    if isinstance(value, Symbol):
        return value.name if value.name.startswith("torch.") and value.name.count(".") == 1 else _short(value.name)
    if isinstance(value, Called):
        parts = [as_text(item) for item in value.arguments]
        parts += [f"{key}={as_text(item)}" for key, item in value.keywords.items()]
        return f"{value.last}({', '.join(parts)})"
    if isinstance(value, Unreadable):
        return value.text
    if isinstance(value, list):
        return f"[{', '.join(as_text(item) for item in value)}]"
    return repr(value)


def _short(name: str) -> str:
    """Return a class or a member of an enum without the modules before it."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 and parts[-2][:1].isupper() else parts[-1]


def unreadable(what: str, value: Unreadable, source: str) -> Problem:
    """Return the problem of a value that only a run would show."""
    return Problem(
        message=f"{what} depends on `{value.text}`, which is only known when the script runs",
        fix=f"write the value that the run used in place of `{value.text}`, in a copy of the file",
        source=f"{source.rpartition(':')[0]}:{value.line}",
    )


def add_plain(old: OldConfig, name: str, argument: str, value: Any, source: str) -> None:
    """Add an argument that is a constant or a member of an enum."""
    if isinstance(value, Unreadable):
        old.problems.append(unreadable(argument, value, source))
    elif isinstance(value, Symbol) and not _is_constant(value):
        line = int(source.rpartition(":")[2])
        old.problems.append(unreadable(argument, Unreadable(value.name, line), source))
    elif isinstance(value, Symbol):
        old.add(name, value.last, f"{argument}={as_text(value)}", source)
    elif isinstance(value, Called):
        problem = f"{argument}={as_text(value)} is a call that hf-fsdp does not know"
        old.problems.append(Problem(message=problem, fix="write the value it gives, in a copy", source=source))
    else:
        old.add(name, value, f"{argument}={as_text(value)}", source)


def _is_constant(symbol: Symbol) -> bool:
    """Return whether a name is a member of an enum or a dtype, not a variable of another file."""
    return symbol.name.startswith("torch.") or symbol.last.strip("_").isupper()


def _plain(name: str) -> Callable[..., None]:
    def read(old: OldConfig, argument: str, value: Any, source: str) -> None:
        add_plain(old, name, argument, value, source)

    return read


def _whatever(name: str) -> Callable[..., None]:
    """Read an argument of which it only matters that it is there."""

    def read(old: OldConfig, argument: str, value: Any, source: str) -> None:
        if value is not None and value != []:
            old.add(name, "set", f"{argument}={as_text(value)}", source)

    return read


def _without_effect(name: str) -> Callable[..., None]:
    """Read a switch that decides nothing here, so that a value only a run would show does not matter."""

    def read(old: OldConfig, argument: str, value: Any, source: str) -> None:
        said = value if value is None or isinstance(value, bool) else "set"
        old.add(name, said, f"{argument}={as_text(value)}", source)

    return read


def _read_offload(old: OldConfig, argument: str, value: Any, source: str) -> None:
    if isinstance(value, Called) and value.last == "CPUOffload":
        on = named(value, ("offload_params",)).get("offload_params", False)
        text = f"{argument}={as_text(value)}"
        if isinstance(on, Unreadable):
            old.problems.append(unreadable(argument, on, source))
        else:
            old.add("offload_params", on, text, source)
    elif isinstance(value, Called) and value.last == "CPUOffloadPolicy":
        old.add("offload_params", True, f"{argument}={as_text(value)}", source)
        pinned = named(value, ("pin_memory",)).get("pin_memory")
        if pinned is not None:
            add_plain(old, "pin_memory", "pin_memory", pinned, source)
    elif not (isinstance(value, Called) and value.last == "OffloadPolicy"):
        add_plain(old, "offload_params", argument, value, source)


def _read_precision(old: OldConfig, argument: str, value: Any, source: str) -> None:
    if isinstance(value, Called) and value.last in ("MixedPrecision", "MixedPrecisionPolicy"):
        order = MIXED_PRECISION_ORDER if value.last == "MixedPrecision" else POLICY_ORDER
        fields: Mapping[str, Any] = named(value, order)
        if "**" in fields:
            old.problems.append(unreadable(argument, fields["**"], source))
            return
        for name, item in fields.items():
            if name == "_module_classes_to_ignore":
                _whatever(name)(old, name, item, source)
            else:
                add_plain(old, name, name, item, source)
    else:
        add_plain(old, "mixed_precision", argument, value, source)


def _read_wrap(old: OldConfig, argument: str, value: Any, source: str) -> None:
    text = f"{argument}={as_text(value)}"
    name = value.last if isinstance(value, (Symbol, Called)) else ""
    if name in ("size_based_auto_wrap_policy", "SizeBasedWrapPolicy"):
        given = named(value, ()) if isinstance(value, Called) else {}
        old.add("auto_wrap_policy", "SIZE_BASED_WRAP", text, source)
        add_plain(old, "min_num_params", "min_num_params", given.get("min_num_params", 100_000_000), source)
    elif name in ("transformer_auto_wrap_policy", "ModuleWrapPolicy"):
        given = named(value, ("module_classes",)) if isinstance(value, Called) else {}
        _add_classes(old, given.get("transformer_layer_cls", given.get("module_classes")), text, source)
    elif name in ("always_wrap_policy", "lambda_auto_wrap_policy", "CustomPolicy", "_or_policy", "LambdaWrapPolicy"):
        old.left.append(Left(text, FUNCTION_POLICIES, "no equivalent"))
    elif isinstance(value, Symbol) and value.name != "None":
        old.left.append(Left(text, FUNCTION_POLICIES, "no equivalent"))
    else:
        add_plain(old, "auto_wrap_policy", argument, value, source)


def _add_classes(old: OldConfig, classes: Any, text: str, source: str) -> None:
    items = classes if isinstance(classes, list) else [classes]
    for item in items:
        if not isinstance(item, Symbol):
            what = item if isinstance(item, Unreadable) else Unreadable(as_text(item), int(source.rpartition(":")[2]))
            old.problems.append(unreadable("the classes of auto_wrap_policy", what, source))
            return
    old.add("transformer_layer_cls_to_wrap", [item.last for item in items], text, source)


def _read_mesh(old: OldConfig, argument: str, value: Any, source: str) -> None:
    """Read the shape of a device mesh: two axes are replicas and shards."""
    if value is None:
        return
    text = f"{argument}={as_text(value)}"
    shape = named(value, ("device_type", "mesh_shape")).get("mesh_shape") if isinstance(value, Called) else None
    if isinstance(shape, list) and len(shape) == 1:
        old.add("mesh_axes", 1, text, source)
    elif isinstance(shape, list) and len(shape) == 2 and isinstance(shape[0], int):
        old.add("dp_replicate_size", shape[0], text, source)
        if isinstance(shape[1], int):
            old.add("dp_shard_size", shape[1], text, source)
    else:
        old.add("unknown_mesh", "set", text, source)


def read_state_dict_config(old: OldConfig, config: Any, source: str) -> None:
    if isinstance(config, Called):
        for name in ("offload_to_cpu", "rank0_only"):
            if name in config.keywords:
                add_plain(old, name, name, config.keywords[name], source)


FSDP1: dict[str, Callable[..., None]] = {
    **{
        name: _plain(name)
        for name in (
            "sharding_strategy",
            "backward_prefetch",
            "forward_prefetch",
            "state_dict_type",
            "reshard_after_forward",
            "activation_checkpointing",
            "activation_checkpointing_offload",
            "min_num_params",
        )
    },
    **{
        name: _without_effect(name)
        for name in ("sync_module_states", "limit_all_gathers", "use_orig_params", "cpu_ram_efficient_loading")
    },
    "fsdp_version": _plain("version"),
    "transformer_cls_names_to_wrap": _plain("transformer_layer_cls_to_wrap"),
    "cpu_offload": _read_offload,
    "auto_wrap_policy": _read_wrap,
    "mixed_precision": _read_precision,
    "mixed_precision_policy": _read_precision,
    "device_mesh": _read_mesh,
    "process_group": _whatever("process_group"),
    "ignored_modules": _whatever("ignored_modules"),
    "ignored_states": _whatever("ignored_modules"),
    "param_init_fn": _whatever("param_init_fn"),
    "device_id": _whatever("device_id"),
    "state_dict_config": lambda old, name, value, source: read_state_dict_config(old, value, source),
    "optim_state_dict_config": lambda old, name, value, source: None,  # says the same again for the optimizer
}
FSDP2: dict[str, Callable[..., None]] = {
    "mesh": _read_mesh,
    "mp_policy": _read_precision,
    "offload_policy": _read_offload,
    "ignored_params": _whatever("ignored_modules"),
    "shard_placement_fn": _whatever("shard_placement_fn"),
}
