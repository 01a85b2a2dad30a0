"""`fluxtrain inspect`: show the first documents of the data as the model will see them.

The trainer's own code reads, tokenizes and packs them, so the tokens shown as trained on
have a label in training, too. Weights are not needed. Sizes beyond the sample are marked as
estimates.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from fluxtrain.config.schema import RunConfig
from fluxtrain.data.encoding.encode import Encoder, check_vocabulary
from fluxtrain.data.encoding.notes import Notes
from fluxtrain.data.packing import IGNORED, PackedRows
from fluxtrain.data.prepare import check_sequence_length, corpora
from fluxtrain.data.reading.parts import Part
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.reading.sampling import sampled
from fluxtrain.data.shapes.keys import TITLES
from fluxtrain.data.splitting import Spans
from fluxtrain.data.store.tokens import Tokens, in_memory
from fluxtrain.events.answers.answers import (
    InspectedFile,
    InspectedSample,
    InspectionAnswer,
    TextPiece,
)
from fluxtrain.methods.text_task import counted
from fluxtrain.models.loading import pad_id
from fluxtrain.train.placing.row_length import FirstSamples, tokenizer_of, with_row_length
from fluxtrain.units import count_text

SAMPLES = 3
SHOWN_FILES = 8
SHOWN_TOKENS = 2048  # of a sample; longer rows are shown in part


def inspect(config: RunConfig, whole: bool = False) -> InspectionAnswer:
    """Read, tokenize and pack the first documents, and estimate the rest.

    Bad rows, keys that are left out and repeated rows are looked for in more of the data; with
    `whole` in all of it.

    Raises:
        BadInput: as the run would for the tokenizer and these documents.
    """
    tokenizer, shape = tokenizer_of(config)
    text_shape = shape.get_text_config()
    positions = getattr(text_shape, "max_position_embeddings", None)
    if config.data.sequence_length != "auto":
        check_sequence_length(config.data.sequence_length, positions)
    corpus, apart = corpora(read_request(config.data.model_dump()))
    seen = sampled(corpus, apart, whole)
    notes = [*seen.report.lines(), *([corpus.endless] if corpus.endless else [])]
    encoder = Encoder(tokenizer, corpus.max_bad_rows, bad=lambda: seen.report.bad)
    tokens = in_memory(encoder.samples(seen.rows))
    check_vocabulary(tokens.largest, text_shape.vocab_size)
    first = FirstSamples(tokens=tokens, share=seen.share, notes=encoder.notes, positions=positions)
    config, chosen = with_row_length(config, first)
    lengths, row_tokens = np.diff(tokens.starts), config.data.row_tokens
    rows = PackedRows(tokens, Spans(tokens.starts[:-1], lengths), row_tokens, pad_id(tokenizer))
    longer = lengths > row_tokens
    return InspectionAnswer(
        path=corpus.name,
        format=", ".join(dict.fromkeys(part.shape for part in corpus.parts)),
        because=corpus.parts[0].because,
        files=tuple(_file(part) for part in corpus.parts),
        held_out_files=tuple(_file(part) for part in apart.parts) if apart else (),
        notes=(*notes, *first.told(row_tokens), *_stopping(encoder.notes, tokenizer)),
        read_share=seen.read_share,
        sequence_length=row_tokens,
        sequence_length_because=chosen[0].because if chosen else "data.sequence_length says so",
        fitting_share=rows.fit.share,
        cut_samples=rows.fit.cut,
        left_out_samples=rows.fit.left_out,
        samples_fit=counted(rows.fit),
        max_positions=positions,
        sampled_documents=tokens.documents,
        sampled_share=seen.share,
        sampled_tokens=tokens.count,
        estimated_documents=round(tokens.documents / seen.share),
        estimated_tokens=round(tokens.count / seen.share),
        estimated_rows=max(1, round(len(rows) / seen.share)),
        trained_share=rows.predicted_count / tokens.count,
        cut_documents_share=float(longer.mean()),
        cut_tokens_share=float(lengths[longer].sum() / tokens.count),
        padding_share=1 - rows.token_count / (len(rows) * row_tokens) if len(rows) else 0.0,
        lengths=tuple(int(length) for length in lengths),
        samples=tuple(
            _sample(tokens, index, row_tokens, tokenizer)
            for index in range(min(SAMPLES, tokens.documents))
        ),
    )


def _stopping(notes: Notes, tokenizer: Any) -> list[str]:
    """Name the end of answers, where the tokenizer's own end of sequence is another token."""
    ends = [end for end, _ in notes.ends.most_common() if end != tokenizer.eos_token_id]
    names = ", ".join(tokenizer.convert_ids_to_tokens(ends))
    own = tokenizer.eos_token or "nothing"
    return [f"answers end with {names}, and the tokenizer's end of sequence is {own}"] * bool(ends)


