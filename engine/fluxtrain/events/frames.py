"""The wire format: one event is one line of JSON of at most `FRAME_LIMIT_BYTES` with its newline.

JSON has no NaN or infinity, and a diverging run is exactly when they matter, so non-finite floats
travel as the strings "nan", "inf" and "-inf" and come back as floats.
"""

from __future__ import annotations

import enum
import math
import re
from typing import Any

import msgspec

from fluxtrain.errors import TooNew
from fluxtrain.events.events import (
    FRAME_LIMIT_BYTES,
    SCHEMA_MAJOR,
    AnyEvent,
    Event,
    Hello,
)

ELLIPSIS = "…"

_ENDLESS_DIGITS = 300  # JSON allows any number of them, and no float holds such an integer
_ENDLESS = re.compile(rb"[:,\[]-?\d{%d}" % _ENDLESS_DIGITS)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
# strict=False also takes numbers written as text, which is how non-finite floats travel.
_lenient_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent, strict=False)


class SchemaTooNew(TooNew):
    """A run was written in a major version of the event schema that this program cannot read."""


class Skipped(enum.Enum):
    """The reason why a line gave no event."""

    UNKNOWN = "an event of a newer minor version"
    GARBAGE = "not a frame"


class _Envelope(msgspec.Struct, frozen=True):
    """The fields that are the same in every version of the schema."""

    event: str = ""
    schema: str = ""
    version: str = ""  # of the FluxTrain that wrote it


_KNOWN_TAGS = frozenset(kind.__struct_config__.tag for kind in AnyEvent.__args__)


def encode_frame(event: Event, limit_bytes: int = FRAME_LIMIT_BYTES) -> bytes:
    """Encode an event as one line of at most `limit_bytes` with its newline; long fields are
    shortened.

    Moves lose their oldest entries, texts their ends (marked with an ellipsis), choices the ends of
    their reasons; plan.json and engine.log hold these in full.
    """
    try:
        frame: bytes = _encoder.encode(event) + b"\n"
    except UnicodeEncodeError:  # a file name that is not UTF-8 carries lone surrogates
        return _shortened(_plain(msgspec.to_builtins(event)), limit_bytes)
    if len(frame) <= limit_bytes and not (b"null" in frame and _has_nonfinite(event)):
        return frame
    return _shortened(_plain(msgspec.to_builtins(event)), limit_bytes)


def decode_line(line: bytes) -> AnyEvent | None:
    """Return the event of one line, or None for a line to skip; raises `SchemaTooNew`."""
    event = classify_line(line)
    return None if isinstance(event, Skipped) else event


def classify_line(line: bytes) -> AnyEvent | Skipped:
    """Decode as `decode_line`, but say why a line gave no event."""
    try:
        event = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _classify_odd_line(line)
    if len(line) > _ENDLESS_DIGITS and _ENDLESS.search(line):
        return Skipped.GARBAGE
    if isinstance(event, Hello):
        check_schema(event.schema, event.version)
    return event


def check_schema(schema: str, written_by: str) -> None:
    """Raise `SchemaTooNew` for another major version than ours; minors only add."""
    if schema.partition(".")[0] != str(SCHEMA_MAJOR):
        raise SchemaTooNew.of("this run's journal", schema, f"{SCHEMA_MAJOR}.*", written_by)


def _classify_odd_line(line: bytes) -> AnyEvent | Skipped:
    try:
        envelope = msgspec.json.decode(line, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Skipped.GARBAGE
    if envelope.event == "hello":
        check_schema(
            envelope.schema, envelope.version
        )  # before its fields: another major may have changed them
    if envelope.event not in _KNOWN_TAGS:
        return Skipped.UNKNOWN if envelope.event else Skipped.GARBAGE
    try:
        event = _lenient_decoder.decode(line)
    except msgspec.DecodeError:
        return Skipped.GARBAGE
    return Skipped.GARBAGE if _ENDLESS.search(line) else event


def _has_nonfinite(event: Event) -> bool:
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if type(value) is float and not math.isfinite(value):
            return True
        if type(value) is dict and any(
            type(item) is float and not math.isfinite(item) for item in value.values()
        ):
            return True
    return False


def _plain(value: Any) -> Any:
    """Convert `value` for JSON: non-finite floats become text, lone surrogates are replaced."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _shortened(tree: dict[str, Any], limit_bytes: int) -> bytes:
    """Cut the largest field again and again until the frame fits."""
    while True:
        frame: bytes = _encoder.encode(tree) + b"\n"
        excess_bytes = len(frame) - limit_bytes
        if excess_bytes <= 0:
            return frame
        sizes = {
            name: len(_encoder.encode(value))
            for name, value in tree.items()
            if name != "event" and isinstance(value, str | list | dict) and value
        }
        if not sizes:
            raise ValueError(f"a {tree['event']} frame cannot fit {limit_bytes} bytes")
        largest = max(sizes, key=lambda name: sizes[name])
        keep = max(0.0, 1 - (excess_bytes + 8) / sizes[largest])
        tree[largest] = _cut(tree[largest], keep)


def _cut(value: Any, keep: float) -> Any:
    """Cut a field to about the share `keep` of its bytes; always below its present size."""
    if isinstance(value, str):
        kept = value.removesuffix(ELLIPSIS)
        return kept[: int(len(kept) * keep)] + ELLIPSIS if len(kept) > 1 else ""
    if isinstance(value, dict):
        return dict(list(value.items())[: int(len(value) * keep)])
    if isinstance(value[0], dict):  # choices: shorter reasons first, then fewer of them
        texts = [text for item in value for text in item.values() if isinstance(text, str)]
        longest = max(map(len, texts), default=0)
        if longest > 24:
            return [
                {key: _clip(text, longest * 3 // 4) for key, text in item.items()} for item in value
            ]
        return value[: int(len(value) * keep)]
    return value[len(value) - int(len(value) * keep) :]  # moves: the latest stay


def _clip(value: Any, length: int) -> Any:
    """Shorten a text; other values stay."""
    if not isinstance(value, str) or len(value) <= length:
        return value
    return value[: length - 1] + ELLIPSIS
