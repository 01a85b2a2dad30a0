"""Reads a data file's format, number of documents, and samples with the trained text marked.

Reads through the trainer's own reader of data files (standard library only), so the wizard
accepts and refuses exactly what the trainer does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
import textwrap
import time
from collections.abc import Mapping
from typing import Any

from fluxtrain.data.reading.corpus import Reading
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.row import Row
from fluxtrain.data.shapes.keys import TITLES
from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import TextPiece
from fluxtrain.units import bytes_text
from fluxtui.home import expanded

SAMPLES = 3
COUNT_LIMIT_S = 0.5
SAMPLE_CHARACTERS = 400


Sample = tuple[TextPiece, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The data as far as it was looked at.

    Attributes:
        shape: what the first file is read as, in words, and `because` why.
        files: the number of files.
        documents: counted to the end when `counted`, else estimated from the part that was read.
        notes: what is left out, in sentences.
    """

    shape: str
    title: str
    because: str
    files: int
    bytes: int
    documents: int
    counted: bool
    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return name and value of every fact."""
        about = "" if self.counted else "about "
        files = (("files", f"{self.files:,}"),) if self.files > 1 else ()
        return (
            ("format", f"{self.title} ({self.shape}), because {self.because}"),
            *files,
            ("documents", f"{about}{self.documents:,}"),
            ("size", bytes_text(self.bytes)),
        )


def read_data_file(
    name: str,
    count_limit_s: float = COUNT_LIMIT_S,
    settings: Mapping[str, Any] | None = None,
) -> DataFacts:
    """Look at a file, a folder or a pattern for at most about `count_limit_s`.

    `settings` is the configuration's `data` section; `name` stands in for its path.

    Raises:
        BadInput: what the trainer would refuse in the part that was read.
    """
    if not name.strip():
        raise BadInput("type the path of a data file or a folder of them")
    return read_data({**(settings or {}), "path": expanded(name)}, count_limit_s)


def read_data(settings: Mapping[str, Any], count_limit_s: float = COUNT_LIMIT_S) -> DataFacts:
    """Look at the data of a configuration's `data` section, as `read_data_file` does."""
    corpus = read_request(settings).corpus()
    reading = Reading(corpus)
    samples: list[Sample] = []
    counted = True
    deadline = time.monotonic() + count_limit_s
    for row in reading:
        if len(samples) < SAMPLES:
            samples.append(_sample(row))
        if time.monotonic() > deadline:
            counted = False
            break
    reading.check()
    seen = reading.report.rows
    first = corpus.parts[0]
    return DataFacts(
        shape=first.shape,
        title=TITLES[first.shape],
        because=first.because,
        files=len(corpus.parts),
        bytes=corpus.size_bytes,
        documents=seen if counted else max(1, round(seen / (reading.share or 1.0))),
        counted=counted,
        samples=tuple(samples),
        notes=tuple(reading.report.lines()),
    )


def demo_samples() -> tuple[Sample, ...]:
    """Return three docstrings of this interpreter's standard library, as the demo trains on."""
    sources = (textwrap.dedent, functools.wraps, pathlib.PurePath)
    return tuple((TextPiece(inspect.getdoc(source) or "", True),) for source in sources)


def _sample(row: Row) -> Sample:
    if not row.messages:
        return (TextPiece(row.text[:SAMPLE_CHARACTERS].strip(), True),)
    tools = [tool["function"]["name"] for tool in row.tools]
    told = (TextPiece(f"tools: {', '.join(tools)}", False),) if tools else ()
    said = zip(row.messages, row.weights, strict=True)
    return (*told, *(_said(message, weight > 0) for message, weight in said))


def _said(message: Mapping[str, Any], trained: bool) -> TextPiece:
    """Write a message after the name of its speaker."""
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    text = str(message.get("content") or "").strip()
    if calls:
        text = f"{text} (calls {', '.join(calls)})".strip()
    return TextPiece(f"{message['role']}: {text[:SAMPLE_CHARACTERS]}", trained)
