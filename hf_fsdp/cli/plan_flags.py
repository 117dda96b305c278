"""Options of `hf-fsdp plan` that contradict each other, whatever their values."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hf_fsdp.errors import ConfigError, HfFsdpError, Problem

Options = Mapping[str, Any]
QUESTIONS = ("max_batch", "min_gpus", "compare")
# What only a ranked plan has; what may stand beside a run config, which says all else itself.
_OF_A_PLAN = ("html", "write", "pick", "why", "top", "exact", "price", "tokens")
_OF_A_RUN = (
    *("gpus", "gpu_memory", "host_memory", "price", "tokens", "exact", "trust_remote_code"),
    *("why", "as_json", "html", "force"),
)

# Options whose own words for nothing are better.
_SAID_ELSEWHERE = (
    "model",
    "gpus",
    "gpu_memory",
    "config",
    "precision",
    "price",
    "tokens",
    "method",
    "loss",
    "attention",
    "optim",
)

_Value = TypeVar("_Value")


class Problems:
    """Problems of one command line, collected while it is read."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def attempt(self, read: Callable[[], _Value]) -> _Value | None:
        """Return what `read` does; None where it raises an error of ours, which is kept."""
        try:
            return read()
        except HfFsdpError as error:
            self.found.extend(error.problems)
            return None

    def refuse(self) -> None:
        """Raise what was found, all of it.

        Raises:
            ConfigError: there is something.
        """
        if self.found:
            raise ConfigError(list(dict.fromkeys(self.found)))


def flag_of(name: str) -> str:
    """Return an option as a person types it."""
    return "--json" if name == "as_json" else f"--{name.replace('_', '-')}"


def check_together(options: Options, typed: Collection[str], *, is_run: bool) -> Iterator[Problem]:
    """Yield what in a command line contradicts itself, whatever its values.

    Args:
        options: by name.
        typed: names of those that were typed.
        is_run: whether MODEL is a run config.
    """
    kinds = [name for name in QUESTIONS if options[name]]
    if len(kinds) > 1:
        yield Problem(
            message=f"{' and '.join(flag_of(kind) for kind in kinds)} are questions of their own",
            fix="ask one at a time",
        )
    if kinds and not is_run:
        for name in _OF_A_PLAN:
            if name in typed:
                yield Problem(
                    message=f"{flag_of(name)} is of a plan, and {flag_of(kinds[0])} answers with a table",
                    fix=f"leave out {flag_of(name)}, or {flag_of(kinds[0])}",
                )
    if is_run:
        yield from _check_run(options, typed)
    elif "micro_batch_size" in typed and not options["max_batch"]:
        yield Problem(
            message="--micro-batch-size is of --max-batch; a plan tries every micro-batch of the global batch",
            fix="--max-batch beside it, or leave it out",
        )
    only_memory = options["gpu_memory"] is not None and str(options["gpus"] or "").strip().isdigit()
    if options["price"] is not None and only_memory and not kinds:
        yield Problem(
            message="--price beside --gpu-memory: of such a GPU no speed is known, so no cost",
            fix="leave out --price, or name a GPU in place of its memory: --gpus 8xA100-80G",
        )
    elif options["price"] is not None and options["tokens"] is None:
        yield Problem(message="--price without --tokens: the cost of what?", fix="--tokens 1B, or leave --price out")
    for name in sorted(typed):
        if isinstance(options[name], str) and name not in _SAID_ELSEWHERE and not options[name].strip(" ,"):
            yield Problem(message=f"{flag_of(name)} is empty", fix=f"leave out {flag_of(name)}, or say what")
    if "pick" in typed and not options["write"] and not kinds and not is_run:
        yield Problem(
            message=f"--pick {options['pick']} without --write: picked for what?",
            fix="--write DIR, or leave --pick out",
        )
    if options["pick"] < 1:
        yield Problem(message=f"--pick {options['pick']} is no rank of a plan", fix="--pick 1   # the best")
    if options["top"] < 1:
        yield Problem(message=f"--top {options['top']} shows no plan", fix="--top 5")
    adapters = [flag_of(name) for name in ("lora_r", "lora_dropout") if name in typed]
    if adapters and options["method"].strip().lower() == "full" and not is_run:
        yield Problem(
            message=f"{' and '.join(adapters)}: --method full has no adapters",
            fix="--method lora, or leave them out",
        )
    if "trainable" in typed and options["method"].strip().lower() in ("lora", "qlora") and not is_run:
        yield Problem(
            message=f"--trainable {options['trainable']} freezes parts of a full fine-tuning, and --method is "
            f"{options['method']}",
            fix=f"--lora-parts {options['trainable']} places adapters; parts trained in full beside them are said in a "
            "run config (trainable: [...]), which is planned as it stands",
        )


def _check_run(options: Options, typed: Collection[str]) -> Iterator[Problem]:
    others = [name for name in typed if name not in (*_OF_A_RUN, "model", "top", "write")]
    if others:
        yield Problem(
            message=f"{options['model']} is planned as it stands, and {', '.join(map(flag_of, others))} would change "
            "it or ask something else",
            fix=f"change the file, or name its model in place of it: hf-fsdp plan {_model_of(options['model'])} ...",
        )
    if options["write"]:
        yield Problem(
            message=f"--write {options['write']}: {options['model']} is a run config already",
            fix="start it as it is; or name its model in place of it, and --write what the search finds",
        )


def _model_of(path: str) -> str:
    """Return the model that a run config names; any, where the file does not say it, which is told elsewhere."""
    from hf_fsdp.plan.search.recipe_run import peek

    name = peek(Path(path)).get("model_name_or_path")
    return shlex.quote(name) if isinstance(name, str) else "llama-2-7b"