def _file(part: Part) -> InspectedFile:
    return InspectedFile(
        name=part.name,
        container=part.container,
        shape=part.shape,
        title=TITLES[part.shape],
        because=part.because,
        size_bytes=part.size_bytes,
        weight=part.weight,
    )


def _sample(tokens: Tokens, index: int, row_tokens: int, tokenizer: Any) -> InspectedSample:
    """Pack one document alone and return its first row, in stretches that are trained on or not."""
    start, end = int(tokens.starts[index]), int(tokens.starts[index + 1])
    span = Spans(np.asarray([start]), np.asarray([end - start]))
    rows = PackedRows(tokens, span, row_tokens, pack=False)
    ids = tokens.ids[start:end].astype(np.int64)[: min(row_tokens, SHOWN_TOKENS)]
    trained = np.zeros(len(ids), dtype=np.bool_)
    if len(rows):  # a document with nothing to learn has no row
        row = rows[0]
        ids = row.input_ids[0, : row.tokens][:SHOWN_TOKENS]
        trained = row.labels[0, : row.tokens][:SHOWN_TOKENS] != IGNORED
    return InspectedSample(
        tokens=end - start,
        shown_tokens=len(ids),
        trained_tokens=rows.predicted_count,
        rows=len(rows),
        pieces=tuple(stretches(ids.tolist(), trained.tolist(), tokenizer)),
    )


def stretches(ids: list[int], trained: list[bool], tokenizer: Any) -> list[TextPiece]:
    """Split the text into stretches that are trained on or not.

    A stretch is decoded behind the text before it: tokenizers drop a space at the beginning.
    """
    borders = [0, *(i for i in range(1, len(ids)) if trained[i] != trained[i - 1]), len(ids)]
    pieces: list[TextPiece] = []
    before = ""
    for first, last in pairwise(borders):
        whole = tokenizer.decode(ids[:last], clean_up_tokenization_spaces=False)
        alone = not whole.startswith(before)  # a character is cut in two
        text = tokenizer.decode(ids[first:last]) if alone else whole[len(before) :]
        pieces.append(TextPiece(text, trained[first]))
        before = whole
    return pieces


def page(found: InspectionAnswer) -> str:
    """Format the answer for people; words mark what is trained on."""
    lines = [
        *_told_files(found),
        _extent(found),
        f"{found.trained_share:.0%} of the tokens are trained on; packed rows of "
        f"{found.sequence_length} tokens are {1 - found.padding_share:.0%} full",
        f"{found.fitting_share:.1%} of the samples fit into a row "
        f"({found.sequence_length_because})",
        *_notes(found),
    ]
    for number, sample in enumerate(found.samples, start=1):
        lines += ["", f"sample {number}: {sample.title}"]
        for piece in sample.pieces:
            mark = "trained on" if piece.trained else "context"
            lines += [f"  {mark:<10} | {line}" for line in piece.text.splitlines()]
    return "\n".join(lines)


def _told_files(found: InspectionAnswer) -> list[str]:
    shown = [file.line for file in found.files[:SHOWN_FILES]]
    more = len(found.files) - SHOWN_FILES
    held = [f"held out: {file.line}" for file in found.held_out_files[:SHOWN_FILES]]
    return [*shown, *([f"and {more:,} files more"] if more > 0 else []), *held]


def _notes(found: InspectionAnswer) -> list[str]:
    """Say what is left out and what repeats, and in how much of the data that was looked for."""
    if found.read_share >= 1:
        return list(found.notes) or ["every key of every row is used, and no row repeats another"]
    looked = f"the first {found.read_share:.1%} of the data was looked at; --whole looks at all"
    return [*found.notes, looked]


def _extent(found: InspectionAnswer) -> str:
    if found.is_whole:
        return f"{found.sampled_documents:,} documents, {found.sampled_tokens:,} tokens"
    return (
        f"about {count_text(found.estimated_documents)} documents and "
        f"{count_text(found.estimated_tokens)} tokens, estimated from "
        f"{found.sampled_documents:,} ({found.sampled_share:.1%} of the data)"
    )
