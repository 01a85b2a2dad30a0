"""Packs documents that do not see each other into rows of a fixed length.

Documents no longer than a row stay whole; longer ones are cut into pieces of a row, and best fit
fills the rows (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). Position ids
restart at every piece. Decoder models of transformers take that restart as the border of a
document when there is neither an attention mask nor a key-value cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from fluxtrain.data.splitting import Spans
from fluxtrain.data.tokens import Tokens
from fluxtrain.errors import BadInput

IGNORED = -100  # the label that torch's cross entropy leaves out

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some rows, unpacked to arrays of shape (B, T), int64."""

    input_ids: Ints
    labels: Ints  # not shifted, as Hugging Face models take them; IGNORED where not trained
    position_ids: Ints  # restart at 0 with every piece; padding goes on counting
    document_ids: Ints  # 0, 1, ... within the row; -1 on padding

    @property
    def predicted(self) -> int:
        """Return how many tokens have a loss; the first token of a document never has one."""
        return int((self.labels != IGNORED).sum())

    @property
    def tokens(self) -> int:
        """Return how many tokens are not padding."""
        return int((self.document_ids >= 0).sum())


class PackedRows:
    """The rows of a split; a row is made on request, so only the tokens take memory.

    `pack=False` puts one piece in a row, for models in which packed documents would see each other.
    """

    def __init__(
        self, tokens: Tokens, spans: Spans, sequence_length: int, pad_id: int = 0, pack: bool = True
    ) -> None:
        if sequence_length < 2:
            raise BadInput(
                f"data.sequence_length is {sequence_length}: a row needs 2 tokens at least, "
                "one to see and one to predict"
            )
        self.sequence_length = sequence_length
        self.packed = pack
        self._tokens = tokens
        self._pad_id = pad_id
        starts, lengths = _pieces(spans, sequence_length)
        predicted = _predicted(tokens, starts, lengths)
        kept = predicted > 0  # every row has a token to train on
        starts, lengths = starts[kept], lengths[kept]
        row_of = _best_fit(lengths, sequence_length) if pack else np.arange(len(lengths))
        order = np.argsort(row_of, kind="stable")  # pieces of a row in file order
        self._starts, self._lengths = starts[order], lengths[order]
        rows = int(row_of.max()) + 1 if len(row_of) else 0
        self._first_piece = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(row_of, minlength=rows), out=self._first_piece[1:])
        self.pieces = len(self._starts)
        self.token_count = int(self._lengths.sum())
        self.predicted_count = int(predicted[kept].sum())

    def __len__(self) -> int:
        return len(self._first_piece) - 1

    @property
    def mixes(self) -> bool:
        """Return whether a row has more than one document."""
        return len(self) < self.pieces

    def fullest(self, count: int) -> Ints:
        """Return the numbers (count,) of the rows with the most documents; fewer if fewer exist."""
        return np.argsort(-np.diff(self._first_piece), kind="stable")[:count]

    def __getitem__(self, index: int) -> Rows:
        return self.take(np.asarray([index]))

    def take(self, indices: Ints) -> Rows:
        """Return the rows at `indices`, in that order. Raises IndexError beyond the last row."""
        shape = (len(indices), self.sequence_length)
        rows = Rows(
            np.full(shape, self._pad_id, dtype=np.int64),
            np.full(shape, IGNORED, dtype=np.int64),
            np.zeros(shape, dtype=np.int64),
            np.full(shape, -1, dtype=np.int64),
        )
        for place, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"row {index} of {len(self)}")
            self._fill(rows, place, int(index))
        return rows

    def fingerprint(self) -> str:
        """Hash every token and its place, to detect other data on resume."""
        digest = blake2b(digest_size=16)
        for array in (self._tokens.ids, self._starts, self._lengths, self._first_piece):
            digest.update(array.data.cast("B"))
        digest.update(f"{self.sequence_length} {self.packed}".encode())
        return digest.hexdigest()

    def token_counts(self, vocabulary: int) -> Ints:
        """Return how often each token is predicted: shape (vocabulary,)."""
        counts = np.zeros(vocabulary, dtype=np.int64)
        for index in range(len(self)):
            labels = self[index].labels
            counts += np.bincount(labels[labels != IGNORED], minlength=vocabulary)
        return counts

    def _fill(self, rows: Rows, place: int, index: int) -> None:
        at = 0
        pieces = range(int(self._first_piece[index]), int(self._first_piece[index + 1]))
        for document, piece in enumerate(pieces):
            start, length = int(self._starts[piece]), int(self._lengths[piece])
            here = slice(at, at + length)
            ids = self._tokens.ids[start : start + length]
            rows.input_ids[place, here] = ids
            rows.document_ids[place, here] = document
            rows.position_ids[place, at:] = np.arange(self.sequence_length - at)
            learnt = slice(at + 1, at + length)  # the first token follows nothing
            rows.labels[place, learnt] = ids[1:]
            if self._tokens.trained is not None:
                skipped = ~self._tokens.trained[start + 1 : start + length]
                rows.labels[place, learnt][skipped] = IGNORED
            at += length


def _pieces(spans: Spans, row_tokens: int) -> tuple[Ints, Ints]:
    """Cut spans longer than a row into pieces of a row and a rest."""
    counts = -(-spans.lengths // row_tokens)
    span_of = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    offsets = (np.arange(len(span_of)) - first[span_of]) * row_tokens
    return spans.starts[span_of] + offsets, np.minimum(row_tokens, spans.lengths[span_of] - offsets)


def _predicted(tokens: Tokens, starts: Ints, lengths: Ints) -> Ints:
    """Return how many tokens of each piece have a label: all but the first, or the marked ones."""
    if tokens.trained is None:
        return lengths - 1
    before = np.zeros(tokens.count + 1, dtype=np.int64)
    np.cumsum(tokens.trained, out=before[1:])
    marked: Ints = before[starts + lengths] - before[starts + 1]
    return marked


def _best_fit(lengths: Ints, row_tokens: int) -> Ints:
    """Return the row of each piece: longest first, each into the fullest row that has room.

    The rows with each amount of room form a stack, and the bits of `rooms` say which stacks are
    not empty, so finding the tightest room is one shift and one lowest set bit.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    stacks: list[list[int]] = [[] for _ in range(row_tokens + 1)]
    rooms = rows = 0
    for piece in np.argsort(-lengths, kind="stable"):
        length = int(lengths[piece])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = stacks[room].pop()
            if not stacks[room]:
                rooms ^= 1 << room
        else:
            room, row = row_tokens, rows
            rows += 1
        row_of[piece] = row
        left = room - length
        if left > 1:  # a piece of one token predicts nothing and was left out
            stacks[left].append(row)
            rooms |= 1 << left
    return row_of
