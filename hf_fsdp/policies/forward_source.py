"""What the source of a forward says: tensors it reads, modules it calls, what it returns."""

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


@dataclass(frozen=True)
class Summary:
    """What matters in one function's source; `aliases` are plain assignments of names, the last one counts."""

    parameters: tuple[str, ...] = ()
    reads: tuple[ast.expr, ...] = ()
    attributes: tuple[ast.Attribute, ...] = ()
    calls: tuple[ast.Call, ...] = ()
    returned: tuple[ast.Attribute, ...] = ()
    aliases: dict[str, ast.expr] = field(default_factory=dict)

    @property
    def first(self) -> str | None:
        return self.parameters[0] if self.parameters else None

    @property
    def is_idle(self) -> bool:
        return not self.reads and not self.calls and not self.attributes


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
def summarize(function: Callable[..., Any]) -> Summary:
    """Read the source of `function`; empty where there is none."""
    try:
        # The source of this very function and not of the one it wraps, which `inspect` would go on to.
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, TypeError, SyntaxError):
        return Summary()
    code = function.__code__
    aliases: dict[str, ast.expr] = {}  # lm_head = self.get_output_embeddings()
    reads: list[ast.expr] = []
    attributes: dict[str, ast.Attribute] = {}
    calls: list[ast.Call] = []
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if (assigned := _assignment(node)) is not None:
            aliases[assigned[0]] = assigned[1]
        elif isinstance(node, ast.Attribute) and node.attr in _TENSORS:
            parent = parents.get(node)
            if not (isinstance(parent, ast.Attribute) and parent.attr in _METADATA):
                reads.append(node.value)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            parent = parents.get(node)
            is_called = isinstance(parent, ast.Call) and parent.func is node
            if not is_called and not (isinstance(parent, ast.Attribute) and parent.attr in _METADATA):
                attributes.setdefault(ast.unparse(node), node)
        elif isinstance(node, ast.Call) and _may_lead_on(node):
            calls.append(node)
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    returned = tuple(item for node in ast.walk(tree) if isinstance(node, ast.Return) for item in _items(node.value))
    return Summary(parameters, tuple(reads), tuple(attributes.values()), tuple(calls), returned, aliases)


def _items(returned: ast.expr | None) -> list[ast.Attribute]:
    """What is returned as it is: `return output, self.bias`."""
    items = returned.elts if isinstance(returned, ast.Tuple | ast.List) else [returned]
    return [item for item in items if isinstance(item, ast.Attribute)]


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
