"""Recognises the shape of a file by its first row, and turns records of that shape into rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fluxtrain.data.containers.record import Record, keys_of, kind_of
from fluxtrain.data.row import Message, Row, weights_of
from fluxtrain.data.shapes.columns import UnclearColumns, any_readings_of, readings_of, told
from fluxtrain.data.shapes.keys import (
    COLUMNS,
    CONVERSATIONS,
    MESSAGE_COLUMNS,
    NEEDED,
    TITLES,
    USED,
    FoundShape,
    Shape,
    advice_for,
    has_keys,
    preference_of,
    says_something,
    shapes_of,
)
from fluxtrain.data.shapes.messages import Turns, conversation
from fluxtrain.data.shapes.refused import (
    RowRefused,
    filled_string,
    is_missing,
    list_of,
    string_of,
)
from fluxtrain.data.shapes.tools import tools_of, without_padding
from fluxtrain.data.shapes.turns import Way, messages_of, rows_of_columns, way_of
from fluxtrain.errors import BadInput

Count = Callable[[str], object]  # told of every key that is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRules:
    """What the configuration says about the keys of a file."""

    shape: str = "auto"  # or one of SHAPES
    columns: Mapping[str, str] = field(default_factory=dict)  # our name -> the file's
    roles: Mapping[str, str] = field(default_factory=dict)  # the file's -> ours
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """The shape of a file, the reason in words, and the columns where their names revealed them."""

    shape: Shape
    because: str
    columns: Mapping[str, str] = field(default_factory=dict)


def recognised(record: Record, mapping: KeyRules) -> Recognised | None:
    """Recognise the shape of a file by one of its first rows; None if its keys do not show one.

    Raises BadInput if it is a row of compared answers, or could be read in two ways.
    """
    values = renamed(record.values, mapping)
    if (compared := preference_of(values)) is not None and mapping.shape == "auto":
        cure = (
            "keep one answer (data.columns: {prompt: prompt, completion: chosen}) and name the "
            "others in data.ignore to train on it alone"
            if "chosen" in compared
            else "keep the rows of good answers alone, and name the mark in data.ignore"
        )
        raise BadInput(
            f"{record.origin} is a preference row ({compared}): training on compared answers is "
            f"not built yet; {cure}"
        )
    if _is_turned(values):
        raise BadInput(
            f"{record.origin} holds a whole table column by column, as pandas writes it: write one "
            'row an object, with df.to_json(path, orient="records", lines=True)'
        )
    found = shapes_of(values, mapping.columns.get("role"))
    if mapping.shape != "auto":
        if not has_keys(cast(Shape, mapping.shape), values):
            return None
        named = next((one.named for one in found if one.shape == mapping.shape), None)
        because = "data.format says so" + (f", and its first row has {named}" if named else "")
        return Recognised(shape=cast(Shape, mapping.shape), because=because)
    found = _without_renderings(found, values)
    if len(found) > 1:
        ways = " or ".join(f"{one.shape} ({one.named})" for one in found)
        same = len({one.shape for one in found}) == 1
        cure = "name the key in data.columns: {messages: ...}" if same else "set data.format"
        raise BadInput(f"{record.origin} can be read as {ways}: {cure}")
    if not found:
        return None
    renames = ", ".join(f"{ours} is {theirs}" for ours, theirs in mapping.columns.items())
    because = f"its first row has {found[0].named}"
    return Recognised(shape=found[0].shape, because=because + (f" ({renames})" if renames else ""))


def recognised_by_columns(
    record: Record, values: Mapping[str, Any], mapping: KeyRules
) -> Recognised:
    """Recognise the shape of a file by the names of its columns, where its keys are none of ours.

    `record` is its first row, and `values` has a value for each key of the first rows. Raises
    UnclearColumns, with the ways in which the columns could be read.
    """
    readings, is_sure = readings_of(values, mapping.shape) if not mapping.columns else ([], False)
    if is_sure:
        [one] = readings
        because = f"{one.because} ({one.settings[0]})"
        return Recognised(shape=one.shape, because=because, columns=one.columns)
    keys = keys_of(record.values if mapping.columns else dict(values))
    if mapping.shape != "auto":
        needed = NEEDED.get(mapping.shape, ("messages",))
        named = " and ".join(f"`{key}`" for key in needed)
        cure = (
            told(readings)
            if readings
            else ("leave out data.format, or say with data.columns which column is which")
        )
        raise UnclearColumns(
            f"{record.origin.file} is read as {TITLES[cast(Shape, mapping.shape)]} (data.format="
            f"{mapping.shape}), and no row has {named}; its keys are {keys}: {cure}",
            readings,
        )
    if readings:
        ways = "in several ways" if len(readings) > 1 else "in a way that is not sure"
        raise UnclearColumns(
            f"{record.origin} can be read {ways} (its keys: {keys}): {told(readings)}", readings
        )
    possible = [] if mapping.columns else any_readings_of(values)
    raise UnclearColumns(
        f"{record.origin} has no key that names its text, prompt or messages (its keys: {keys}): "
        f"{advice_for(values, possible[0].settings[0] if possible else '')}",
        possible,
    )


def renamed(values: dict[str, Any], mapping: KeyRules) -> dict[str, Any]:
    """Return a row with our names for its keys, without nulls and without what is ignored."""
    ours = {theirs: name for name, theirs in mapping.columns.items() if name not in MESSAGE_COLUMNS}
    made: dict[str, Any] = {}
    for key, value in values.items():
        if is_missing(value) or key in mapping.ignore:
            continue
        name = ours.get(key, key)
        if key not in ours and key in mapping.columns and key not in MESSAGE_COLUMNS:
            continue  # `Converter` refuses it
        of_lists = isinstance(value, dict) and name in (*CONVERSATIONS, "tools")
        made[name] = rows_of_columns(value) if of_lists else value
    return made


def _is_turned(values: Mapping[str, Any]) -> bool:
    """Tell a table of columns: objects that all have the numbers of the rows as keys."""
    columns = list(values.values())
    if len(columns) < 2 or not all(isinstance(column, dict) and column for column in columns):
        return False
    return all(column.keys() == columns[0].keys() and "0" in column for column in columns)


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise BadInput if `data.columns` names something that no shape has."""
    for name in columns:
        if name not in (*COLUMNS, *MESSAGE_COLUMNS):
            raise BadInput(
                f"data.columns has {name!r}, and it names one of "
                f"{', '.join((*COLUMNS, *MESSAGE_COLUMNS))} with the column of the file that it is"
            )


