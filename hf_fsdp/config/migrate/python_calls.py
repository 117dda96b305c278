"""Reads the calls of FSDP1 and FSDP2 in a Python file, by `ast` alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fsdp.config.migrate import python_arguments as arguments
from hf_fsdp.config.migrate.python_names import CallSite, Names
from hf_fsdp.config.migrate.python_other_calls import (
    OTHER_CALLS,
    SWITCHES,
    explain_arguments,
    read_training_arguments,
)
from hf_fsdp.config.migrate.python_values import Called, Evaluator
from hf_fsdp.config.migrate.setting import Left, OldConfig
from hf_fsdp.errors import ConfigError, Problem

KIND = "a Python file with calls of FSDP"
FSDP1_NAMES = frozenset({"FullyShardedDataParallel", "FSDP"})
SILENT = (
    "fp32",
    "no mixed precision there; if the model was loaded in bfloat16, this is bf16-true",
)
# Calls that only say how a script worked around something, by the last part of their names.
LEFT_CALLS = {
    "summon_full_params": (
        "no equivalent",
        "one parameter: parameter.full_tensor() on all processes; all of them: Accelerator.get_state_dict",
    ),
    "optim_state_dict": ("not needed", "Trainer saves and loads the optimizer with its checkpoints"),
    "full_optim_state_dict": ("not needed", "Trainer saves and loads the optimizer with its checkpoints"),
    "sharded_optim_state_dict": ("not needed", "Trainer saves and loads the optimizer with its checkpoints"),
    "optim_state_dict_to_load": ("not needed", "Trainer saves and loads the optimizer with its checkpoints"),
    "clip_grad_norm_": (
        "not needed",
        "Trainer's max_grad_norm; torch.nn.utils.clip_grad_norm_ is right for shards too",
    ),
    "ShardedGradScaler": ("not needed", "fp16-mixed brings its own scaler, in step on all processes"),
    "reset_parameters": ("not needed", "parameters on meta get the values of process 0"),
}


@dataclass
class Reading:
    """One pass over a file: where things stand and where they go."""

    old: OldConfig
    evaluator: Evaluator
    sharding_calls: list[tuple[CallSite, Called]]

    def source(self, site: CallSite) -> str:
        """Return ``file:line`` of a call."""
        return f"{self.old.path}:{site.node.lineno}"


def read_python(path: Path) -> OldConfig:
    """Return what the calls in a Python file say; the file is parsed, never run.

    Raises:
        ConfigError: the file cannot be read, is not Python, or holds no call of FSDP.
    """
    old = OldConfig(kind=KIND, path=str(path))
    try:
        names = Names(_parse(path))
        reading = Reading(old, Evaluator(names.imports), [])
        for site in names.calls:
            reading.evaluator.conditions = site.conditions
            value = reading.evaluator.evaluate(site.node, site.scope)
            if isinstance(value, Called):
                _read_call(reading, site, value)
    except RecursionError:
        raise ConfigError(
            f"{path} is nested too deeply to be read", fix="name a file with the FSDP calls only", source=str(path)
        ) from None
    if not reading.sharding_calls and not old.settings and not old.problems:
        raise ConfigError(
            f"{path} has no call of FullyShardedDataParallel, fully_shard or TrainingArguments(fsdp=...)",
            fix="name the file that has the call",
            source=str(path),
        )
    _settle_resharding(reading)
    _note_whole_model(reading)
    for what, condition in reading.evaluator.assumed.items():
        old.left.append(Left(what, f"stands under `if {condition}`", "assumed"))
    old.silent_precision = SILENT
    return old


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", fix="check the path", source=str(path)) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", fix="name a file", source=str(path)) from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"{path} is not valid Python: {getattr(error, 'msg', None) or error}",
            fix="name a file that Python can parse",
            source=f"{path}:{line}" if line else str(path),
        ) from None


def _read_call(reading: Reading, site: CallSite, call: Called) -> None:
    old, source = reading.old, reading.source(site)
    last = call.last
    explain_arguments(old, call)
    if last in FSDP1_NAMES:
        reading.sharding_calls.append((site, call))
        _read_keywords(old, arguments.named(call, arguments.FSDP1_ORDER), arguments.FSDP1, source)
    elif last == "fully_shard":
        reading.sharding_calls.append((site, call))
        found = arguments.named(call, ("module",))
        found.pop("reshard_after_forward", None)  # differs between blocks and root; settled at the end
        _read_keywords(old, found, arguments.FSDP2, source)
    elif last in ("FullyShardedDataParallelPlugin", "enable_wrap"):
        reading.sharding_calls.append((site, call))
        _read_keywords(old, dict(call.keywords), arguments.FSDP1, source)
    elif last == "Accelerator" and "mixed_precision" in call.keywords:
        arguments.add_plain(old, "mixed_precision", "mixed_precision", call.keywords["mixed_precision"], source)
    elif "fsdp" in call.keywords and last.endswith(("Arguments", "Config")):
        reading.sharding_calls.append((site, call))
        read_training_arguments(old, call, source)
    elif last in OTHER_CALLS:
        before = len(old.settings)
        OTHER_CALLS[last](old, call, source)
        if site.conditions and len(old.settings) > before and last in SWITCHES:
            old.left.append(Left(old.settings[before].text, f"stands under `if {site.conditions[-1]}`", "assumed"))
    elif last in LEFT_CALLS and (call.name != "torch.nn.utils.clip_grad_norm_"):
        kind, why = LEFT_CALLS[last]
        old.left.append(Left(f"{last}(...) on line {site.node.lineno}", why, kind))


def _read_keywords(old: OldConfig, found: dict[str, Any], table: dict[str, Callable[..., None]], source: str) -> None:
    """Read each argument by its own reader; an unknown one is a problem, never dropped."""
    for name, value in found.items():
        if name in ("module", "modules", "wrapper_cls"):
            continue
        reader = table.get(name)
        if reader is not None:
            reader(old, name, value, source)
        elif name == "**":
            old.problems.append(arguments.unreadable("**" + value.text, value, source))
        else:
            old.problems.append(
                Problem(
                    message=f"{name}={arguments.as_text(value)} is not an argument of FSDP that hf-fsdp knows",
                    fix=f"remove {name} from a copy of the file",
                    source=source,
                )
            )


def _settle_resharding(reading: Reading) -> None:
    """Read `reshard_after_forward` of `fully_shard`: what the blocks have counts, the root may differ."""
    found = [
        (site, call.keywords["reshard_after_forward"])
        for site, call in reading.sharding_calls
        if call.last == "fully_shard" and "reshard_after_forward" in call.keywords
    ]
    blocks = [item for item in found if item[0].in_loop] or found
    for site, value in found:
        source = reading.source(site)
        text = f"reshard_after_forward={arguments.as_text(value)}"
        if not any(site is other for other, _ in blocks):
            if value != blocks[0][1]:
                why = "the root keeps what it holds until the backward where torch says so; one value is for all blocks"
                reading.old.left.append(Left(text, why, "changed"))
        elif isinstance(value, int) and not isinstance(value, bool):
            reading.old.add("reshard_after_forward", True, text, source)
            reading.old.left.append(Left(text, "a block is freed whole, not kept on a smaller group", "changed"))
        else:
            arguments.add_plain(reading.old, "reshard_after_forward", "reshard_after_forward", value, source)


def _note_whole_model(reading: Reading) -> None:
    calls: Iterable[tuple[CallSite, Called]] = [
        (site, call) for site, call in reading.sharding_calls if call.last in FSDP1_NAMES
    ]
    without = [site for site, call in calls if "auto_wrap_policy" not in arguments.named(call, arguments.FSDP1_ORDER)]
    if len(without) == 1 and len(list(calls)) == 1:
        reading.old.left.append(
            Left(
                f"no auto_wrap_policy on line {without[0].node.lineno}",
                "the whole model was one unit, gathered at once; hf-fsdp makes a unit of each block",
                "changed",
            )
        )
