"""`fluxtrain inspect`: show the first documents of the data as the model will see them.

The trainer's own code reads, tokenizes and packs them, so exactly the tokens shown as learnt get a
label. Weights are not needed. Sizes beyond the sample are estimates and are marked so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fluxtrain.client.inspection import InspectedSample, InspectionAnswer, TextPiece
from fluxtrain.config.schema import RunConfig
from fluxtrain.data.formats import documents
from fluxtrain.data.packing import IGNORED, PackedRows
from fluxtrain.data.prepare import DataSource, check_sequence_length, located
from fluxtrain.data.row import Row
from fluxtrain.data.splitting import Spans
from fluxtrain.data.tokens import Tokens, check_vocabulary, tokenize
from fluxtrain.models.loading import ModelSource, load_tokenizer, pad_id
from fluxtrain.units import count_text

SAMPLES = 3
DOCUMENTS = 512
CHARACTERS = 2 << 20
SHOWN_TOKENS = 2048  # of a sample; longer rows are shown in part


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The first documents of a file, and their share of it."""

    documents: list[Row]
    share: float  # of the file's bytes; 1 is all


def inspect(config: RunConfig) -> InspectionAnswer:
    """Read, tokenize and pack the first documents, and estimate the rest.

    Raises:
        BadInput: as the run would for the tokenizer and these documents.
    """
    tokenizer, shape = load_tokenizer(
        ModelSource(
            path=config.model.path,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
        )
    )
    text_shape, row_tokens = shape.get_text_config(), config.data.sequence_length
    positions = getattr(text_shape, "max_position_embeddings", None)
    check_sequence_length(row_tokens, positions)
    path, format_, because = located(DataSource(path=config.data.path, format=config.data.format))
    sampled = first_documents(path, documents(path, format_))
    tokens = tokenize(sampled.documents, tokenizer)
    check_vocabulary(tokens, text_shape.vocab_size)
    lengths = np.diff(tokens.starts)
    rows = PackedRows(tokens, Spans(tokens.starts[:-1], lengths), row_tokens, pad_id(tokenizer))
    longer = lengths > row_tokens
    return InspectionAnswer(
        path=str(path),
        format=format_,
        because=because,
        sequence_length=row_tokens,
        max_positions=positions,
        sampled_documents=tokens.documents,
        sampled_share=sampled.share,
        sampled_tokens=tokens.count,
        estimated_documents=round(tokens.documents / sampled.share),
        estimated_tokens=round(tokens.count / sampled.share),
        estimated_rows=max(1, round(len(rows) / sampled.share)),
        learnt_share=rows.predicted_count / tokens.count,
        cut_documents_share=float(longer.mean()),
        cut_tokens_share=float(lengths[longer].sum() / tokens.count),
        padding_share=1 - rows.token_count / (len(rows) * row_tokens) if len(rows) else 0.0,
        lengths=tuple(int(length) for length in lengths),
        samples=tuple(
            _sample(tokens, index, row_tokens, tokenizer)
            for index in range(min(SAMPLES, tokens.documents))
        ),
    )


def first_documents(path: Path, reader: Iterator[Row]) -> Sampled:
    """Read documents up to `DOCUMENTS` or `CHARACTERS`; with the share of the file they are."""
    taken: list[Row] = []
    characters = 0
    for document in islice(reader, DOCUMENTS):
        taken.append(document)
        characters += document.characters
        if characters >= CHARACTERS:
            break
    following = next(reader, None)
    if following is None:
        return Sampled(documents=taken, share=1.0)
    with path.open("rb") as file:
        read_bytes = sum(len(line) for line in islice(file, following.origin.number - 1))
    return Sampled(documents=taken, share=max(1, read_bytes) / path.stat().st_size)


def _sample(tokens: Tokens, index: int, row_tokens: int, tokenizer: Any) -> InspectedSample:
    """Pack one document alone and return its first row, in stretches that are learnt or not."""
    start, end = int(tokens.starts[index]), int(tokens.starts[index + 1])
    span = Spans(np.asarray([start]), np.asarray([end - start]))
    rows = PackedRows(tokens, span, row_tokens, pack=False)
    ids = tokens.ids[start:end].astype(np.int64)[: min(row_tokens, SHOWN_TOKENS)]
    learnt = np.zeros(len(ids), dtype=np.bool_)
    if len(rows):  # a document with nothing to learn has no row
        row = rows[0]
        ids = row.input_ids[0, : row.tokens][:SHOWN_TOKENS]
        learnt = row.labels[0, : row.tokens][:SHOWN_TOKENS] != IGNORED
    return InspectedSample(
        tokens=end - start,
        shown_tokens=len(ids),
        learnt_tokens=rows.predicted_count,
        rows=len(rows),
        pieces=tuple(stretches(ids.tolist(), learnt.tolist(), tokenizer)),
    )


def stretches(ids: list[int], learnt: list[bool], tokenizer: Any) -> list[TextPiece]:
    """Split the text into stretches that are learnt or not.

    A stretch is decoded behind the text before it: tokenizers drop a space at the beginning.
    """
    borders = [0, *(i for i in range(1, len(ids)) if learnt[i] != learnt[i - 1]), len(ids)]
    pieces: list[TextPiece] = []
    before = ""
    for first, last in pairwise(borders):
        whole = tokenizer.decode(ids[:last], clean_up_tokenization_spaces=False)
        alone = not whole.startswith(before)  # a character is cut in two
        text = tokenizer.decode(ids[first:last]) if alone else whole[len(before) :]
        pieces.append(TextPiece(text, learnt[first]))
        before = whole
    return pieces


def page(found: InspectionAnswer) -> str:
    """Format the answer for people; words mark what is learnt."""
    lines = [
        f"{found.path}: {found.format}, {found.because}",
        _extent(found),
        f"{found.learnt_share:.0%} of the tokens are learnt; packed rows of "
        f"{found.sequence_length} tokens are {1 - found.padding_share:.0%} full",
        f"{found.cut_documents_share:.0%} of the documents are longer than a row and are cut "
        f"into several",
    ]
    for number, sample in enumerate(found.samples, start=1):
        lines += ["", f"sample {number}: {sample.title}"]
        for piece in sample.pieces:
            mark = "learnt" if piece.learnt else "seen"
            lines += [f"  {mark:<6} | {line}" for line in piece.text.splitlines()]
    return "\n".join(lines)


def _extent(found: InspectionAnswer) -> str:
    if found.is_whole:
        return f"{found.sampled_documents:,} documents, {found.sampled_tokens:,} tokens"
    return (
        f"about {count_text(found.estimated_documents)} documents and "
        f"{count_text(found.estimated_tokens)} tokens, estimated from the first "
        f"{found.sampled_documents:,} ({found.sampled_share:.1%} of the file)"
    )
