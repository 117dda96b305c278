"""What wrote a checkpoint."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("hf-fsdp", "torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "safetensors")


def package_versions() -> dict[str, str]:
    """Return package -> version of those that are installed, and Python's."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
