"""Writes `expected/` anew: what `hf-fsdp migrate` makes of each old config here. Read the difference, then keep it.

python -m tests.golden.migrate.make
"""

from __future__ import annotations

import os
from pathlib import Path

from hf_fsdp.config.migrate import migrate

HERE = Path(__file__).resolve().parent
REPLICAS = {"llama_factory_fsdp.yaml": 2}


def old_files() -> list[str]:
    """Return the names of the old configs."""
    kinds = (".yaml", ".json", ".py")
    return sorted(path.name for path in HERE.iterdir() if path.suffix in kinds and path.name != "make.py")


def main() -> None:
    """Write one expected file for each old one."""
    os.chdir(HERE)
    for name in old_files():
        text = migrate(name, REPLICAS.get(name)).text
        (HERE / "expected" / f"{name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
