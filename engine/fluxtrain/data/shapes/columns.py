"""Tells by the names of columns which one is the prompt, which the answer, and which neither.

What can be read in one way is read so, and said. What can be read in several is refused with the
settings of each. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fluxtrain.data.shapes.keys import CONVERSATIONS, Shape
from fluxtrain.data.shapes.turns import parsed_turns, way_of
from fluxtrain.errors import BadInput

_PROMPTS = frozenset(
    {"question", "questions", "query", "queries", "prompt", "prompts", "input", "inputs"}
    | {"instruction", "instructions", "problem"}
)
_ANSWERS = frozenset(
    {"answer", "answers", "response", "responses", "output", "outputs", "completion", "target"}
    | {"completions", "targets", "solution", "chosen", "assistant", "gpt", "bot"}
)
# Prompts where no other column is one: `user` may be a name, `source` a place.
_SPEAKERS = {"user": ("assistant", "gpt", "bot"), "human": ("assistant", "gpt", "bot"),
             "source": ("target", "targets")}  # fmt: skip
_CONTEXTS = ("context", "contexts")
_SYSTEMS = ("system", "system_prompt", "system_message")
_TEXTS = frozenset(
    {"text", "texts", "content", "body", "raw_content", "article", "document", "passage", "code"}
    | {"story"}
)
# Strings that say something about a text, and are none to learn.
_ABOUT = frozenset(
    {"id", "uuid", "index", "title", "url", "link", "source", "date", "time", "timestamp", "author"}
    | {
        "lang",
        "language",
        "license",
        "name",
        "category",
        "subset",
        "split",
        "file",
        "path",
        "topic",
    }
    | {"filename", "domain", "created", "created_at", "repo", "repository"}
)
_PLAIN = re.compile(r"[A-Za-z_](?:[\w .-]*\w)?")
_NO_STRINGS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")  # to YAML
_MOST = 6  # readings that an error names


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnReading:
    """One way to read the columns of a file, as the configuration can say it."""

    shape: Shape
    columns: Mapping[str, str]  # data.columns: our name -> the file's
    ignore: tuple[str, ...] = ()  # data.ignore: columns that another reading would use
    because: str  # what each column is taken for, in words

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the settings that choose this reading, each as `--set` takes it."""
        pairs = (f"{ours}: {_scalar(theirs)}" for ours, theirs in self.columns.items())
        columns = f"data.columns={{{', '.join(pairs)}}}"
        ignored = ", ".join(map(_scalar, self.ignore))
        return (columns, f"data.ignore=[{ignored}]") if ignored else (columns,)


class UnclearColumns(BadInput):
    """Raised where the columns of a file can be read in several ways, or in no sure one.
    `readings` are the ways to choose from; the message names them too."""

    def __init__(self, message: str, readings: Sequence[ColumnReading] = ()) -> None:
        super().__init__(message)
        self.readings = tuple(readings)


def readings_of(values: Mapping[str, Any], shape: str = "auto") -> tuple[list[ColumnReading], bool]:
    """Return the ways to read columns with these names and values as `shape` (auto: as any), and
    whether only the first is plausible."""
    strings = {key: _plain_name(key) for key, value in values.items() if isinstance(value, str)}
    prompts, answers = _named(strings, _PROMPTS), _named(strings, _ANSWERS)
    speakers = _named(strings, _SPEAKERS)
    talks = [*_conversations(values, shape)]
    if (prompts or speakers) and answers and shape in ("auto", "alpaca", "completion"):
        found = list(_pairs(strings, prompts or speakers, answers, shape))
        tied = prompts or strings[answers[0]] in _SPEAKERS[strings[speakers[0]]]
        return found, len(found) == 1 and bool(tied) and not talks
    if talks:
        return talks, len(talks) == 1
    if prompts or answers or shape not in ("auto", "text"):
        return [], False
    texts = _named(strings, _TEXTS)
    others = [key for key, name in strings.items() if key not in texts and not _is_about(name)]
    return [_text(strings, key, texts) for key in texts], len(texts) == 1 and not others


