"""The recipes that come with the package: a run config, the script that reads it, and its launch file.

In a wheel they are under `hf_fsdp/shipped/`; in a checkout at the top of the repository. Nothing is listed here:
a file in `configs/train/` is a recipe, and its first lines say what it is and how it is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_fsdp
from hf_fsdp.config.io import load_yaml
from hf_fsdp.errors import ConfigError, nearest_names

COMMAND = re.compile(r"^#\s*accelerate launch --config_file (\S+\.ya?ml) (\S+\.py) (\S+\.ya?ml)\s*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run that can be copied.

    Args:
        name: of the run config, without its ending.
        model: as the run config names it.
        method: ``full``, ``lora`` or ``qlora``.
        num_gpus: processes of the launch file.
        summary: the first sentence of the run config, above its command.
        root: the folder that the three paths are relative to.
        script, run_config, launch_file: the files, relative to `root` and to the folder they are copied into.
    """

    name: str
    model: str
    method: str
    num_gpus: int
    summary: str
    root: Path
    script: str
    run_config: str
    launch_file: str

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the recipe."""
        return (self.script, self.run_config, self.launch_file)

    @property
    def command(self) -> str:
        """The command that starts it, in the folder it was copied into."""
        return f"accelerate launch --config_file {self.launch_file} {self.script} {self.run_config}"

    @property
    def extras(self) -> str:
        """What must be installed beside the package itself."""
        vision = ",vision" if Path(self.script).parent.name == "vlm" else ""
        return f"recipes{vision}{',quantization' if self.method == 'qlora' else ''}"


def find_recipes() -> list[Recipe]:
    """Return every recipe, by name.

    Raises:
        ConfigError: this installation has none, or one of them does not say how it is started.
    """
    package = Path(hf_fsdp.__file__).parent
    for root in (package / "shipped", package.parent):
        files = sorted((root / "configs" / "train").glob("*.yaml"))
        if files and (root / "recipes").is_dir():
            return [_read_recipe(root, file) for file in files]
    raise ConfigError(
        f"no recipes came with this installation in {package}", fix="pip install --force-reinstall hf-fsdp"
    )


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name; ``-`` and ``_`` are alike.

    Raises:
        ConfigError: there is none of that name.
    """
    recipes = {recipe.name: recipe for recipe in find_recipes()}
    wanted = name.strip().lower().removesuffix(".yaml").replace("-", "_")
    if wanted in recipes:
        return recipes[wanted]
    near = nearest_names(wanted, recipes)
    raise ConfigError(
        f"{name} is not a recipe",
        fix=f"hf-fsdp recipes copy {near[0]}" if near else "hf-fsdp recipes list",
        near=", ".join(near) or ", ".join(recipes),
    )


def _read_recipe(root: Path, file: Path) -> Recipe:
    text = file.read_text(encoding="utf-8")
    path = file.relative_to(root).as_posix()
    found = COMMAND.search(text)
    if found is None or found[3] != path or not all((root / name).is_file() for name in found.groups()):
        raise ConfigError(
            f"{file} does not say how it is started, or names files that are not there",
            fix=f"#   accelerate launch --config_file configs/FILE.yaml recipes/text/train.py {path}",
            source=f"{file}:2",
        )
    run, _ = load_yaml(file)
    launch, _ = load_yaml(root / found[1])
    return Recipe(
        name=file.stem,
        model=str(run["model_name_or_path"]),
        method=_method(run),
        num_gpus=int(launch["num_processes"]),
        summary=_first_sentence(text[: found.start()]),
        root=root,
        script=found[2],
        run_config=path,
        launch_file=found[1],
    )


def _first_sentence(comments: str) -> str:
    words = " ".join(line.lstrip("# ").strip() for line in comments.splitlines())
    return re.split(r"(?<=\.)\s", words.strip(), maxsplit=1)[0]


def _method(run: Mapping[str, Any]) -> str:
    if run.get("load_in_4bit") or run.get("load_in_8bit"):
        return "qlora"
    return "lora" if run.get("use_peft") else "full"
