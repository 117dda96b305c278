"""Error classes with one shape: rule, what was received, what is near, how to fix it, where it came from.

Every error a person can cause is built from `Problem`s, so that all problems of one input are
reported at once and every one of them reads the same way.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, in the words a person needs to repair it.

    Args:
        message: the rule by its config key and what was received, e.g.
            ``wrap.layer_classes=['LlamaLayer'] matches no module of LlamaForCausalLM``.
        fix: what to write instead. It is tested: following it must work.
        near: close names or candidates, if there are any.
        source: where the value came from (``file:line``, ``FSDPConfig(...)``, ``TrainingArguments``).
    """

    message: str
    fix: str
    near: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        lines = [self.message.replace("\n", "\n  ")]
        for label, text in (("near", self.near), ("fix", self.fix), ("from", self.source)):
            if text:
                lines.append(f"  {label:<5} " + text.replace("\n", "\n        "))
        return "\n".join(lines)


class HfFsdpError(Exception):
    """Base of all errors raised on purpose by hf-fsdp; holds every `Problem` found.

    Args:
        problems: one message (then give ``fix``, ``near``, ``source`` too) or a sequence of `Problem`s.
    """

    def __init__(
        self,
        problems: str | Problem | Sequence[Problem],
        *,
        fix: str = "",
        near: str | None = None,
        source: str | None = None,
    ):
        if isinstance(problems, str):
            problems = Problem(message=problems, fix=fix, near=near, source=source)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        text = "\n".join(str(problem) for problem in self.problems)
        if len(self.problems) > 1:
            text = f"{len(self.problems)} problems\n{text}"
        super().__init__(text)


class ConfigError(HfFsdpError):
    """A config, a config file or a combination of settings that cannot be used as it is."""


class WrapPolicyError(HfFsdpError):
    """The wrap policy leaves no usable set of units for this model."""


class PrecisionError(HfFsdpError):
    """Dtypes that do not fit together, or a precision that cannot be given."""


class ShardingError(HfFsdpError):
    """The model is not sharded as asked: found by the audit, or by an impossible request."""


class IntegrationError(HfFsdpError):
    """Trainer, Accelerate or TRL was set up in a way that the backend cannot work with."""


class NumericsError(HfFsdpError):
    """Training produced a loss or gradients that are not finite; raised before the step is taken."""


class DataError(HfFsdpError):
    """A dataset, its columns or its template cannot be trained on."""


class ModelAccessError(HfFsdpError):
    """A model or tokenizer is missing, gated or unreadable; found before anything loads."""


class CheckpointError(HfFsdpError):
    """A checkpoint cannot be written, read or trusted."""


class PlanError(HfFsdpError):
    """What was asked of the planner cannot be simulated, or fits nowhere."""


def nearest_names(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return up to `limit` known names that resemble `name`, best first; empty when none does."""
    known = list(known)
    lowered = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), lowered, n=limit, cutoff=0.55)
    return [lowered[match] for match in matches]
