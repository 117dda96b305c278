"""Which modules have their weight read from outside their own forward.

A unit's parameters are whole only while its own forward runs. A module whose weight is read raw by another
(`F.linear(x, self.lm_head.weight)`, as fused and chunked losses do) would hand out its shard there, so it must
stay in the unit of its reader. Found by reading the source of the forwards: it costs nothing, needs no inputs,
and covers forwards that were replaced on the instance (TRL, Liger), methods and functions that a forward calls
with the module or a part of it, and names that stand for it on the way. The same reading tells which modules are
called and by whom: a module whose parts are called past its own forward would not be gathered then.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_fsdp.policies.forward_source import Summary, forward_functions, summarize

# Methods without arguments that hand out a part of the model and do nothing else.
_GETTERS = frozenset({"get_input_embeddings", "get_output_embeddings", "get_decoder", "get_encoder", "get_base_model"})
# How many calls are followed from a forward: forward -> loss function -> kernel wrapper, and one to spare.
_MAX_DEPTH = 4
_UNKNOWN = object()


@dataclass(frozen=True)
class RawRead:
    """`reader` reads a weight or bias of `target`; both are module names, and `target` is not the reader itself.

    `certain` is False where the source only tells the last part of the target's name.
    """

    reader: str
    target: str
    certain: bool = True


@dataclass(frozen=True)
class ModuleCall:
    """`caller`'s forward (or a method or function that it runs) calls `target`; both are module names."""

    caller: str
    target: str


@dataclass(frozen=True)
class Sources:
    """What the forwards of a model say about its modules."""

    reads: frozenset[RawRead]
    calls: frozenset[ModuleCall]
    # Modules that return a tensor of theirs (a bias that the caller adds): it is not whole after their forward.
    returning: frozenset[str] = frozenset()

    def is_gathered_by_its_forward(self, name: str) -> bool:
        """Return whether all uses of the module `name` lie inside its own forward, so that it can be a unit."""
        return not (
            is_read_from_outside(name, self.reads) or is_called_in_parts(name, self.calls) or name in self.returning
        )


def read_sources(model: nn.Module) -> Sources:
    """Return every read of another module's tensors, and every call of a module, that a forward of `model` contains."""
    names = {id(module): name for name, module in model.named_modules()}
    by_last_name: dict[str, list[str]] = {}
    for name in names.values():
        by_last_name.setdefault(name.rpartition(".")[2], []).append(name)
    reads: set[RawRead] = set()
    calls: set[ModuleCall] = set()
    returning: set[str] = set()
    for reader, module in model.named_modules():
        found = _follow_forward(module)
        for owner in found.reads:
            # A name that could not be followed to a module stands for every module of that name.
            certain = not isinstance(owner, str)
            targets = by_last_name.get(owner, []) if isinstance(owner, str) else [names.get(id(owner))]
            reads.update(RawRead(reader, name, certain) for name in targets if name is not None and name != reader)
        calls.update(ModuleCall(reader, names[id(called)]) for called in found.calls if id(called) in names)
        if found.returns_tensor:
            returning.add(reader)
    return Sources(frozenset(reads), frozenset(calls), frozenset(returning))


def find_raw_reads(model: nn.Module) -> frozenset[RawRead]:
    """Return every read of another module's tensors that a forward of `model` contains."""
    return read_sources(model).reads


def is_read_from_outside(name: str, reads: frozenset[RawRead]) -> bool:
    """Return whether anything outside the module `name` reads a weight inside it."""
    return any(_inside(read.target, name) and not _inside(read.reader, name) for read in reads)


def is_called_in_parts(name: str, calls: frozenset[ModuleCall]) -> bool:
    """Return whether anything outside the module `name` calls a module inside it, past `name`'s own forward."""
    return any(call.target != name and _inside(call.target, name) and not _inside(call.caller, name) for call in calls)


def _inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


# -- following a forward ----------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """Modules (or, where they cannot be followed, their last names) whose tensors a forward reads; modules it calls."""

    reads: list[nn.Module | str] = field(default_factory=list)
    calls: list[nn.Module] = field(default_factory=list)
    returns_tensor: bool = False


def _follow_forward(module: nn.Module) -> _Found:
    found = _Found()
    for function in forward_functions(module):
        summary = summarize(function)
        scope = _Scope(function, summary, {summary.first: module} if summary.first else {})
        for node in summary.returned:
            owner = scope.value(node.value)
            found.returns_tensor |= isinstance(owner, nn.Module) and owner._parameters.get(node.attr) is not None
        _follow(function, {}, module, found, set(), _MAX_DEPTH)
    return found


