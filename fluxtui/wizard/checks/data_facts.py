"""Reads a data file's format, number of documents, and samples with the trained text marked.

Reads through the trainer's own reader of data files (standard library only), so the wizard
accepts and refuses exactly what the trainer does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import pathlib
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxtrain.client.inspection import TextPiece
from fluxtrain.data.formats import detected, documents
from fluxtrain.data.row import Row
from fluxtrain.errors import BadInput
from fluxtrain.units import bytes_text
from fluxtui.home import expanded

SAMPLES = 3
COUNT_LIMIT_S = 0.5
SAMPLE_CHARACTERS = 400


Sample = tuple[TextPiece, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFacts:
    """A data file as far as it was looked at.

    Attributes:
        documents: counted to the end when `counted`, else estimated from the part that was read.
    """

    name: str
    format: str
    because: str
    bytes: int
    documents: int
    counted: bool
    samples: tuple[Sample, ...]

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Name and value of every fact."""
        about = "" if self.counted else "about "
        return (
            ("format", f"{self.format}: {self.because}"),
            ("documents", f"{about}{self.documents:,}"),
            ("size", bytes_text(self.bytes)),
        )


def read_data_file(
    name: str, count_limit_s: float = COUNT_LIMIT_S, format: str = "auto"
) -> DataFacts:
    """Look at a data file for at most about `count_limit_s`. `format` is that of the configuration.

    Raises:
        BadInput: what the trainer would refuse in the part that was read.
    """
    if not name.strip():
        raise BadInput("type the path of a .txt or .jsonl file")
    path = Path(expanded(name))
    found = detected(path, format)
    size_bytes = path.stat().st_size
    samples: list[Sample] = []
    seen, seen_bytes, counted = 0, 0, True
    deadline = time.monotonic() + count_limit_s
    for document in documents(path, found.format):
        seen += document.ends
        seen_bytes += _bytes_of(document)
        if len(samples) < SAMPLES:
            samples.append(_sample(document))
        if time.monotonic() > deadline:
            counted = False
            break
    if not counted:
        seen = max(1, round(seen * size_bytes / max(seen_bytes, 1)))
    return DataFacts(
        name=path.name,
        format=found.format,
        because=found.because,
        bytes=size_bytes,
        documents=seen,
        counted=counted,
        samples=tuple(samples),
    )


def demo_samples() -> tuple[Sample, ...]:
    """Three docstrings of this interpreter's standard library, of the kind the demo learns."""
    sources = (textwrap.dedent, functools.wraps, pathlib.PurePath)
    return tuple((TextPiece(inspect.getdoc(source) or "", True),) for source in sources)


def _sample(document: Row) -> Sample:
    if not document.messages:
        return (TextPiece(document.text[:SAMPLE_CHARACTERS].strip(), True),)
    return tuple(_said(message) for message in document.messages)


def _said(message: Mapping[str, Any]) -> TextPiece:
    """A message after the name of its speaker."""
    text = str(message.get("content") or "(calls a tool)")[:SAMPLE_CHARACTERS].strip()
    return TextPiece(f"{message['role']}: {text}", message["role"] == "assistant")


def _bytes_of(document: Row) -> int:
    if document.messages:
        return len(json.dumps(document.messages, ensure_ascii=False).encode())
    return len(document.text.encode())
