"""Makes packed rows for training and evaluation from a file and a tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.data.demo import demo_files
from fluxtrain.data.formats import Format, detected, documents
from fluxtrain.data.hub import local_file
from fluxtrain.data.packing import PackedRows
from fluxtrain.data.row import Row
from fluxtrain.data.sources import DEMO
from fluxtrain.data.splitting import split
from fluxtrain.data.tokens import Tokenizer, check_vocabulary, tokenize
from fluxtrain.errors import BadInput
from fluxtrain.units import bytes_text, count_text

TELL_EVERY_S = 3.0  # between two reports of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Where data comes from and how it becomes rows; the `data` section of a configuration."""

    path: str = DEMO
    format: str = "auto"
    sequence_length: int = 256
    held_out: float = 0.02
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of a model that the data must respect."""

    embedding_rows: int
    max_positions: int | None = None
    pad_id: int = 0
    packs: bool = True  # False: one document a row


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """Rows to train on and rows held out (none if held_out is 0), with facts about the file."""

    trained: PackedRows
    held_out: PackedRows
    format: Format
    format_because: str
    documents: int
    tokens: int


def prepare(
    source: DataSource,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    tell: Callable[[str], None] | None = None,
) -> PreparedData:
    """Read, tokenize, split and pack; report progress to `tell` if that takes long.

    Raises BadInput for everything a user can repair.
    """
    check_sequence_length(source.sequence_length, limits.max_positions)
    path, format_, because = located(source)
    found = documents(path, format_)
    tokens = tokenize(_told(found, path, tell) if tell else found, tokenizer)
    check_vocabulary(tokens, limits.embedding_rows)
    if tokens.count < source.sequence_length:
        raise BadInput(
            f"{path} holds {tokens.count} tokens and one row needs {source.sequence_length}: "
            f"lower data.sequence_length to {max(2, tokens.count // 2)} or less, or add data"
        )
    parts = split(tokens, source.held_out, source.sequence_length, source.seed)
    trained, held_out = (
        PackedRows(tokens, spans, source.sequence_length, limits.pad_id, limits.packs)
        for spans in (parts.trained, parts.held_out)
    )
    return PreparedData(
        trained=trained,
        held_out=held_out,
        format=format_,
        format_because=because,
        documents=tokens.documents,
        tokens=tokens.count,
    )


def located(source: DataSource) -> tuple[Path, Format, str]:
    """Return the file, its format, and the reason. Raises BadInput if it cannot be used."""
    if source.path == DEMO:
        return demo_files().corpus, "jsonl-text", "the demo's docstrings"
    path = local_file(source.path)
    found = detected(path, source.format)
    return path, found.format, found.because


def check_sequence_length(wanted: int, positions: int | None) -> None:
    """Raise BadInput if a row would have more tokens than the model has positions."""
    if positions is not None and wanted > positions:
        raise BadInput(
            f"data.sequence_length is {wanted} and the model knows {positions} positions: "
            f"lower it to {positions} or less"
        )


def _told(found: Iterable[Row], path: Path, tell: Callable[[str], None]) -> Iterator[Row]:
    """Yield the documents; every few seconds tell how much of the file has been tokenized."""
    size, characters, told_s = path.stat().st_size, 0, time.monotonic()
    for document in found:
        yield document
        characters += document.characters
        if (now_s := time.monotonic()) - told_s >= TELL_EVERY_S:
            done = f"{count_text(characters)} characters of {bytes_text(size)}"
            tell(f"tokens of {path.name}: {done} so far")
            told_s = now_s