def any_readings_of(values: Mapping[str, Any]) -> list[ColumnReading]:
    """Return the ways to read columns whose names say nothing: each of the first as the prompt,
    with each other one as its answer, and each as text."""
    strings = {key: _plain_name(key) for key, value in values.items() if isinstance(value, str)}
    keys = [key for key, name in strings.items() if not _is_about(name)][:_MOST]
    pairs = (
        ColumnReading(
            shape="completion",
            columns={"prompt": prompt, "completion": answer},
            because=f"`{answer}` is taken as the answer to `{prompt}`",
        )
        for prompt in keys
        for answer in keys
        if prompt != answer
    )
    return [*pairs, *(_text(strings, key, []) for key in keys)]


def told(readings: Sequence[ColumnReading]) -> str:
    """Name the settings that choose each of the readings."""
    shown = [" with ".join(one.settings) for one in readings[:_MOST]]
    more = f", or one of {len(readings) - _MOST} more" * (len(readings) > _MOST)
    return f"set {', or '.join(shown)}{more}"


def _pairs(
    strings: Mapping[str, str], prompts: list[str], answers: list[str], shape: str
) -> Iterator[ColumnReading]:
    contexts, systems = _named(strings, _CONTEXTS), _named(strings, _SYSTEMS)
    inputs = [key for key in prompts if strings[key] == "input"]
    if inputs and any(strings[key] == "instruction" for key in prompts):  # as Alpaca has them
        contexts, prompts = contexts + inputs, [key for key in prompts if key not in inputs]
    every = [*prompts, *answers, *contexts, *systems]
    for prompt, answer, context, system in product(
        prompts, answers, contexts or [""], systems or [""]
    ):
        taken = [prompt, answer, *filter(None, (context, system))]
        as_alpaca = len(taken) > 2 or strings[prompt] == "instruction" or shape == "alpaca"
        if shape == "completion" and len(taken) > 2:
            continue
        if as_alpaca and shape != "completion":
            columns = {"instruction": prompt, "input": context, "output": answer, "system": system}
        else:
            columns = {"prompt": prompt, "completion": answer}
        because = f"`{answer}` is taken as the answer to `{prompt}`"
        because += f", `{context}` as its context" if context else ""
        because += f", `{system}` as the system message" if system else ""
        yield ColumnReading(
            shape="alpaca" if "instruction" in columns else "completion",
            columns={a: b for a, b in columns.items() if b and a != b},
            ignore=tuple(key for key in every if key not in taken),
            because=because,
        )


def _conversations(values: Mapping[str, Any], shape: str) -> Iterator[ColumnReading]:
    """Yield the columns of messages whose names are written with capitals or spaces."""
    for key, value in values.items():
        way = way_of(parsed_turns(value)) if _plain_name(key) in CONVERSATIONS else None
        made: Shape = "sharegpt" if way is not None and way[0] == "sharegpt" else "messages"
        if way is not None and shape in ("auto", made):
            because = f"`{key}` is taken as the messages"
            yield ColumnReading(shape=made, columns={"messages": key}, because=because)


def _text(strings: Mapping[str, str], key: str, texts: list[str]) -> ColumnReading:
    titles = [one for one in _named(strings, ("title",)) if one != "title"]
    columns = {"text": key} | ({"title": titles[0]} if titles else {})
    return ColumnReading(
        shape="text",
        columns=columns,
        ignore=tuple(one for one in texts if one != key),
        because=f"`{key}` is taken as the text to learn",
    )


def _named(strings: Mapping[str, str], names: Iterable[str]) -> list[str]:
    return [key for key, name in strings.items() if name in names]


def _plain_name(key: str) -> str:
    return key.strip().lower().replace(" ", "_").replace("-", "_")


def _is_about(name: str) -> bool:
    return name in _ABOUT or name.endswith("_id") or name.startswith(("column_", "unnamed:"))


def _scalar(name: str) -> str:
    """Return a name as YAML has it within braces; what YAML would read otherwise is quoted."""
    plain = _PLAIN.fullmatch(name) is not None and name.lower() not in _NO_STRINGS
    return name if plain else json.dumps(name, ensure_ascii=False)