class Converter:
    """Turns the records of one file into rows."""

    def __init__(self, shape: Shape, mapping: KeyRules, count: Count) -> None:
        self.shape = shape
        self._mapping = mapping
        self._way: Way | None = None  # how the first conversation writes its turns
        self._count = count
        role, content = ("from", "value") if shape == "sharegpt" else ("role", "content")
        self._turns = Turns(
            role=mapping.columns.get("role", role),
            content=mapping.columns.get("content", content),
            roles=mapping.roles,
            ignore=mapping.ignore,
        )
        self._convert: dict[Shape, Callable[[Record, dict[str, Any]], Row | None]] = {
            "text": self._text,
            "messages": self._conversation,
            "sharegpt": self._conversation,
            "alpaca": self._alpaca,
            "completion": self._completion,
        }

    def row(self, record: Record) -> Row | None:
        """Return the row of a record; None if it is a text without words.

        Raises RowRefused for a record that cannot be used.
        """
        values = renamed(record.values, self._mapping)
        made = self._convert[self.shape](record, values)
        if made is not None:
            self._account_for(record, values, made)
        return made

    def _account_for(self, record: Record, values: dict[str, Any], row: Row) -> None:
        """Count every key that is left out; refuse keys with content for the model."""
        named = self._mapping.columns.items()
        columns = {ours: theirs for ours, theirs in named if ours not in MESSAGE_COLUMNS}
        for key, value in record.values.items():
            if key in self._mapping.ignore:
                if value is not None:
                    self._count(key)
            elif key in columns and key not in columns.values() and not is_missing(value):
                raise RowRefused(
                    f" has the key `{key}`, and data.columns reads `{columns[key]}` in its place: "
                    f"name `{key}` in data.ignore to leave it out"
                )
        used = _used(self.shape, values)
        for key, value in values.items():
            if key in used:
                continue
            if says_something(key, value) and not _repeats(value, row):
                raise RowRefused(
                    f" has the key `{key}`, which is not read in {TITLES[self.shape]}: name it in "
                    "data.ignore to leave it out, or set data.format or data.columns to use it"
                )
            self._count(key)

    def _needs(self, record: Record, values: dict[str, Any], *keys: str) -> None:
        """Raise RowRefused if a key is missing, and name the shape that the row has instead."""
        missing = [key for key in keys if key not in values]
        if not missing:
            return
        if (theirs := self._mapping.columns.get(missing[0], missing[0])) in record.values:
            raise RowRefused(
                f" has null for `{theirs}`: write what it is, or leave the row out with "
                "data.max_bad_rows"
            )
        other = next((one for one in shapes_of(values) if one.shape != self.shape), None)
        if other is not None:
            raise RowRefused(
                f" has {other.named}, and the file's first row is of another shape "
                f"({TITLES[self.shape]}): put each shape into a file of its own"
            )
        raise RowRefused(f" has no `{missing[0]}`: its keys are {keys_of(values)}")

    def _text(self, record: Record, values: dict[str, Any]) -> Row | None:
        self._needs(record, values, "text")
        text = string_of(values["text"], "text")
        title = string_of(values.get("title", ""), "title").strip()
        if not text.strip():
            return None
        return Row(origin=record.origin, text=f"{title}\n{text}" if title else text)

    def _conversation(self, record: Record, values: dict[str, Any]) -> Row:
        key = _turns_key(values)
        if key is None:
            self._needs(record, values, "messages")
            key = "messages"
        turns = list_of(values[key], key)
        if self._is_of_other_shape(turns):
            other: Shape = "messages" if self.shape == "sharegpt" else "sharegpt"
            raise RowRefused(
                f" is of another shape ({TITLES[other]}) than the file's first row "
                f"({TITLES[self.shape]}): put each shape into a file of its own"
            )
        way = way_of(turns, self._turns.role)
        if way is not None:
            self._way = self._way or way[0]
            if way[0] == self._way:
                turns = messages_of(turns, self._turns.role, self._turns.content)
        messages, weights = conversation(turns, self._turns, self._counted, key)
        tools = _tools(values)
        messages = without_padding(messages, tools)
        system = string_of(values.get("system", ""), "system")
        if system.strip() and messages[0] != {"role": "system", "content": system}:
            if messages[0]["role"] in ("system", "developer"):
                raise RowRefused(
                    ": `system` and the first message are two different system prompts: "
                    "remove one of them"
                )
            messages = ({"role": "system", "content": system}, *messages)
            weights = (0.0, *weights)
        return Row(origin=record.origin, messages=messages, weights=weights, tools=tools)

    def _alpaca(self, record: Record, values: dict[str, Any]) -> Row:
        self._needs(record, values, "instruction", "output")
        asked = string_of(values["instruction"], "instruction")
        given = string_of(values.get("input", ""), "input")
        output = filled_string(values["output"], "output", "there is nothing to learn")
        words = f"{asked}\n{given}" if asked.strip() and given.strip() else asked + given
        filled_string(words, "instruction", "the answer follows nothing")
        messages: list[Message] = []
        system = string_of(values.get("system", ""), "system")
        if system.strip():
            messages.append({"role": "system", "content": system})
        for number, pair in enumerate(list_of(values.get("history", []), "history"), start=1):
            messages += _pair(pair, f"history[{number - 1}]")
        messages.append({"role": "user", "content": words})
        messages.append({"role": "assistant", "content": output})
        whole = tuple(messages)
        return Row(origin=record.origin, messages=whole, weights=weights_of(whole))

    def _completion(self, record: Record, values: dict[str, Any]) -> Row:
        self._needs(record, values, "prompt", "completion")
        prompt, completion = values["prompt"], values["completion"]
        if isinstance(prompt, list) or isinstance(completion, list):
            return self._of_two_lists(record, prompt, completion, _tools(values))
        messages: tuple[Message, ...] = (
            {"role": "user", "content": string_of(prompt, "prompt")},
            {
                "role": "assistant",
                "content": filled_string(completion, "completion", "there is nothing to learn"),
            },
        )
        for name in ("tools", "functions"):
            if values.get(name):
                raise RowRefused(f": `{name}` belong to messages, and `prompt` is a string")
        return Row(
            origin=record.origin, messages=messages, weights=weights_of(messages), plain=True
        )

    def _of_two_lists(self, record: Record, prompt: Any, completion: Any, tools: Any) -> Row:
        """Join the messages of a prompt, which are context, and of its completion."""
        for name, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, list):
                raise RowRefused(
                    f": `{name}` is {kind_of(value)} and its counterpart a list of messages: "
                    "give both as strings or both as lists"
                )
        trained, weights = conversation(completion, self._turns, self._counted, "completion")
        context: tuple[Message, ...] = ()
        if prompt:
            # The prompt alone need not hold an answer, so it is checked with one behind it.
            closing = {self._turns.role: "assistant", self._turns.content: "."}
            context, _ = conversation([*prompt, closing], self._turns, self._counted, "prompt")
            context = context[:-1]
        return Row(
            origin=record.origin,
            messages=context + trained,
            weights=(0.0,) * len(context) + weights,
            tools=tools,
        )

    def _counted(self, key: str) -> None:
        self._count(key)

    def _is_of_other_shape(self, turns: list[Any]) -> bool:
        first = turns[0] if turns else None
        if not isinstance(first, dict) or self._turns.role in first:
            return False
        return ("role" if self.shape == "sharegpt" else "from") in first


