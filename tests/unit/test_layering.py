"""Imports go down only: the levels table of docs/architecture.md, read and held against the source.

The table is the one source of truth: a module that it does not name, or an import that goes up, fails here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import hf_fsdp

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hf_fsdp"
HEAVY = frozenset({"torch", "transformers", "accelerate", "peft", "trl", "datasets", "wandb"})
# Where the lazily exported names live, so that `from hf_fsdp import FSDPConfig` counts as what it really imports.
EXPORTS = hf_fsdp._HOMES
PUBLIC_FOR_RECIPES = frozenset({"hf_fsdp", "hf_fsdp.data"})


@dataclass(frozen=True)
class Place:
    """A row of the table (`level`), and the order of an entry in it."""

    level: int
    order: int
    entry: str


@dataclass(frozen=True)
class Import:
    """One imported module: where, and whether it runs when the file is imported.

    `written` is the module as the file spells it, `module` the one that is really loaded.
    """

    module: str
    written: str
    line: int
    at_import: bool
    for_types_only: bool


def read_levels(page: Path) -> dict[str, Place]:
    """Return entry (``config/`` or ``units.py``) -> place, from the table whose rows start with ``| L<n> |``."""
    places: dict[str, Place] = {}
    rows = re.findall(r"^\|\s*L(\d+)\s*\|([^|]*)\|", page.read_text(encoding="utf-8"), re.MULTILINE)
    for level, cell in rows:
        for order, entry in enumerate(re.findall(r"`([^`]+)`", cell)):
            places[entry] = Place(int(level), order, entry)
    return places


def entry_of(module: str) -> str | None:
    """Return the table entry of a module of the package; None for the package itself."""
    parts = module.split(".")
    if len(parts) == 1:
        return None
    return parts[1]


def find_place(module: str, places: dict[str, Place]) -> Place | None:
    name = entry_of(module)
    return places.get(f"{name}/") or places.get(f"{name}.py")


def read_imports(path: Path, module: str) -> list[Import]:
    """Return every import of a file, those inside functions and `if TYPE_CHECKING:` too."""
    return list(_walk(ast.parse(path.read_text(encoding="utf-8")), module, path.name == "__init__.py"))


def _walk(
    node: ast.AST, module: str, is_package: bool, at_import: bool = True, types: bool = False
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, alias.name, child.lineno, at_import, types)
        elif isinstance(child, ast.ImportFrom):
            for name, written in _from_modules(child, module, is_package):
                yield Import(name, written, child.lineno, at_import, types)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part in child.body:
                yield from _walk(ast.Module([part], []), module, is_package, at_import, True)
            for part in child.orelse:
                yield from _walk(ast.Module([part], []), module, is_package, at_import, types)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _walk(child, module, is_package, at_import and not inside, types)


def _from_modules(node: ast.ImportFrom, module: str, is_package: bool) -> list[tuple[str, str]]:
    """Return (module loaded, module as written) for each name of a from-import."""
    base = node.module or ""
    if node.level:
        parents = module.split(".") if is_package else module.split(".")[:-1]
        parents = parents[: len(parents) - (node.level - 1)]
        base = ".".join([*parents, *([base] if base else [])])
    if base == PACKAGE:  # `from hf_fsdp import config` imports the submodule, or a name that lives in one
        names = [alias.name for alias in node.names]
        return [(EXPORTS[n], PACKAGE) if n in EXPORTS else (f"{PACKAGE}.{n}", f"{PACKAGE}.{n}") for n in names]
    return [(base, base)]


def check_package(root: Path) -> list[str]:
    """Return every breach of the layering in ``root/hf_fsdp``."""
    places = read_levels(root / "docs" / "architecture.md")
    breaches = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        where = path.relative_to(root)
        if module == PACKAGE:
            breaches += [f"{where}:{i.line} imports {i.module} when imported" for i in _eager(path, module)]
            continue
        if module == f"{PACKAGE}.__main__":  # the command line under another name
            module = f"{PACKAGE}.cli.__main__"
        place = find_place(module, places)
        if place is None:
            breaches.append(f"{where} is not in the levels table of docs/architecture.md")
            continue
        is_package = path.name == "__init__.py"
        for item in _walk(ast.parse(path.read_text(encoding="utf-8")), module, is_package):
            breach = check_import(item, place, places)
            if breach:
                breaches.append(f"{where}:{item.line} {breach}")
    return breaches


def _eager(path: Path, module: str) -> list[Import]:
    imports = read_imports(path, module)
    return [i for i in imports if i.at_import and not i.for_types_only and i.module.split(".")[0] in {PACKAGE, *HEAVY}]


def check_import(item: Import, place: Place, places: dict[str, Place]) -> str | None:
    """Return what is wrong with one import of a module at `place`, or None."""
    top = item.module.split(".")[0]
    if top in HEAVY and not item.for_types_only:
        if place.level <= 1:
            return f"imports {item.module}: L0 and L1 do without"
        if place.entry in ("cli.py", "cli/") and item.at_import:
            return f"imports {item.module} at module level: the command line must start at once"
    if top != PACKAGE:
        return None
    if item.module in (PACKAGE, f"{PACKAGE}.__version__"):
        return None
    target = find_place(item.module, places)
    if target is None:
        return f"imports {item.module}, which is not in the levels table"
    allowed = target.level < place.level or target.entry == place.entry
    # Entries of one row are in order: a later one builds on an earlier one.
    allowed = allowed or (target.level == place.level and target.order < place.order)
    return None if allowed else f"(L{place.level}) imports {item.module} (L{target.level})"


def check_recipes(root: Path) -> list[str]:
    """Return every import in ``root/recipes`` that is not public API, and every one of another recipe."""
    breaches = []
    for path in sorted((root / "recipes").rglob("*.py")):
        where = path.relative_to(root)
        local = {"recipes", *(other.stem for other in path.parent.glob("*.py"))}
        for item in _walk(ast.parse(path.read_text(encoding="utf-8")), ".".join(where.with_suffix("").parts), False):
            top = item.module.split(".")[0]
            if top == PACKAGE and item.written not in PUBLIC_FOR_RECIPES:
                breaches.append(f"{where}:{item.line} imports {item.module}, which is not public API")
            elif top in local:
                breaches.append(f"{where}:{item.line} imports another recipe: {item.module}")
    return breaches


# ---- the real tree ------------------------------------------------------------------------------------


def test_the_table_names_every_level() -> None:
    places = read_levels(ROOT / "docs" / "architecture.md")
    assert {place.level for place in places.values()} == set(range(8))
    assert {"errors.py", "config/", "policies/", "sharding/", "integrations/", "cli/"} <= set(places)


def test_no_module_imports_from_a_higher_level() -> None:
    breaches = check_package(ROOT)
    assert not breaches, "\n".join(breaches)


def test_recipes_use_the_public_api_only() -> None:
    breaches = check_recipes(ROOT)
    assert not breaches, "\n".join(breaches)


# ---- the check itself can fail ------------------------------------------------------------------------

TABLE = """\
| level | folder | what lives there |
|---|---|---|
| L0 | `errors.py`, `units.py` | errors |
| L1 | `config/` | config |
| L2 | `private.py`, `policies/` | policies |
| L3 | `sharding/` | sharding |
| L4 | `data/` | data |
| L6 | `integrations/` | seams |
| L7 | `cli.py` | parses |
"""


def build_tree(root: Path, files: dict[str, str]) -> Path:
    (root / "docs").mkdir()
    (root / "docs" / "architecture.md").write_text(TABLE)
    for name, text in {"hf_fsdp/__init__.py": "", "hf_fsdp/errors.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text", "breach"),
    [
        ("hf_fsdp/config/a.py", "from hf_fsdp.policies.wrap import x", "(L1) imports hf_fsdp.policies.wrap (L2)"),
        ("hf_fsdp/config/a.py", "import hf_fsdp.sharding", "(L1) imports hf_fsdp.sharding (L3)"),
        (
            "hf_fsdp/config/a.py",
            "def f():\n    from hf_fsdp.sharding.apply import g",
            "(L1) imports hf_fsdp.sharding.apply",
        ),
        ("hf_fsdp/config/a.py", "from ..sharding import apply", "(L1) imports hf_fsdp.sharding (L3)"),
        ("hf_fsdp/config/a.py", "from .. import sharding", "(L1) imports hf_fsdp.sharding (L3)"),
        ("hf_fsdp/config/a.py", "from hf_fsdp import FSDPCallback", "(L1) imports hf_fsdp.integrations.callback (L6)"),
        (
            "hf_fsdp/config/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hf_fsdp.sharding import x",
            "(L1) imports hf_fsdp.sharding (L3)",
        ),
        ("hf_fsdp/errors.py", "from hf_fsdp import units", "(L0) imports hf_fsdp.units (L0)"),
        ("hf_fsdp/private.py", "from hf_fsdp.policies import x", "(L2) imports hf_fsdp.policies (L2)"),
        ("hf_fsdp/sharding/a.py", "from hf_fsdp.cli import app", "(L3) imports hf_fsdp.cli (L7)"),
        ("hf_fsdp/sharding/a.py", "from hf_fsdp.helpers import x", "hf_fsdp.helpers, which is not in the levels table"),
        ("hf_fsdp/helpers.py", "", "is not in the levels table of docs/architecture.md"),
        ("hf_fsdp/config/a.py", "import torch", "imports torch: L0 and L1 do without"),
        ("hf_fsdp/config/a.py", "try:\n    import torch.nn\nexcept ImportError:\n    pass", "imports torch.nn: L0"),
        ("hf_fsdp/units.py", "from transformers import Trainer", "imports transformers: L0 and L1"),
        ("hf_fsdp/config/a.py", "def f():\n    import accelerate", "imports accelerate: L0 and L1"),
        ("hf_fsdp/cli.py", "import torch", "imports torch at module level"),
        ("hf_fsdp/__init__.py", "from hf_fsdp.config.schema import FSDPConfig", "hf_fsdp.config.schema when imported"),
        ("hf_fsdp/__init__.py", "import torch", "imports torch when imported"),
    ],
)
def test_an_import_that_goes_up_is_found(tmp_path: Path, name: str, text: str, breach: str) -> None:
    breaches = check_package(build_tree(tmp_path, {name: text}))
    assert len(breaches) == 1
    assert breaches[0].startswith(name)
    assert breach in breaches[0]


def test_imports_that_go_down_pass(tmp_path: Path) -> None:
    files = {
        "hf_fsdp/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hf_fsdp.cli import app",
        "hf_fsdp/__main__.py": "from hf_fsdp.cli import main",
        "hf_fsdp/config/a.py": "from hf_fsdp.errors import x\nfrom hf_fsdp.config.b import y\nfrom . import b",
        "hf_fsdp/config/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "hf_fsdp/private.py": "import torch",
        "hf_fsdp/policies/wrap.py": "import torch\nfrom hf_fsdp.private import x\nfrom ..config import a",
        "hf_fsdp/integrations/callback.py": "from hf_fsdp.sharding import x\nfrom hf_fsdp import FSDPConfig",
        "hf_fsdp/cli.py": "from hf_fsdp import __version__\ndef f():\n    import torch\n    import hf_fsdp.data",
        "recipes/text/train.py": "from hf_fsdp import FSDPCallback, data\nfrom hf_fsdp.data import x\nimport torch",
    }
    root = build_tree(tmp_path, files)
    assert check_package(root) == []
    assert check_recipes(root) == []


@pytest.mark.parametrize(
    ("text", "breach"),
    [
        ("from hf_fsdp.config.schema import FSDPConfig", "hf_fsdp.config.schema, which is not public API"),
        ("from hf_fsdp.errors import x", "hf_fsdp.errors, which is not public API"),
        ("from hf_fsdp import sharding", "hf_fsdp.sharding, which is not public API"),
        ("import hf_fsdp.policies.wrap", "hf_fsdp.policies.wrap, which is not public API"),
        ("from hf_fsdp.data.columns import x", "hf_fsdp.data.columns, which is not public API"),
        ("from recipes.text.other import x", "imports another recipe: recipes.text.other"),
        ("import other", "imports another recipe: other"),
        ("def f():\n    from .other import x", "imports another recipe: recipes.text.other"),
    ],
)
def test_a_recipe_that_reaches_inside_is_found(tmp_path: Path, text: str, breach: str) -> None:
    root = build_tree(tmp_path, {"recipes/text/train.py": text, "recipes/text/other.py": ""})
    assert breach in "\n".join(check_recipes(root))
