"""Where an image of a row lies: a path or its bytes. A URL is a path too, and is opened only where that is allowed."""

from __future__ import annotations

import base64
import binascii
import io
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

Reference = dict[str, Any]

# The keys under which other programs' rows and parts hold an image, in the order in which they are asked.
_LONGEST_NAME = 255  # file systems take no longer one
_KEYS = ("bytes", "path", "image", "url", "image_url", "file_name")


def is_url(path: str | None) -> bool:
    """Return whether a path is one that only a network can open."""
    return path is not None and path.lower().startswith(("http://", "https://", "hf://", "s3://", "gs://", "ftp://"))


def read_reference(value: Any, folder: Path) -> tuple[Reference | None, str]:
    """Return ``{"path": ..., "bytes": ...}`` for what a row holds as an image, or None and what is wrong with it.

    Args:
        value: a path, a URL, ``data:image/png;base64,...``, bytes, a PIL image, or a mapping with one of these.
        folder: what a relative path is relative to.
    """
    if isinstance(value, dict):
        found = [value[key] for key in _KEYS if value.get(key) is not None]
        return read_reference(found[0], folder) if found else (None, "an image without path and bytes")
    if isinstance(value, bytes | bytearray):
        return ({"path": None, "bytes": bytes(value)}, "") if value else (None, "an image of 0 bytes")
    if isinstance(value, str):
        return _read_path(value, folder)
    if hasattr(value, "save") and hasattr(value, "mode"):  # a PIL image, without importing PIL to ask
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return {"path": None, "bytes": buffer.getvalue()}, ""
    return None, f"an image given as {type(value).__name__}"


def _read_path(value: str, folder: Path) -> tuple[Reference | None, str]:
    text = value.strip()
    if not text:
        return None, "an empty image path"
    if text.startswith("data:"):
        try:
            return {"path": None, "bytes": base64.b64decode(text.partition(",")[2], validate=True)}, ""
        except binascii.Error:
            return None, "a data: image that is not base64"
    if is_url(text):
        return {"path": text, "bytes": None}, ""
    if text.lower().startswith("file://"):
        text = unquote(urlparse(text).path)
    is_base64 = len(text) > _LONGEST_NAME and "." not in text  # its slashes may cut it into short names
    if is_base64 or max(len(name) for name in text.split("/")) > _LONGEST_NAME:
        return None, f"a text of {len(text)} characters that is no path; base64 begins with data:image/png;base64,"
    path = Path(text).expanduser()
    return {"path": str(path if path.is_absolute() else folder / path), "bytes": None}, ""


def as_list(value: Any) -> list[Any]:
    """Return the images of a row, which may hold none, one or a list of them."""
    if value is None or value == "":
        return []
    if isinstance(value, dict) and all(part is None for part in value.values()):
        return []  # Arrow fills a missing mapping with empty fields
    return list(value) if isinstance(value, list | tuple) else [value]


def name_of(reference: Reference) -> str:
    """Return how a person finds an image again."""
    if reference.get("path"):
        return str(reference["path"])
    return f"an image of {len(reference.get('bytes') or b'')} bytes"


def folder_of(source: str, image_folder: str | Path | None) -> Path:
    """Return what relative image paths are relative to: the folder that was given, or the one the data lies in."""
    if image_folder is not None:
        return Path(image_folder).expanduser().absolute()
    path = Path(source).expanduser()
    if path.is_dir():
        return path.absolute()
    return path.absolute().parent if path.is_file() else Path.cwd()
