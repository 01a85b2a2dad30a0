"""What is wrong with a configuration, in one line: the key, the value and the cure."""

from __future__ import annotations

from difflib import get_close_matches
from reprlib import Repr
from typing import Any

from pydantic import ValidationError

from fluxtrain.config.aliases import ALIASES, NOT_NEEDED, said_of
from fluxtrain.config.data_settings import DataEntry
from fluxtrain.errors import brief

_CURES = {
    "train.steps": "leave it out to train for train.epochs",
    "train.max_grad_norm": "use null to switch clipping off",
    "train.evaluate_every": "use `end` to evaluate only once, after the last step",
    "train.checkpoint_every": "use `end` to save only once, after the last step",
    "train.betas": "as in [0.9, 0.999]",
    "placement.budget_gib": "leave it out to use all memory",
    "placement.host_gib": "leave it out to use all memory",
    "parallel.cards": "a number of cards, or a list such as [0, 1]",
    "parallel.dealing": "numbers of blocks are a list such as [20, 16]",
}
_SOURCES = "a path, or a list such as [a.jsonl, {path: b.jsonl, weight: 2}]"
_TAKES = {  # settings of several shapes: what to say in place of one of them
    "data.path": _SOURCES,
    "data.held_out_path": _SOURCES,
    "samples.prompts": "the path of a file, or a list such as [Hello, How are you?]",
    "method.targets": "'auto', or names of layers such as [q_proj, v_proj]",
}
_WORDS = {  # in place of pydantic's
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "dict_type": "must be a mapping",
    "model_type": "must be a path, or a mapping with one",
}
_ENTRY_KEYS = ", ".join(DataEntry.model_fields)
LISTED = 12  # settings of a section that an error names, and mistakes, at most
_SHORT = Repr()  # aliases in YAML make values that are too large to print
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


def explain(error: ValidationError, keys: list[str], raw: Any = None) -> str:
    """Return every mistake of `error` in the settings `raw`, joined by "; ". `keys` are the dotted
    keys that exist."""
    messages: dict[tuple[Any, ...], str] = {}
    listed: set[str] = set()
    items = sorted(error.errors(include_url=False), key=_preference)
    places = [_place(item, raw) for item in items]
    outer = {place[:end] for place in places for end in range(len(place))}
    words = {_dotted(item["loc"], keys): _words(item) for item in items}  # a Literal is the last
    for item, place in zip(items, places, strict=True):
        if place in messages or place in outer:  # of a union, the member that came further is meant
            continue
        if len(messages) == LISTED:
            messages[()] = "and more like these"
            break
        key = _dotted(item["loc"], keys)
        if key not in keys and item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            messages[place] = "; ".join(
                unknown_key(one, keys, listed) for one in _meant(key, item["input"], keys)
            )
        else:
            beside = "" if item["type"] == "literal_error" else words[key]
            messages[place] = _message(key, place[2:], item, keys, beside)
    return "; ".join(messages.values())


def _place(item: Any, raw: Any) -> tuple[Any, ...]:
    """Return where in `raw` a complaint belongs: its location without the names of
    union members."""
    at, place = raw, []
    for number, part in enumerate(item["loc"]):
        numbered = isinstance(at, list | tuple) and isinstance(part, int) and part < len(at)
        if numbered or (isinstance(at, dict) and part in at):
            at = at[part]
        elif number >= 2 and (item["type"] != "missing" or number < len(item["loc"]) - 1):
            continue
        place.append(part)
    return tuple(place)


def _meant(key: str, value: Any, keys: list[str]) -> list[str]:
    """Return the keys to explain for an unknown one: those within it where it is a section that
    another program has, such as `lora: {r: 8}`, else itself."""
    within = value if isinstance(value, dict) and "." not in key else {}
    if get_close_matches(key, _sections(keys), n=1, cutoff=0.6):
        return [key]
    return [one for name in within if _nearest(one := f"{key}.{name}", keys)] or [key]


def _words(item: Any) -> str:
    """Return the words that a setting takes as well as numbers, as in "or 'auto'"; "" without such
    words."""
    return f"or {item['ctx']['expected']}" if item["type"] == "literal_error" else ""


def _message(key: str, within: tuple[Any, ...], item: Any, keys: list[str], words: str) -> str:
    """Say what is wrong with the setting `key`, or with a part `within` it."""
    kind, text = str(item["type"]), str(item["msg"]).removeprefix("Value error, ")
    if not key:
        return text
    if kind == "invalid_key":
        owner = key.rpartition(".")[0]
        told = f"the key {_shown(item['input'])} is no name of a setting"
        comma = " (1000 is written without a comma)" if isinstance(item["input"], int) else ""
        return f"{owner}: {told}{comma}" if owner else told + comma
    if item["loc"][-1] == "[key]":
        return f"{key}: the key {_shown(item['input'])} must be text: put it in quotes"
    if key not in keys and kind in ("model_type", "model_attributes_type", "dataclass_type"):
        return f"{key} must be a mapping of settings, as in `{_example(key, keys)}`"
    if kind == "extra_forbidden":
        return f"{_named(key, within[:-1])}: unknown key {_shown(within[-1])}, it has {_ENTRY_KEYS}"
    text = text.replace("Input should be", "must be").replace("a valid tuple", "a list")
    text = _WORDS.get(kind, _with_short_bound(text, item.get("ctx", {})))
    if kind == "string_type" and isinstance(item["input"], int | float):
        text += ": put it in quotes"
    if key == "train.betas" and kind in ("missing", "too_long"):
        within, text = (), "must be two numbers"
    elif kind == "missing":  # every other key of a run has a default
        of_entry = f"{_named(key, within[:-1])} has no {within[-1]}: it has {_ENTRY_KEYS}"
        return of_entry if key in keys else f"{key} is missing"
    if key in _TAKES and not within and kind != "value_error":
        empty = "not be empty, but " if kind.endswith("too_short") else "be "
        text = f"must {empty}{_TAKES[key]}"
    cures = [text for text in (words, _CURES.get(key)) if text and not within]
    cure = f" ({', '.join(cures)})" if cures and key not in _TAKES else ""
    return f"{_named(key, within)} = {_shown(item['input'])}: {text}{cure}"


