"""Which modules have their weight read from outside their own forward.

A unit's parameters are whole only while its own forward runs. A module whose weight is read raw by another
(`F.linear(x, self.lm_head.weight)`, as fused and chunked losses do) would hand out its shard there, so it must
stay in the unit of its reader. Found by reading the source of the forwards: it costs nothing, needs no inputs,
and covers forwards that were replaced on the instance (TRL, Liger), methods and functions that a forward calls
with the module or a part of it, and names that stand for it on the way.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

# Reading these of a weight never touches its values.
_METADATA = frozenset(
    {"dtype", "device", "shape", "ndim", "size", "dim", "numel", "requires_grad", "is_meta", "is_cuda", "element_size"}
)
_TENSORS = frozenset({"weight", "bias"})
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


def find_raw_reads(model: nn.Module) -> frozenset[RawRead]:
    """Return every read of another module's weight or bias that a forward of `model` contains."""
    names = {id(module): name for name, module in model.named_modules()}
    by_last_name: dict[str, list[str]] = {}
    for name in names.values():
        by_last_name.setdefault(name.rpartition(".")[2], []).append(name)
    reads: set[RawRead] = set()
    for reader, module in model.named_modules():
        for owner in _owners_read_by(module):
            # A name that could not be followed to a module stands for every module of that name.
            certain = not isinstance(owner, str)
            targets = by_last_name.get(owner, []) if isinstance(owner, str) else [names.get(id(owner))]
            reads.update(RawRead(reader, name, certain) for name in targets if name is not None and name != reader)
    return frozenset(reads)


def is_read_from_outside(name: str, reads: frozenset[RawRead]) -> bool:
    """Return whether anything outside the module `name` reads a weight inside it."""
    return any(_inside(read.target, name) and not _inside(read.reader, name) for read in reads)


def _inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


# -- following a forward ----------------------------------------------------------------------------------------------


def _owners_read_by(module: nn.Module) -> list[nn.Module | str]:
    """Modules (or, where they cannot be followed, their last names) whose tensors `module`'s forward reads."""
    found: list[nn.Module | str] = []
    for function in forward_functions(module):
        _follow(function, {}, module, found, set(), _MAX_DEPTH)
    return found


def _follow(
    function: Callable[..., Any],
    bound: dict[str, Any],
    this: nn.Module | None,
    found: list[nn.Module | str],
    seen: set[Any],
    depth: int,
) -> None:
    summary = _summarize(function)
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
            found.append(value)
        elif value is _UNKNOWN and (name := scope.last_name(owner)) is not None:
            found.append(name)
    if depth == 0:
        return
    for call in summary.calls:
        callee, receiver = scope.callee(call.func)
        if callee is None:
            continue
        arguments = _bind(callee, call, scope, skip_first=receiver is not None)
        if receiver is not None or arguments:
            _follow(callee, arguments, receiver, found, seen, depth - 1)


def _bind(callee: Callable[..., Any], call: ast.Call, scope: _Scope, *, skip_first: bool) -> dict[str, Any]:
    """Parameters of `callee` that this call fills with modules."""
    parameters = _summarize(callee).parameters[1 if skip_first else 0 :]
    given = [*zip(parameters, call.args, strict=False), *((item.arg, item.value) for item in call.keywords if item.arg)]
    values = {name: scope.value(argument) for name, argument in given}
    return {name: value for name, value in values.items() if isinstance(value, nn.Module)}


@dataclass
class _Scope:
    """What the names inside one function stand for, as far as modules are concerned."""

    function: Callable[..., Any]
    summary: _Summary
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


# -- reading a function -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Summary:
    """What matters in one function's source; `aliases` are plain assignments of names, the last one counts."""

    parameters: tuple[str, ...] = ()
    reads: tuple[ast.expr, ...] = ()
    calls: tuple[ast.Call, ...] = ()
    aliases: dict[str, ast.expr] = field(default_factory=dict)

    @property
    def first(self) -> str | None:
        return self.parameters[0] if self.parameters else None

    @property
    def is_idle(self) -> bool:
        return not self.reads and not self.calls


def forward_functions(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield every function that `module`'s forward is made of: on the instance, of its classes, inside wrappers."""
    candidates = [vars(module).get("forward")]
    for cls in type(module).__mro__:
        if cls is nn.Module:
            break
        candidates.append(vars(cls).get("forward"))
    for candidate in candidates:
        if candidate is not None:
            yield from _unwrap_all(candidate)


def _unwrap_all(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Every function in a chain of wrappers: a wrapper that carries `__wrapped__` has code of its own."""
    chain: list[Callable[..., Any]] = []
    pending: list[Any] = [function]
    while pending:
        current = pending.pop()
        if isinstance(current, functools.partial):
            pending.append(current.func)
        elif hasattr(current, "__func__"):
            pending.append(current.__func__)
        elif inspect.isfunction(current) and current not in chain:
            chain.append(current)
            pending.append(getattr(current, "__wrapped__", None))
    return chain


@functools.lru_cache(maxsize=4096)
def _summarize(function: Callable[..., Any]) -> _Summary:
    try:
        # The source of this very function and not of the one it wraps, which `inspect` would go on to.
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, TypeError, SyntaxError):
        return _Summary()
    code = function.__code__
    aliases: dict[str, ast.expr] = {}  # lm_head = self.get_output_embeddings()
    reads: list[ast.expr] = []
    calls: list[ast.Call] = []
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if (assigned := _assignment(node)) is not None:
            aliases[assigned[0]] = assigned[1]
        elif isinstance(node, ast.Attribute) and node.attr in _TENSORS:
            parent = parents.get(node)
            if not (isinstance(parent, ast.Attribute) and parent.attr in _METADATA):
                reads.append(node.value)
        elif isinstance(node, ast.Call) and _may_lead_on(node):
            calls.append(node)
    return _Summary(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], tuple(reads), tuple(calls), aliases)


def _assignment(node: ast.AST) -> tuple[str, ast.expr] | None:
    """Name and value of a plain assignment of something that may stand for a module."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target: ast.expr = node.targets[0]
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        target = node.target
    else:
        return None
    if isinstance(target, ast.Name) and isinstance(node.value, ast.Name | ast.Attribute | ast.Call):
        return target.id, node.value
    return None


def _may_lead_on(call: ast.Call) -> bool:
    """A method of something, or a function that is handed a name or a part of something."""
    arguments = [*call.args, *(item.value for item in call.keywords)]
    if isinstance(call.func, ast.Attribute):
        return isinstance(call.func.value, ast.Name | ast.Attribute)
    return isinstance(call.func, ast.Name) and any(isinstance(item, ast.Name | ast.Attribute) for item in arguments)