def _follow(
    function: Callable[..., Any],
    bound: dict[str, Any],
    this: nn.Module | None,
    found: _Found,
    seen: set[Any],
    depth: int,
) -> None:
    summary = summarize(function)
    key = (function, id(this), *sorted((name, id(value)) for name, value in bound.items()))
    if summary.is_idle or key in seen:
        return
    seen.add(key)
    if this is not None and summary.first is not None:
        bound = {summary.first: this, **bound}
    scope = _Scope(function, summary, bound)
    for owner in summary.reads:
        value = scope.value(owner)
        if isinstance(value, nn.Module):
            found.reads.append(value)
        elif value is _UNKNOWN and (name := scope.last_name(owner)) is not None:
            found.reads.append(name)
    for node in summary.attributes:  # tensors under other names than weight and bias: in_proj_weight, gate_up_proj
        value = scope.value(node.value)
        if isinstance(value, nn.Module) and value._parameters.get(node.attr) is not None:
            found.reads.append(value)
    if depth == 0:
        return
    for call in summary.calls:
        if isinstance(called := scope.value(call.func), nn.Module):
            found.calls.append(called)
            continue
        callee, receiver = scope.callee(call.func)
        if callee is None:
            continue
        arguments = _bind(callee, call, scope, skip_first=receiver is not None)
        if receiver is not None or arguments:
            _follow(callee, arguments, receiver, found, seen, depth - 1)


def _bind(callee: Callable[..., Any], call: ast.Call, scope: _Scope, *, skip_first: bool) -> dict[str, Any]:
    """Parameters of `callee` that this call fills with modules."""
    parameters = summarize(callee).parameters[1 if skip_first else 0 :]
    given = [*zip(parameters, call.args, strict=False), *((item.arg, item.value) for item in call.keywords if item.arg)]
    values = {name: scope.value(argument) for name, argument in given}
    return {name: value for name, value in values.items() if isinstance(value, nn.Module)}


@dataclass
class _Scope:
    """What the names inside one function stand for, as far as modules are concerned."""

    function: Callable[..., Any]
    summary: Summary
    bound: dict[str, Any]
    pending: set[str] = field(default_factory=set)

    def value(self, node: ast.expr) -> Any:
        """The module (or function) that an expression stands for; `_UNKNOWN` where it cannot be told."""
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Attribute):
            return _get(self.value(node.value), node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GETTERS:
            return _call_getter(self.value(node.func.value), node.func.attr)
        return _UNKNOWN

    def callee(self, node: ast.expr) -> tuple[Callable[..., Any] | None, nn.Module | None]:
        """The function that a call runs, and the module it is a method of."""
        if isinstance(node, ast.Attribute):
            receiver = self.value(node.value)
            if not isinstance(receiver, nn.Module):
                return None, None
            method = inspect.getattr_static(type(receiver), node.attr, None)
            is_own = inspect.isfunction(method) and method.__module__ != nn.Module.__module__
            return (method, receiver) if is_own else (None, None)
        value = self.value(node)
        return (value, None) if inspect.isfunction(value) else (None, None)

    def last_name(self, node: ast.expr) -> str | None:
        """`self.lm_head` -> lm_head; a name that stands for such -> the same; anything else -> None."""
        if isinstance(node, ast.Name):
            # Seen before in this search: two names that stand for each other.
            source = None if node.id in self.pending else self.summary.aliases.get(node.id)
            if source is None:
                return node.id
            self.pending.add(node.id)
            name = self.last_name(source)
            self.pending.discard(node.id)
            return name
        return node.attr if isinstance(node, ast.Attribute) else None

    def _named(self, name: str) -> Any:
        if name in self.bound:
            return self.bound[name]
        if name in self.summary.aliases and name not in self.pending:
            self.pending.add(name)
            value = self.value(self.summary.aliases[name])
            self.pending.discard(name)
            return value
        if name in self.summary.parameters:
            return _UNKNOWN
        return _outer_value(self.function, name)


def _get(owner: Any, attribute: str) -> Any:
    if not isinstance(owner, nn.Module):
        return _UNKNOWN
    child = owner._modules.get(attribute)
    if child is not None:
        return child
    try:
        value = getattr(owner, attribute)  # `base_model`, and PEFT's wrappers that pass attributes on
    except Exception:
        return _UNKNOWN
    return value if isinstance(value, nn.Module) else _UNKNOWN


def _call_getter(owner: Any, getter: str) -> Any:
    try:
        value = getattr(owner, getter)()
    except Exception:
        return _UNKNOWN  # transformers raises for parts that have none
    return value if isinstance(value, nn.Module) else _UNKNOWN


def _outer_value(function: Callable[..., Any], name: str) -> Any:
    code, cells = function.__code__, function.__closure__ or ()
    for free, cell in zip(code.co_freevars, cells, strict=False):
        if free == name:
            try:
                return cell.cell_contents
            except ValueError:
                return _UNKNOWN
    return function.__globals__.get(name, _UNKNOWN)
