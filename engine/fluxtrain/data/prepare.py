"""Makes packed rows for training and evaluation from a file and a tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fluxtrain.data.demo import demo_files
from fluxtrain.data.encoding.encode import Encoder, check_vocabulary
from fluxtrain.data.encoding.notes import Notes
from fluxtrain.data.encoding.tokenizer import Tokenizer
from fluxtrain.data.packing import PackedRows
from fluxtrain.data.reading.corpus import Corpus, Reading
from fluxtrain.data.reading.files import Entry
from fluxtrain.data.reading.repeats import RepeatSearch
from fluxtrain.data.reading.report import Report
from fluxtrain.data.reading.request import ReadRequest
from fluxtrain.data.row import Row
from fluxtrain.data.splitting import split, whole
from fluxtrain.data.store.tokens import Tokens, in_memory
from fluxtrain.errors import BadInput
from fluxtrain.units import count_text

TELL_EVERY_S = 3.0  # between two reports of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Where data comes from and how it becomes rows; the `data` section of a configuration."""

    request: ReadRequest
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
    corpus: Corpus
    report: Report  # what reading left out
    notes: Notes  # what was noticed while rows became tokens
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
    corpus, apart = corpora(source.request)
    with RepeatSearch() as search:
        reading = Reading(corpus, search)
        tokens, notes = _tokens(reading, source, tokenizer, limits, tell)
        evaluated = tokens
        if apart is None:
            parts = split(tokens, source.held_out, source.sequence_length, source.seed)
            spans = parts.trained, parts.held_out
        else:
            beside = Reading(apart, search, first_file=len(corpus.parts))
            evaluated, _ = _tokens(beside, source, tokenizer, limits, tell)
            spans = whole(tokens), whole(evaluated)
            reading.report.add(beside.report)
        names = [part.name for part in (*corpus.parts, *(apart.parts if apart else ()))]
        search.describe(reading.report, names, len(corpus.parts))
    trained, held_out = (
        PackedRows(of, span, source.sequence_length, limits.pad_id, limits.packs)
        for of, span in zip((tokens, evaluated), spans, strict=True)
    )
    return PreparedData(
        trained=trained,
        held_out=held_out,
        corpus=corpus,
        report=reading.report,
        notes=notes,
        documents=tokens.documents,
        tokens=tokens.count,
    )


def corpora(request: ReadRequest) -> tuple[Corpus, Corpus | None]:
    """Return the data to train on, and data of its own for evaluation if there is any.

    Raises BadInput if a file cannot be used.
    """
    if request.is_demo:
        demo = replace(request, entries=(Entry(path=str(demo_files().corpus)),))
        return demo.corpus(), demo.held_out_corpus()
    return request.corpus(), request.held_out_corpus()


def _tokens(
    reading: Reading,
    source: DataSource,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    tell: Callable[[str], None] | None,
) -> tuple[Tokens, Notes]:
    report, limit = reading.report, reading.corpus.max_bad_rows
    encoder = Encoder(tokenizer, limit, bad=lambda: report.bad)
    tokens = in_memory(encoder.samples(_told(reading, tell) if tell else reading))
    check_vocabulary(tokens.largest, limits.embedding_rows)
    if tokens.count < source.sequence_length:
        raise BadInput(
            f"{reading.corpus.name} holds {tokens.count} tokens and one row needs "
            f"{source.sequence_length}: lower data.sequence_length to "
            f"{max(2, tokens.count // 2)} or less, or add data"
        )
    return tokens, encoder.notes


def check_sequence_length(wanted: int, positions: int | None) -> None:
    """Raise BadInput if a row would have more tokens than the model has positions."""
    if positions is not None and wanted > positions:
        raise BadInput(
            f"data.sequence_length is {wanted} and the model knows {positions} positions: "
            f"lower it to {positions} or less"
        )


def _told(reading: Reading, tell: Callable[[str], None]) -> Iterator[Row]:
    """Yield the rows; every few seconds tell how much of the data has been tokenized."""
    characters, told_s = 0, time.monotonic()
    for row in reading:
        yield row
        characters += row.characters
        if (now_s := time.monotonic()) - told_s >= TELL_EVERY_S:
            share = f", {reading.share:.0%} of the data" if reading.share else ""
            tell(f"tokens of {reading.corpus.name}: {count_text(characters)} characters{share}")
            told_s = now_s
