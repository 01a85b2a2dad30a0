"""Entries of the user's cache: where they are, and small ones that are read only if whole."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fluxtrain.errors import BadInput
from fluxtrain.files.atomic import replace_file
from fluxtrain.files.opening import read_plain

T = TypeVar("T")


class Damaged(BadInput):
    """A file differs from what was written."""


def cache_root() -> Path:
    """Return $XDG_CACHE_HOME/fluxtrain, or ~/.cache/fluxtrain without it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fluxtrain"


def read_entry(path: Path, kind: type[T]) -> T | None:
    """Return the value of `kind` in a JSON file; None where it is missing or of another kind."""
    try:
        return msgspec.json.decode(read_plain(path, follow=True), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def write_entry(path: Path, value: Any) -> None:
    """Write a value as JSON, with the folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """Write an object behind its checksum. Raises OSError."""
    data = json.dumps(value).encode()
    replace_file(path, f"{zlib.crc32(data):08x}\n".encode() + data)


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the value written by `write_sealed`. Raises Damaged where the file is missing or
    damaged."""
    try:
        guard, _, data = read_plain(path).partition(b"\n")
        if int(guard, 16) != zlib.crc32(data):
            raise Damaged(f"{path} is damaged")
        value = json.loads(data)
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise Damaged(f"{path} is of something else")
    return value
