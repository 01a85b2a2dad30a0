"""From a file and `key=value` overrides to a plain dictionary, with the line of every mistake."""

from __future__ import annotations

import errno
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from fluxtrain.errors import BadInput
from fluxtrain.plain_files import read_named

MOST_BITS = 64  # of a number: no setting takes more, and Python refuses to print long ones
CONFIG_LIMIT_BYTES = 1 << 20  # a configuration is a page; more is a data file given by mistake


def read_text(path: Path) -> str:
    """The text of a configuration file; `BadInput` when it cannot be one."""
    try:
        if path.is_dir():
            raise BadInput(f"{path} is a folder: name a configuration file (YAML)")
        if path.stat().st_size > CONFIG_LIMIT_BYTES:
            raise BadInput(
                f"{path} has {path.stat().st_size:,} bytes: that is not a configuration file; "
                "put data under data.path"
            )
        return read_named(path, CONFIG_LIMIT_BYTES).decode("utf-8")  # a pipe has no size
    except FileNotFoundError:
        raise BadInput(
            f"{path}: no such file; `fluxtrain train --demo` needs none, and "
            "`fluxtrain init` writes one to start from"
        ) from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start}): is it YAML?") from None
    except OSError as error:
        if error.errno == errno.EOVERFLOW:
            told = f"{path} has no end that a configuration has: name a file of settings"
            raise BadInput(told) from None
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """The mapping in `text`; `BadInput` with the line when it is not one."""
    try:
        raw = yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise BadInput(f"{source}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise BadInput(f"{source}: its YAML is nested too deeply") from None
    if raw is None:
        raise BadInput(f"{source} is empty: it needs at least `model:` and `data:`")
    if not isinstance(raw, dict):
        raise BadInput(f"{source} is not a mapping of settings but a {type(raw).__name__}")
    return raw


def apply_overrides(raw: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """A copy of `raw` with `section.key=value` applied; values are read as YAML.

    Raises:
        BadInput: no `key=value`, no YAML, or nothing after `=`: only `null` says none.
    """
    result = deepcopy(raw)
    for override in overrides:
        key, equals, value = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise BadInput(f"--set {override}: write section.key=value, as in train.steps=100")
        node = result
        for part in parts[:-1]:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        try:
            node[parts[-1]] = yaml.load(value, Loader=_Stated)
        except _NoValue:
            raise BadInput(
                f"--set {override}: a value is empty: write one, as in train.steps=100, or leave "
                "this --set out; where a setting may have none, `null` says so"
            ) from None
        except (yaml.YAMLError, RecursionError):
            raise BadInput(
                f"--set {key}: {shortened(value)} is not a YAML value; quote it"
            ) from None
    return result


class Loader(yaml.SafeLoader):
    """A SafeLoader that says where a value cannot be: a date that no calendar has, a number with
    more digits than any setting takes."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _no_value(node, str(error)) from None
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise _no_value(node, f"a number of more than {MOST_BITS} bits")
        return value


def _no_value(node: yaml.Node, why: str) -> yaml.MarkedYAMLError:
    text = str(node.value) if isinstance(node, yaml.ScalarNode) else "this"
    return yaml.constructor.ConstructorError(
        None, None, f"{shortened(text)} is no value ({why}); quote it where it is text",
        node.start_mark,
    )  # fmt: skip


def shortened(text: str, limit: int = 60) -> str:
    """Return a text that someone wrote, or its beginning."""
    return repr(text if len(text) <= limit else f"{text[:limit]}...")


class _UniqueKeys(Loader):
    """A SafeLoader that refuses a key given twice, where YAML would keep the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


class _NoValue(yaml.YAMLError):
    """Nothing is written where a value should be."""


class _Stated(Loader):
    """A SafeLoader that refuses what is left empty, where YAML would take it for null."""

    def get_single_node(self) -> yaml.Node:
        node = super().get_single_node()
        if node is None:
            raise _NoValue
        return node

    def construct_null(self, node: yaml.ScalarNode) -> None:
        if not node.value:
            raise _NoValue


_Stated.add_constructor("tag:yaml.org,2002:null", _Stated.construct_null)
