"""Reads YAML as people mean it: every value that YAML would silently take for another is refused,
or is read as the text that it looks like."""

from __future__ import annotations

import re
from typing import Any

import yaml

from fluxtrain.errors import brief

MOST_BITS = 64  # of a number: no setting takes more, and Python refuses to print long ones
MOST_MERGED = 10_000  # keys that `<<:` brings in; merges of merges double without end
_BOOL, _DATE, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("bool", "timestamp", "merge"))
_EIGHTS = re.compile(r"[-+]?0[0_]*[1-9][0-9_]*")
_SIXTIES = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


class YamlRefused(yaml.constructor.ConstructorError):
    """A value that is no value, or that YAML reads as another one than is written."""


class Loader(yaml.SafeLoader):
    """A SafeLoader that says where a value cannot be: a number with more digits than any setting
    takes, or one that YAML counts in eights or in sixties. Only true and false are booleans: on,
    off, yes and no stay text, as dates do."""

    merged = 0

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _no_value(node, str(error)) from None
        if isinstance(value, int | float) and not isinstance(value, bool):
            _refuse_other_number(node, value)
        return value

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace `<<:` by the named content, within a bound."""
        for key_node, value_node in node.value:
            if key_node.tag != _MERGE:
                continue
            among = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for mapping in among:
                if isinstance(mapping, yaml.MappingNode):
                    self.flatten_mapping(mapping)
                    self.merged += len(mapping.value)
                if self.merged > MOST_MERGED:
                    told = f"`<<` brings in more than {MOST_MERGED:,} keys: write them out"
                    raise YamlRefused(None, None, told, key_node.start_mark)
        super().flatten_mapping(node)


Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in among if tag not in (_BOOL, _DATE)]
    for first, among in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    _BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _refuse_other_number(node: yaml.Node, value: float) -> None:
    """Raise YamlRefused for a number that is too long, or that YAML reads as another one."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise _no_value(node, f"a number of more than {MOST_BITS} bits")
    text = str(node.value)
    how = ""
    if isinstance(value, int) and _EIGHTS.fullmatch(text):
        plain = re.sub(r"0[0_]*", "", text, count=1)
        how = f"is {value} in YAML, which counts in eights behind a zero: write {plain}"
    elif _SIXTIES.fullmatch(text):
        how = f"is {value:g} in YAML, which counts in sixties behind a colon: write the number"
    if how:
        told = f"{brief(text, 60)!r} {how}, or quote it where it is text"
        raise YamlRefused(None, None, told, node.start_mark)


def _no_value(node: yaml.Node, why: str) -> YamlRefused:
    text = repr(brief(node.value, 60)) if isinstance(node, yaml.ScalarNode) else "this"
    told = f"{text} is no value ({brief(why)}); quote it where it is text"
    return YamlRefused(None, None, told, node.start_mark)


class UniqueKeys(Loader):
    """A Loader that refuses a key given twice, where YAML would keep the last in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Read a mapping; what merges bring in is not there yet, and may be given again."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key = (key_node.tag, key_node.value)
            if key in seen:
                told = f"the key {brief(key_node.value, 60)!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, told, key_node.start_mark)
            seen.add(key)
        return node


class NoValue(yaml.YAMLError):
    """Nothing is written where a value should be."""


class Stated(Loader):
    """A Loader that refuses empty values, which YAML would take for null."""

    def get_single_node(self) -> yaml.Node:
        node = super().get_single_node()
        if node is None:
            raise NoValue
        return node

    def construct_null(self, node: yaml.ScalarNode) -> None:
        if not node.value:
            raise NoValue


Stated.add_constructor("tag:yaml.org,2002:null", Stated.construct_null)
