"""What is wrong with a configuration, in one line: the key, the value and the cure."""

from __future__ import annotations

from difflib import get_close_matches
from reprlib import Repr
from typing import Any

from pydantic import ValidationError

_CURES = {
    "train.steps": "leave it out to train for train.epochs",
    "train.max_grad_norm": "use null to switch clipping off",
    "train.evaluate_every": "use `end` to evaluate only once, after the last step",
    "train.checkpoint_every": "use `end` to save only once, after the last step",
    "train.betas": "as in [0.9, 0.999]",
    "placement.budget_gib": "leave it out to use all memory",
}
_SHORT = Repr()  # aliases in YAML make values that are too large to print
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


def explain(error: ValidationError, keys: list[str]) -> str:
    """Every mistake of `error`, joined by "; ". `keys` are the dotted keys that exist."""
    messages: dict[str, str] = {}
    items = sorted(error.errors(include_url=False), key=_preference)
    words = {_dotted(item["loc"], keys): _words(item) for item in items}  # a Literal is the last
    for item in items:
        key = _dotted(item["loc"], keys)
        if key not in messages:
            beside = "" if item["type"] == "literal_error" else words[key]
            messages[key] = _message(key, item, keys, beside)
    return "; ".join(messages.values())


def _words(item: Any) -> str:
    """The words that a setting takes beside numbers, as in "or 'auto'"; "" without such words."""
    return f"or {item['ctx']['expected']}" if item["type"] == "literal_error" else ""


def _message(key: str, item: Any, keys: list[str], words: str) -> str:
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_key(key, keys)
    if item["type"] in ("model_type", "model_attributes_type", "dataclass_type"):
        return f"{key} must be a mapping of settings, as in `{_example(key, keys)}`"
    text = str(item["msg"]).removeprefix("Value error, ")
    if not key:
        return text
    text = _with_short_bound(text.replace("Input should be", "must be"), item.get("ctx", {}))
    if item["type"] in ("missing", "too_long"):  # every other key has a default
        text = "must be two numbers"
    cures = [text for text in (words, _CURES.get(key)) if text]
    cure = f" ({', '.join(cures)})" if cures else ""
    return f"{key} = {_SHORT.repr(item['input'])}: {text}{cure}"


def _with_short_bound(text: str, context: dict[str, Any]) -> str:
    """1e-30 in place of thirty digits, which pydantic would write."""
    bounds = [context[name] for name in ("gt", "ge", "lt", "le") if name in context]
    if not bounds or not isinstance(bounds[0], float):
        return text
    return f"{text.rpartition(' ')[0]} {bounds[0]:g}"


def unknown_key(key: str, keys: list[str]) -> str:
    """Refuse `key`, with the nearest known key and the list to choose from."""
    section, _, name = key.rpartition(".")
    within = [known for known in keys if known.startswith(f"{section}.")] if section else []
    near = (
        get_close_matches(key, within, n=1, cutoff=0.5)
        or [known for known in keys if known.rpartition(".")[2] == name]
        or get_close_matches(key, _sections(keys) + keys, n=1, cutoff=0.5)
        or [
            k
            for n in get_close_matches(name, _names(keys), n=1)
            for k in keys
            if k.endswith(f".{n}")
        ]
    )
    meant = f", did you mean {near[0]}?" if near else ";"
    listed = ", ".join(known.rpartition(".")[2] for known in within) or ", ".join(_sections(keys))
    owner = f"settings of {section}" if within else "sections"
    return f"unknown key {key}{meant} {owner}: {listed}"


def _dotted(location: tuple[int | str, ...], keys: list[str]) -> str:
    """The location without pydantic's own parts (union members, validators)."""
    parts = [str(part) for part in location]
    joined = ".".join(parts[:2])
    return joined if joined in keys else ".".join(parts)


def _preference(item: Any) -> int:
    """Of several complaints about one key (one per union member) the bound says most."""
    order = ("greater_than", "less_than", "finite_number", "float_parsing", "int_parsing")
    kind = str(item["type"])
    return next((i for i, name in enumerate(order) if kind.startswith(name)), len(order))


def _example(key: str, keys: list[str]) -> str:
    first = next((known for known in keys if known.startswith(f"{key}.")), keys[0])
    section, _, name = first.partition(".")
    return f"{section}: {{{name}: ...}}"


def _sections(keys: list[str]) -> list[str]:
    return list(dict.fromkeys(known.partition(".")[0] for known in keys))


def _names(keys: list[str]) -> list[str]:
    return [known.rpartition(".")[2] for known in keys]
