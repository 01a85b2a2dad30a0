"""Makes packed rows for training and evaluation from a file and a tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fluxtrain.data.demo import demo_files
from fluxtrain.data.encoding.encode import Encoder, check_vocabulary
from fluxtrain.data.encoding.notes import Notes
from fluxtrain.data.encoding.tokenizer import Tokenizer
from fluxtrain.data.packing import PackedRows
from fluxtrain.data.reading.corpus import Corpus, Reading, readings_of
from fluxtrain.data.reading.files import Entry
from fluxtrain.data.reading.request import ReadRequest
from fluxtrain.data.row import Row
from fluxtrain.data.splitting import split, whole
from fluxtrain.data.store import cache
from fluxtrain.data.store.cache import NotKept, cache_folder, forget_unused, key_of
from fluxtrain.data.store.shards import ShardWriter
from fluxtrain.data.store.tokens import TokenSource, in_memory
from fluxtrain.errors import BadInput
from fluxtrain.units import count_text

TELL_EVERY_S = 3.0  # between two reports of progress
CACHED_FROM_BYTES = 8 << 20  # smaller files are encoded within seconds
HELD_UP_TO_BYTES = 512 << 20  # of data whose tokens any machine holds in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Where data comes from and how it becomes rows; the `data` section of a configuration."""

    request: ReadRequest
    sequence_length: int = 256
    held_out: float = 0.02
    seed: int = 0
    token_cache: str = "off"  # or auto, or a folder


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
    told: tuple[str, ...]  # sentences: what reading left out, and what repeats
    notes: Notes  # what was noticed while rows became tokens
    documents: int
    tokens: int
    has_own_held_out: bool = False  # held-out rows are of data.held_out_path


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
    if tell is not None:  # a template or a tokenizer of the model that never ends is seen by it
        tell(f"{corpus.name}, by the model's chat template and tokenizer")
    found = _encoded(source, tokenizer, (corpus, *([apart] if apart else [])), tell)
    for tokens, one in zip(found.tokens, (corpus, apart), strict=False):
        check_vocabulary(tokens.largest, limits.embedding_rows)
        if one is not None:
            _check_count(tokens, source.sequence_length, one)
    trained, held_out = _rows(source, limits, found)
    if not len(trained) and trained.fit.left_out:
        raise BadInput(f"nothing of the data is trained on: {trained.fit.sentences()[0]}")
    return PreparedData(
        trained=trained,
        held_out=held_out,
        corpus=corpus,
        told=tuple(found.told),
        notes=found.notes,
        documents=len(found.tokens[0].starts) - 1,
        tokens=int(found.tokens[0].starts[-1]),
        has_own_held_out=apart is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    """The tokens of the training data, and of separate evaluation data if given."""

    tokens: Sequence[TokenSource]
    notes: Notes
    told: list[str]


def _encoded(
    source: DataSource,
    tokenizer: Tokenizer,
    corpora: Sequence[Corpus],
    tell: Callable[[str], None] | None,
) -> _Encoded:
    """Read and encode, or find the tokens of an earlier run."""
    files = _cacheable(source.token_cache, corpora)
    if files is None:
        return _held(tokenizer, corpora, tell)
    try:
        return _kept(source, files, tokenizer, corpora, tell)
    except NotKept as error:
        if not _is_optional(source, files):
            raise
        found = _held(tokenizer, corpora, tell)
        found.told.append(f"the next start makes the tokens again: {error}")
        return found


def _is_optional(source: DataSource, files: Sequence[Path]) -> bool:
    """Return whether the run continues where its tokens cannot be kept: nobody named the folder,
    and the tokens fit in memory."""
    held = sum(path.stat().st_size for path in files) <= HELD_UP_TO_BYTES
    return held and source.token_cache == "auto"


def _held(
    tokenizer: Tokenizer, corpora: Sequence[Corpus], tell: Callable[[str], None] | None
) -> _Encoded:
    """Read and encode into memory."""
    with readings_of(corpora) as readings:
        encoders = [_encoder(tokenizer, reading) for reading in readings]
        tokens = [
            in_memory(encoder.samples(_told(reading, tell) if tell else reading))
            for encoder, reading in zip(encoders, readings, strict=True)
        ]
    return _Encoded(tokens=tokens, notes=encoders[0].notes, told=readings[0].report.lines())


def _kept(
    source: DataSource,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    corpora: Sequence[Corpus],
    tell: Callable[[str], None] | None,
) -> _Encoded:
    """Find the tokens of an earlier run, or make and keep them. Raises NotKept."""
    folder = cache_folder(source.token_cache)
    entry = cache.CachedTokens(folder / key_of(files, source.request, tokenizer))
    names = cache.PARTS[: len(corpora)]
    while (found := entry.opened(names)) is None:
        forget_unused(folder)
        waiting = partial(tell or _silent, "another run makes tokens of this data: waiting for it")
        with entry.building(waiting):
            if entry.opened(names) is None:  # nobody built it meanwhile
                entry.discard(names)
                try:
                    _build(entry, tokenizer, corpora, tell)
                except OSError:
                    if _is_optional(source, files):
                        entry.free(names)
                    raise
    stored, known = found
    return _Encoded(tokens=stored, notes=stored[0].notes, told=known)


def _build(
    entry: cache.CachedTokens,
    tokenizer: Tokenizer,
    corpora: Sequence[Corpus],
    tell: Callable[[str], None] | None,
) -> None:
    with readings_of(corpora) as readings:
        for name, reading in zip(cache.PARTS, readings, strict=False):
            writer = ShardWriter(entry.folder / name, len(tokenizer))
            encoder = _encoder(tokenizer, reading, writer.notes)
            writer.write(_told(reading, tell) if tell else reading, encoder)
    entry.complete(readings[0].report.lines())


def _encoder(tokenizer: Tokenizer, reading: Reading, notes: Notes | None = None) -> Encoder:
    report = reading.report
    return Encoder(tokenizer, reading.corpus.max_bad_rows, notes, bad=lambda: report.bad)


def _cacheable(wished: str, corpora: Sequence[Corpus]) -> list[Path] | None:
    """Return the files whose tokens are cached; None where they are made anew at each start."""
    if wished == "off":
        return None
    parts = [part for corpus in corpora for part in corpus.parts]
    files = [Path(part.name) for part in parts]
    if not all(path.is_file() for path in files):
        return None  # a stream of the hub may be another one tomorrow
    small = sum(path.stat().st_size for path in files) < CACHED_FROM_BYTES
    return None if small and wished == "auto" else files


def _rows(source: DataSource, limits: ModelLimits, found: _Encoded) -> tuple[PackedRows, ...]:
    """Split the tokens where none are held out by themselves, and pack rows."""
    first, last = found.tokens[0], found.tokens[-1]
    if len(found.tokens) > 1:
        spans = whole(first), whole(last)
    else:
        parts = split(first, source.held_out, source.sequence_length, source.seed)
        spans = parts.trained, parts.held_out
    return tuple(
        PackedRows(tokens, span, source.sequence_length, limits.pad_id, limits.packs)
        for tokens, span in zip((first, last), spans, strict=True)
    )


def _check_count(tokens: TokenSource, row_tokens: int, corpus: Corpus) -> None:
    count = int(tokens.starts[-1])
    if count < row_tokens:
        raise BadInput(
            f"{corpus.name} holds {count} tokens and one row needs {row_tokens}: lower "
            f"data.sequence_length to {max(2, count // 2)} or less, or add data"
        )


def _silent(_: str) -> None:
    """Report nothing."""


def corpora(request: ReadRequest) -> tuple[Corpus, Corpus | None]:
    """Return the training data, and separate evaluation data if there is any. Raises BadInput if a
    file cannot be used."""
    if request.is_demo:
        demo = replace(request, entries=(Entry(path=str(demo_files().corpus)),))
        return demo.corpus(), demo.held_out_corpus()
    return request.corpus(), request.held_out_corpus()


def check_sequence_length(wanted: int, positions: int | None) -> None:
    """Raise BadInput if a row would have more tokens than the model has positions."""
    if positions is not None and wanted > positions:
        raise BadInput(
            f"data.sequence_length is {wanted} and the model knows {positions} positions: "
            f"lower it to {positions} or less"
        )


def _told(reading: Reading, tell: Callable[[str], None]) -> Iterator[Row]:
    """Yield the rows; every few seconds report how much of the data is tokenized."""
    characters, told_s = 0, time.monotonic()
    for row in reading:
        yield row
        characters += row.characters
        if (now_s := time.monotonic()) - told_s >= TELL_EVERY_S:
            share = f", {reading.share:.0%} of the data" if reading.share else ""
            tell(f"tokens of {reading.corpus.name}: {count_text(characters)} characters{share}")
            told_s = now_s