def _used(shape: Shape, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that a shape reads of this row; of several conversations it reads one."""
    if shape not in ("messages", "sharegpt"):
        return USED[shape]
    others = tuple(key for key in USED[shape] if key not in CONVERSATIONS)
    key = _turns_key(values)
    return (key, *others) if key else others


def _turns_key(values: Mapping[str, Any]) -> str | None:
    return next((key for key in CONVERSATIONS if key in values), None)


def _tools(values: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    if values.get("tools") and values.get("functions"):
        raise RowRefused(" has both `tools` and `functions`: keep one of them")
    name = "functions" if values.get("functions") else "tools"
    return tools_of(values.get(name), name)


def _pair(pair: Any, where: str) -> list[Message]:
    turns = list_of(pair, where)
    if len(turns) != 2:
        raise RowRefused(f": `{where}` has {len(turns)} entries, and it must be [prompt, answer]")
    asked, said = (string_of(words, where) for words in turns)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def _repeats(value: Any, row: Row) -> bool:
    """Tell whether a key only says again what the row says already, as a rendering does."""
    if not isinstance(value, str):
        return False
    words = [message.get("content") or "" for message in row.messages] or [row.text]
    text = value.strip()
    return any(text in said for said in words) or _holds_all(text, words)


def _holds_all(text: str, words: list[str]) -> bool:
    pieces = [line.strip() for said in words for line in said.splitlines() if line.strip()]
    return bool(pieces) and all(piece in text for piece in pieces)


def _without_renderings(found: list[FoundShape], values: Mapping[str, Any]) -> list[FoundShape]:
    """Leave out `text` where it only renders the other keys of the row."""
    others = [one for one in found if one.shape != "text"]
    keys = {"alpaca": ("instruction", "input", "output"), "completion": ("prompt", "completion")}
    if len(others) != 1 or len(found) != 2 or others[0].shape not in keys:
        return found
    words = [values.get(key, "") for key in keys[others[0].shape]]
    if all(isinstance(said, str) for said in words) and _holds_all(values["text"], words):
        return others
    return found
