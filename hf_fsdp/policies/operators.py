"""Operators whose outputs selective checkpointing keeps: from the names a person writes to torch's own operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hf_fsdp.errors import Problem, nearest_names
from hf_fsdp.torch_private import is_composite, operator_names

# Whatever implementation runs: which kernel `scaled_dot_product_attention` takes depends on device, dtype and mask.
_GROUPS = {
    "attention": re.compile(
        r"(?!.*(backward|bwd))(aten::_scaled_dot_product_(flash|efficient|cudnn|fused)\w*"
        r"|aten::_(flash|efficient)_attention_forward\w*|flash_attn\w*::\w*(fwd|forward)\w*)"
    ),
    "matmul": re.compile(r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm\w*|_grouped_mm|_scaled_grouped_mm\w*)"),
}
_KEY = "activation_checkpointing.selective"


@dataclass(eq=False)
class KeptOperators:
    """The operators whose outputs are kept, each with the names that asked for it, and which of the names ran."""

    operators: dict[Any, tuple[str, ...]]
    _ran: set[str] = field(default_factory=set)
    _random: set[str] = field(default_factory=set)
    _asked: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """What was asked for, in order."""
        return tuple(dict.fromkeys(name for names in self.operators.values() for name in names))

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Return the contexts of one forward and of its recompute, for a block that is not compiled."""
        self._asked = True
        forward, recompute = self.contexts_to_trace()
        return _OnlyThese(self.operators, forward), _OnlyThese(self.operators, recompute)

    @property
    def contexts_to_trace(self) -> Callable[[], Any]:
        """A function that returns torch's own contexts, which tag operators while a block is compiled.

        A function and no method: dynamo takes the bare function of a method.
        """

        def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return self._decide(operator, args, kwargs)

        def make() -> Any:
            return create_selective_checkpoint_contexts(decide)

        return make

    def findings(self) -> list[str]:
        """One plain line for each name that keeps nothing; to be asked after a step.

        A graph from the compiler's cache was not traced, so nothing is known of it then.
        """
        if not self._asked:
            return []
        lines = [
            f"{_KEY}: {name} never ran in a checkpointed block, so nothing of it is kept"
            + (": attention runs there as matmul and softmax" if name == "attention" else "")
            for name in self.names
            if name not in self._ran and name not in self._random
        ]
        return lines + [
            f"{_KEY}: {name} draws random numbers (dropout) and is computed again, or the numbers drawn after it "
            "would differ between forward and recompute"
            for name in sorted(self._random)
        ]

    def _decide(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckpointPolicy:
        self._asked = True
        names = self.operators.get(operator)
        if names is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if _draws_random_numbers(operator, args, kwargs):
            self._random.update(names)
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._ran.update(names)
        return CheckpointPolicy.MUST_SAVE


class _OnlyThese(TorchDispatchMode):
    """Shows torch's mode the named operators and no other.

    Torch's mode wants the recompute to run exactly the operators of the forward, and FSDP's hooks, which run inside a
    recompute, cast and gather where the forward did not.
    """

    def __init__(self, operators: Container[Any], inner: Any):
        super().__init__()
        self._operators = operators
        self._inner = inner

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's own modes of checkpointing: a compiled function inside a block is not looked into."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operators:
            return self._inner.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def resolve_operators(names: Iterable[str], source: str | None = None) -> tuple[KeptOperators, list[Problem]]:
    """Turn names into torch's operators.

    Args:
        names: ``attention``, ``matmul``, or operators as ``aten.mm`` (all its overloads) or ``aten.mm.default``.
        source: where the names came from, for messages.

    Returns:
        The operators, and a problem for every name that is none or whose outputs cannot be kept.
    """
    kept: dict[Any, tuple[str, ...]] = {}
    problems: list[Problem] = []
    known = operator_names()
    for name in names:
        found = _lookup(name, known)
        usable = [operator for operator in found if _why_not(operator) is None]
        if not usable:
            problems.append(_problem(name, found, known, source))
        for operator in usable:
            kept[operator] = (*kept.get(operator, ()), name)
    return KeptOperators(kept), problems


def _lookup(name: str, known: Iterable[str]) -> list[Any]:
    if (pattern := _GROUPS.get(name)) is not None:
        return [_operator(item) for item in known if pattern.fullmatch(item.partition(".")[0])]
    written = name.removeprefix("torch.ops.")
    namespace, _, rest = written.partition("::" if "::" in written else ".")
    base, _, overload = rest.partition(".")
    wanted = f"{namespace}::{base}"
    if overload:
        exact = wanted if overload == "default" else f"{wanted}.{overload}"
        return [_operator(item) for item in known if item == exact]
    return [_operator(item) for item in known if item.partition(".")[0] == wanted]


def _operator(qualified: str) -> Any:
    namespace, _, rest = qualified.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def _why_not(operator: Any) -> str | None:
    """Why the outputs of an operator cannot be kept, or None when they can."""
    if is_composite(operator):
        return "runs as other operators and is never seen itself"
    if operator._schema.is_mutable:
        return "writes into its inputs"
    if any(result.alias_info is not None for result in operator._schema.returns):
        return "returns a view, which holds nothing to keep"
    random = torch.Tag.nondeterministic_seeded in operator.tags
    if random and _dropout_position(operator) is None:
        return "draws random numbers: kept, the numbers drawn after it would differ between forward and recompute"
    return None


def _problem(name: str, found: list[Any], known: Iterable[str], source: str | None) -> Problem:
    if found:
        return Problem(
            message=f"{_KEY}: {name} cannot be kept: it {_why_not(found[0])}",
            fix=f"{_KEY.partition('.')[0]}: {{selective: [matmul]}}   # or attention, or the operators it runs as",
            source=source,
        )
    usable = (item for item in known if item.startswith("aten::") and _why_not(_operator(item)) is None)
    names = {*_GROUPS, *(item.partition(".")[0].replace("::", ".") for item in usable)}
    near = nearest_names(name, names) or nearest_names(f"aten.{name}", names)
    return Problem(
        message=f"{_KEY}: {name} is not an operator of this torch ({torch.__version__}) nor a group of operators",
        near=", ".join(near) or ", ".join(_GROUPS),
        fix=f"{_KEY.partition('.')[0]}: {{selective: [{near[0] if near else 'attention'}]}}",
        source=source,
    )


def _dropout_position(operator: Any) -> int | None:
    arguments = [argument.name for argument in operator._schema.arguments]
    return arguments.index("dropout_p") if "dropout_p" in arguments else None


def _draws_random_numbers(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws: attention with dropout. Skipped in the recompute, it would not advance the generator."""
    position = _dropout_position(operator)
    if position is None:
        return False
    given = kwargs.get("dropout_p", args[position] if len(args) > position else None)
    if given is None:
        given = operator._schema.arguments[position].default_value
    return bool(given)
