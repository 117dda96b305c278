"""What expressions of a Python file stand for, as far as the text alone says; nothing is imported or run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_fsdp.config.migrate.python_names import Scope

# Names that are built from names: a chain longer than this is no config, and could take for ever.
DEEPEST = 25
MOST_STEPS = 20_000


@dataclass(frozen=True)
class Symbol:
    """A dotted name that is not assigned in the file: ``torch.bfloat16``, ``ShardingStrategy.FULL_SHARD``."""

    name: str

    @property
    def last(self) -> str:
        """The part behind the last dot."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Called:
    """A call that is only looked at: its dotted name, positional and keyword arguments.

    `partial(f, x)` stands for the call of `f` with what is known of its arguments, and says that it is one.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    is_partial: bool = False

    @property
    def last(self) -> str:
        """The part of the name behind the last dot."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Unreadable:
    """A value that is only known when the file runs."""

    text: str
    line: int


class Evaluator:
    """Turns expressions into plain values, `Symbol`s, `Called`s, or `Unreadable` where only a run would tell."""

    def __init__(self, imports: Mapping[str, str]):
        self.imports = imports
        self.conditions: tuple[str, ...] = ()  # those that the call in hand stands under itself
        self.assumed: dict[str, str] = {}  # what was read as set, although it stands under another condition
        self._steps = 0

    def evaluate(self, node: ast.AST, scope: Scope | None, depth: int = 0) -> Any:
        """Return what `node` stands for in `scope`."""
        self._steps = self._steps + 1 if depth else 0
        if depth > DEEPEST or self._steps > MOST_STEPS:
            return self._unreadable(node)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return Symbol(node.name)
        if isinstance(node, ast.Lambda):
            return Symbol("<lambda>")
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._name(node, scope, depth)
        if isinstance(node, ast.Call):
            return self._call(node, scope, depth)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self.evaluate(item, scope, depth + 1) for item in node.elts]
        if isinstance(node, ast.Dict):
            return self._dict(node, scope, depth)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
            value = self.evaluate(node.operand, scope, depth + 1)
            if isinstance(value, (bool, int, float)):
                return not value if isinstance(node.op, ast.Not) else -value
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node, scope, depth)
        return self._unreadable(node)

    def _unreadable(self, node: ast.AST) -> Unreadable:
        return Unreadable(ast.unparse(node), getattr(node, "lineno", 1))

    def _name(self, node: ast.Name | ast.Attribute, scope: Scope | None, depth: int) -> Any:
        text = ast.unparse(node)
        where = scope
        while where is not None and text not in where.values:
            where = where.parent
        if where is not None:
            values = where.values[text]
            different = {ast.dump(value) if value is not None else None: value for value in values}
            if len(different) != 1 or values[0] is None:
                return self._unreadable(node)
            return self._with_items(self.evaluate(values[0], where, depth + 1), where, text, depth)
        if isinstance(node, ast.Name):
            return Symbol(self.imports.get(node.id, node.id))
        base = self.evaluate(node.value, scope, depth + 1)
        return Symbol(f"{base.name}.{node.attr}") if isinstance(base, Symbol) else self._unreadable(node)

    def _with_items(self, value: Any, scope: Scope, name: str, depth: int) -> Any:
        """Return a dict with the keys that are set on it later; a key set twice is only known when the file runs."""
        if not isinstance(value, dict):
            return value
        result = dict(value)
        for key, node, conditions in scope.items.get(name, []):
            item = self.evaluate(node, scope, depth + 1)
            if other := [condition for condition in conditions if condition not in self.conditions]:
                self.assumed[f"{name}[{key!r}]"] = other[-1]
            result[key] = self._unreadable(node) if key in result and result[key] != item else item
        return result

    def _call(self, node: ast.Call, scope: Scope | None, depth: int) -> Any:
        function = self.evaluate(node.func, scope, depth + 1)
        if isinstance(function, Symbol):
            name, arguments, keywords = function.name, [], {}
        elif isinstance(function, Called) and function.is_partial:
            name, arguments, keywords = function.name, list(function.arguments), dict(function.keywords)
        else:
            name = f"?.{node.func.attr}" if isinstance(node.func, ast.Attribute) else "?"
            arguments, keywords = [], {}
        for argument in node.args:
            inner = argument.value if isinstance(argument, ast.Starred) else argument
            value = self.evaluate(inner, scope, depth + 1)
            arguments.append(self._unreadable(argument) if isinstance(argument, ast.Starred) else value)
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, scope, depth + 1)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, dict):
                keywords.update({str(key): item for key, item in value.items()})
            else:
                keywords["**"] = self._unreadable(keyword.value)
        return self._simplify(name, arguments, keywords)

    def _simplify(self, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        last = name.rpartition(".")[2]
        if last == "partial" and arguments and isinstance(arguments[0], (Symbol, Called)):
            inner = arguments[0]
            before = inner.arguments if isinstance(inner, Called) else ()
            more = dict(inner.keywords) if isinstance(inner, Called) else {}
            return Called(inner.name, (*before, *arguments[1:]), {**more, **keywords}, is_partial=True)
        if name == "dict" and not arguments:
            return keywords
        if name in ("set", "list", "tuple", "frozenset") and len(arguments) <= 1 and not keywords:
            items = arguments[0] if arguments else []
            return items if isinstance(items, list) else Called(name, tuple(arguments), keywords)
        if name == "int" and len(arguments) == 1 and isinstance(arguments[0], (int, float)):
            return int(arguments[0])
        return Called(name, tuple(arguments), keywords)

    def _dict(self, node: ast.Dict, scope: Scope | None, depth: int) -> Any:
        result: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            item = self.evaluate(value, scope, depth + 1)
            if key is None:
                if not isinstance(item, dict):
                    return self._unreadable(node)
                result.update(item)
            elif isinstance(key, ast.Constant):
                result[key.value] = item
            else:
                return self._unreadable(node)
        return result

    def _arithmetic(self, node: ast.BinOp, scope: Scope | None, depth: int) -> Any:
        left, right = self.evaluate(node.left, scope, depth + 1), self.evaluate(node.right, scope, depth + 1)
        if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (left, right)):
            return self._unreadable(node)
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Pow) and 0 <= right <= 64 and abs(left) <= 1024:
            return left**right
        return self._unreadable(node)
