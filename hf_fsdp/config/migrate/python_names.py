"""Imports, assignments and calls of a Python file, scope by scope."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Scope:
    """Names of a module, class or function: every value each is given, and keys set on it afterwards.

    A key comes with the conditions that its line stands under.
    """

    parent: Scope | None = None
    values: dict[str, list[ast.AST | None]] = field(default_factory=dict)
    items: dict[str, list[tuple[Any, ast.expr, tuple[str, ...]]]] = field(default_factory=dict)

    def bind(self, name: str, value: ast.AST | None) -> None:
        """Note one assignment; None stands for a value that the text does not show."""
        self.values.setdefault(name, []).append(value)


@dataclass(frozen=True)
class CallSite:
    """A call of the file: where, in which scope, whether a loop repeats it, and the conditions above it."""

    node: ast.Call
    scope: Scope
    in_loop: bool
    conditions: tuple[str, ...]


class Names(ast.NodeVisitor):
    """Collects imports, assignments and calls of a file."""

    def __init__(self, tree: ast.Module):
        self.imports: dict[str, str] = {}
        self.calls: list[CallSite] = []
        self._scope = Scope()
        self._loops = 0
        self._conditions: tuple[str, ...] = ()
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imports[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.imports[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}".lstrip(".")

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda) -> None:
        if not isinstance(node, ast.Lambda):
            self._scope.bind(node.name, node)
        outer, loops, conditions = self._scope, self._loops, self._conditions
        self._scope, self._loops, self._conditions = Scope(outer), 0, ()
        if not isinstance(node, ast.ClassDef):
            arguments = node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            for argument in named:
                if argument is not None:
                    self._scope.bind(argument.arg, None)
        self.generic_visit(node)
        self._scope, self._loops, self._conditions = outer, loops, conditions

    visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._bind(node.target, None)
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._bind(node.target, None)
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1

    visit_AsyncFor = visit_For

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        outer, test = self._conditions, ast.unparse(node.test)
        for condition, body in ((test, node.body), (f"not {test}", node.orelse)):
            self._conditions = (*outer, condition)
            for statement in body:
                self.visit(statement)
        self._conditions = outer

    def visit_While(self, node: ast.While) -> None:
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind(node.target, None)
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._bind(node.optional_vars, None)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.calls.append(CallSite(node, self._scope, self._loops > 0, self._conditions))
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for item in target.elts:
                self._bind(item, None)
        elif isinstance(target, (ast.Name, ast.Attribute)):
            self._scope.bind(ast.unparse(target), value)
        elif isinstance(target, ast.Subscript) and value is not None:
            name = ast.unparse(target.value)
            key = target.slice.value if isinstance(target.slice, ast.Constant) else None
            self._scope.items.setdefault(name, []).append((key, value, self._conditions))
