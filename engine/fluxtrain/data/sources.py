"""Where the training text comes from, and what a glance at it tells. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fluxtrain.data.formats import Detected, Document, Format, detect, documents
from fluxtrain.units import bytes_text

DEMO = "demo"
GLANCE_DOCUMENTS = 64
GLANCE_CHARACTERS = 1 << 20
PREVIEW_CHARACTERS = 400
CHARACTERS_PER_TOKEN = 4.0  # English prose and BPE vocabularies of 32k to 150k entries


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What the first documents of a file and its size tell; estimates are named so."""

    path: Path
    size_bytes: int
    format: Format
    because: str
    estimated_tokens: int
    documents_seen: int
    preview: str  # the start of the first document

    def line(self) -> str:
        """One line for a person: format, size and estimated tokens."""
        size = bytes_text(self.size_bytes)
        return f"{self.format}, {size}, about {self.estimated_tokens:,} tokens"


def glance(path: Path) -> FileFacts:
    """Facts about a data file from its first documents, in milliseconds whatever its size.

    Raises BadInput when the file or one of those documents cannot be used.
    """
    found: Detected = detect(path)
    seen: list[str] = []
    characters = 0
    for document in islice(documents(path, found.format), GLANCE_DOCUMENTS):
        seen.append(_words(document))
        characters += len(seen[-1])
        if characters >= GLANCE_CHARACTERS:
            break
    size_bytes = path.stat().st_size
    return FileFacts(
        path=path,
        size_bytes=size_bytes,
        format=found.format,
        because=found.because,
        estimated_tokens=max(1, round(size_bytes / CHARACTERS_PER_TOKEN)),
        documents_seen=len(seen),
        preview=seen[0][:PREVIEW_CHARACTERS],
    )


def read(path: Path, format: Format | None = None) -> Iterator[Document]:
    """All documents of a file; `format` None detects it. Raises BadInput as `documents` does."""
    yield from documents(path, format or detect(path).format)


def _words(document: Document) -> str:
    if document.messages:
        return "\n".join(f"{m['role']}: {m.get('content') or ''}" for m in document.messages)
    return document.text
