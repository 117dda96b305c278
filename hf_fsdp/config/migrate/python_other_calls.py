"""Reads the calls of a Python file beside FSDP's own: TrainingArguments, state dicts, checkpointing, compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_fsdp.config.migrate.python_arguments import add_plain, as_text, named, read_state_dict_config, unreadable
from hf_fsdp.config.migrate.python_values import Called, Symbol, Unreadable
from hf_fsdp.config.migrate.refused import explain
from hf_fsdp.config.migrate.setting import FSDP_BLOCK_NAMES, Left, OldConfig
from hf_fsdp.config.migrate.trainer import TRAINING_KEYS, read_option_words
from hf_fsdp.config.parse import strip_prefix
from hf_fsdp.errors import Problem


def _read_state_dict_type(old: OldConfig, call: Called, source: str) -> None:
    found = named(call, ("module", "state_dict_type", "state_dict_config", "optim_state_dict_config"))
    if "state_dict_type" in found:
        add_plain(old, "state_dict_type", "state_dict_type", found["state_dict_type"], source)
    read_state_dict_config(old, found.get("state_dict_config"), source)


def _read_state_dict_options(old: OldConfig, call: Called, source: str) -> None:
    whole = call.keywords.get("full_state_dict", False)
    if isinstance(whole, bool):
        kind = "FULL_STATE_DICT" if whole else "SHARDED_STATE_DICT"
        old.add("state_dict_type", kind, f"StateDictOptions(full_state_dict={whole})", source)
    if "cpu_offload" in call.keywords:
        add_plain(old, "offload_to_cpu", "cpu_offload", call.keywords["cpu_offload"], source)


def _read_checkpointing(old: OldConfig, call: Called, source: str) -> None:
    old.add("activation_checkpointing", True, f"{call.last}(...)", source)
    if "check_fn" in call.keywords:
        why = "the blocks of the model are checkpointed; every, fraction, selective and towers choose among them"
        old.left.append(Left(f"check_fn={as_text(call.keywords['check_fn'])}", why, "changed"))


def _read_compile(old: OldConfig, call: Called, source: str) -> None:
    if call.name != "torch.compile":
        return
    old.add("compile", True, "torch.compile(...)", source)
    for name in ("backend", "mode", "fullgraph", "dynamic"):
        if name in call.keywords:
            add_plain(old, f"compile_{name}", name, call.keywords[name], source)


def _read_prefetch(name: str) -> Callable[..., None]:
    def read(old: OldConfig, call: Called, source: str) -> None:
        modules = call.arguments[0] if call.arguments else call.keywords.get("modules")
        key = f"sharding.{name}"
        why = f"units ahead are a number here: write {key}: 1, or the number of modules in the list"
        count = f" of {len(modules)}" if isinstance(modules, list) else ""
        old.left.append(Left(f"{call.last}(...){count}", why, "no equivalent"))

    return read


def _read_no_sync(old: OldConfig, call: Called, source: str) -> None:
    if call.last == "no_sync" or (call.arguments and call.arguments[0] is not True):
        old.add("no_sync", True, f"{call.last}(...)", source)


def _add_list(old: OldConfig, name: str, key: str, items: list[Any], source: str) -> None:
    """Add a list of class names, typed as text or as the classes themselves."""
    for item in items:
        if isinstance(item, (Unreadable, Called)):
            text = item if isinstance(item, Unreadable) else Unreadable(as_text(item), int(source.rpartition(":")[2]))
            old.problems.append(unreadable(key, text, source))
            return
    names = [item.last if isinstance(item, Symbol) else item for item in items]
    old.add(name, names, f"{key}: {as_text(items)}", source)


def read_training_arguments(old: OldConfig, call: Called, source: str) -> None:
    """Read TrainingArguments and its subclasses: `fsdp`, `fsdp_config`, precision and checkpointing."""
    words = call.keywords["fsdp"]
    if isinstance(words, Unreadable):
        old.problems.append(unreadable("fsdp", words, source))
    elif words is not None:
        read_option_words(old, words, source)
    block = call.keywords.get("fsdp_config")
    if isinstance(block, (Unreadable, Called)):
        what = block if isinstance(block, Unreadable) else Unreadable(as_text(block), int(source.rpartition(":")[2]))
        old.problems.append(unreadable("fsdp_config", what, source))
    elif isinstance(block, str):
        problem = f"fsdp_config={block!r} names another file, which holds the settings"
        old.problems.append(Problem(message=problem, fix=f"hf-fsdp migrate {block}", source=source))
    elif isinstance(block, dict):
        for key, value in block.items():
            name = FSDP_BLOCK_NAMES.get(strip_prefix(str(key)))
            if name is None:
                problem = f"fsdp_config[{key!r}] is not a key of FSDP that hf-fsdp knows"
                old.problems.append(Problem(message=problem, fix=f"remove {key} from a copy", source=source))
            elif isinstance(value, list):
                _add_list(old, name, str(key), value, source)
            else:
                add_plain(old, name, str(key), value, source)
    for key, name in TRAINING_KEYS.items():
        if key in call.keywords:
            add_plain(old, name, key, call.keywords[key], source)


def explain_arguments(old: OldConfig, call: Called) -> None:
    """Say of an optimizer's name and of quantized loading, in whatever call, why they cannot stay as they are."""
    for key in ("optim", "load_in_8bit", "load_in_4bit"):
        value = call.keywords.get(key)
        if isinstance(value, (str, bool, Symbol)):
            left = explain(key, value.last if isinstance(value, Symbol) else value, f"{key}={as_text(value)}")
            if left is not None:
                old.left.append(left)


def _read_tensor_parallel(old: OldConfig, call: Called, source: str) -> None:
    message = f"{call.last}(...): tensor parallelism is not built"
    old.problems.append(Problem(message=message, fix=f"remove {call.last} from a copy of the file", source=source))


OTHER_CALLS: dict[str, Callable[[OldConfig, Called, str], None]] = {
    "state_dict_type": _read_state_dict_type,
    "set_state_dict_type": _read_state_dict_type,
    "StateDictOptions": _read_state_dict_options,
    "apply_activation_checkpointing": _read_checkpointing,
    "checkpoint_wrapper": _read_checkpointing,
    "gradient_checkpointing_enable": _read_checkpointing,
    "compile": _read_compile,
    "set_modules_to_forward_prefetch": _read_prefetch("forward_prefetch"),
    "set_modules_to_backward_prefetch": _read_prefetch("backward_prefetch"),
    "parallelize_module": _read_tensor_parallel,
    "no_sync": _read_no_sync,
    "set_requires_gradient_sync": _read_no_sync,
}
# Calls that switch something on: under a condition, whether they run is not known.
SWITCHES = frozenset(
    {"apply_activation_checkpointing", "checkpoint_wrapper", "gradient_checkpointing_enable", "compile"}
)
