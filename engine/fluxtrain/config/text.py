"""From a file and `key=value` overrides to a plain dictionary, with the line of every mistake."""

from __future__ import annotations

import errno
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from fluxtrain.config.loader import NoValue, Stated, UniqueKeys, YamlRefused
from fluxtrain.errors import BadInput, brief
from fluxtrain.files.opening import read_named

CONFIG_LIMIT_BYTES = 1 << 20  # a configuration is a page; more is a data file given by mistake


def read_text(path: Path) -> str:
    """Return the text of a configuration file; `BadInput` when it cannot be one."""
    name = brief(str(path))
    try:
        if path.is_dir():
            raise BadInput(f"{name} is a folder: name a configuration file (YAML)")
        if path.stat().st_size > CONFIG_LIMIT_BYTES:
            raise BadInput(
                f"{name} has {path.stat().st_size:,} bytes: that is not a configuration file; "
                "put data under data.path"
            )
        return read_named(path, CONFIG_LIMIT_BYTES).decode("utf-8")  # a pipe has no size
    except FileNotFoundError:
        raise BadInput(
            f"{name}: no such file; `fluxtrain train --demo` needs none, and "
            "`fluxtrain init` writes one to start from"
        ) from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} is not UTF-8 text (byte {error.start}): is it YAML?") from None
    except OSError as error:
        if error.errno == errno.EOVERFLOW:
            told = f"{name} has no end that a configuration has: name a file of settings"
            raise BadInput(told) from None
        raise BadInput(f"{name} cannot be read: {error.strerror}") from None


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """Return the mapping in `text`; `BadInput` with the line when it is not one."""
    try:
        raw = yaml.load(text, Loader=UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        kind = "" if isinstance(error, YamlRefused) else "not valid YAML: "
        raise BadInput(f"{source}{line}: {kind}{brief(str(error.problem), 300)}") from None
    except yaml.YAMLError as error:
        told = brief(" ".join(str(error).split()), 300)
        raise BadInput(f"{source}: not valid YAML: {told}") from None
    except RecursionError:
        raise BadInput(f"{source}: its YAML is nested too deeply") from None
    if raw is None:
        raise BadInput(f"{source} is empty: it needs at least `model:` and `data:`")
    if not isinstance(raw, dict):
        raise BadInput(f"{source} is not a mapping of settings but a {type(raw).__name__}")
    return raw


def apply_overrides(raw: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return a copy of `raw` with `section.key=value` applied; values are read as YAML.

    Raises:
        BadInput: no `key=value`, no YAML, or nothing after `=`: only `null` says none.
    """
    result = deepcopy(raw)
    for override in overrides:
        key, equals, value = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise BadInput(
                f"--set {brief(override)}: write section.key=value, as in train.steps=100"
            )
        node, parts = result, _as_written(parts, result)
        for part in parts[:-1]:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        try:
            node[parts[-1]] = yaml.load(value, Loader=Stated)
        except NoValue:
            raise BadInput(
                f"--set {brief(override)}: a value is empty: write one, as in train.steps=100, "
                "or leave this --set out; where a setting may have none, `null` says so"
            ) from None
        except YamlRefused as error:
            raise BadInput(f"--set {brief(key)}: {error.problem}") from None
        except (yaml.YAMLError, RecursionError):
            raise BadInput(
                f"--set {brief(key)}: {brief(value, 60)!r} is not a YAML value; quote it"
            ) from None
    return result


def _as_written(parts: list[str], raw: dict[str, Any]) -> list[str]:
    """Return a key of `fsdp` or `trainer.fsdp`, which are one section, as `raw` names it."""
    own = parts[1:] if parts[:2] == ["trainer", "fsdp"] else parts
    return ["trainer", *own] if own[0] == "fsdp" and "trainer" in raw else own