def _named(key: str, within: tuple[Any, ...]) -> str:
    """Name a part of a setting: `data.path, entry 2, weight`."""
    parts = [f"entry {part + 1}" if isinstance(part, int) else brief(str(part)) for part in within]
    return ", ".join([key, *parts])


def _shown(value: Any) -> str:
    return brief(_SHORT.repr(value), 300)


def _with_short_bound(text: str, context: dict[str, Any]) -> str:
    """Write a tiny bound as 1e-30, where pydantic would write thirty digits."""
    bounds = [context[name] for name in ("gt", "ge", "lt", "le") if name in context]
    if not bounds or not isinstance(bounds[0], float):
        return text
    return f"{text.rpartition(' ')[0]} {bounds[0]:g}"


def unknown_key(key: str, keys: list[str], listed: set[str] | None = None) -> str:
    """Refuse `key` with the setting that was meant: by another program's name for it, or by the
    nearest spelling; else with the settings to choose from, unless these are `listed` already."""
    key = brief(key)
    section, peer = key.rpartition(".")[0], _peers_name(key)
    if peer in NOT_NEEDED:
        return f"unknown key {key}: {NOT_NEEDED[peer]}"
    near = _nearest(key, keys)
    if near:
        said = said_of(peer) if ALIASES.get(peer) == near else ""
        return f"unknown key {key}, did you mean {near}?{f' ({said})' if said else ''}"
    within = [known for known in keys if known.startswith(f"{section}.")] if section else []
    owner = f"settings of {section}" if within else "sections"
    if listed is not None and owner in listed:
        return f"unknown key {key}"
    if listed is not None:
        listed.add(owner)
    names = [known.rpartition(".")[2] for known in within] or _sections(keys)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    told = ", ".join(names[:LISTED]) + more
    return f"unknown key {key}; {owner}: {told} (all: `fluxtrain schema`)"


def _peers_name(key: str) -> str:
    """Return the last part of a key, written as other programs write theirs."""
    return key.rpartition(".")[2].strip().lower().replace("-", "_")


def _nearest(key: str, keys: list[str]) -> str | None:
    """Return the setting or the section that was probably meant by `key`."""
    section, peer = key.rpartition(".")[0], _peers_name(key)
    within = [known for known in keys if known.startswith(f"{section}.")] if section else []
    same = [known for known in keys if known.rpartition(".")[2] == peer]
    whole = ALIASES.get(key.lower())
    tries: list[list[str]] = [
        [whole] if whole in keys else [],
        [known for known in same if known.startswith("train.")] or same[:1],
        [ALIASES[peer]] if ALIASES.get(peer) in keys else [],
        _near(peer, within, 0.6),
        [] if within else get_close_matches(key, _sections(keys), n=1, cutoff=0.6),
        _near(peer, keys, 0.7),
        [ALIASES[name] for name in get_close_matches(peer, ALIASES, n=1, cutoff=0.8)],
    ]
    return next((found[0] for found in tries if found), None)


def _near(name: str, keys: list[str], cutoff: float) -> list[str]:
    """Return the key whose last part is nearest to `name`."""
    by_name = {known.rpartition(".")[2]: known for known in reversed(keys)}
    return [by_name[found] for found in get_close_matches(name, by_name, n=1, cutoff=cutoff)]


def _dotted(location: tuple[int | str, ...], keys: list[str]) -> str:
    """Return the location without pydantic's own parts (union members, validators)."""
    parts = [str(part) for part in location]
    joined = ".".join(parts[:2])
    return joined if joined in keys else ".".join(parts)


def _preference(item: Any) -> int:
    """Rank the complaints about one key (one for each union member); a bound says most."""
    order = (
        "greater_than", "less_than", "finite_number", "too_short", "string_too_short",
        "float_parsing", "int_parsing",
    )  # fmt: skip
    kind = str(item["type"])
    return next((i for i, name in enumerate(order) if kind.startswith(name)), len(order))


def _example(key: str, keys: list[str]) -> str:
    first = next((known for known in keys if known.startswith(f"{key}.")), keys[0])
    section, _, name = first.partition(".")
    return f"{section}: {{{name}: ...}}"


def _sections(keys: list[str]) -> list[str]:
    return list(dict.fromkeys(known.partition(".")[0] for known in keys))
