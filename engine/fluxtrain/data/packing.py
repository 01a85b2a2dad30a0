"""Packs samples that do not see each other into rows of a fixed length.

Samples no longer than a row stay whole, and best fit fills the rows (Ding et al. 2024, "Fewer
Truncations Improve Language Modeling"). A longer text is cut into pieces of a row. Of a longer
conversation its beginning is kept, so that no answer is trained on without its question; where
nothing to train on is in it, the conversation is left out. Position ids restart at every piece.
Decoder models of transformers take that restart as the border of a document when there is neither
an attention mask nor a key-value cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from fluxtrain.data.splitting import Spans
from fluxtrain.data.store.tokens import TokenSource, trained_in
from fluxtrain.errors import BadInput

IGNORED = -100  # the label that torch's cross entropy leaves out
PACKED_AT_ONCE = 1 << 20  # pieces that are packed together: some 200 MB meanwhile
SHORTEST, LONGEST_TEXT, LONGEST_TALK = 64, 2048, 4096  # of rows, where nobody says
WANTED_SHARE = 0.99  # of the samples fit
LEAST_ROWS = 16  # of texts, so that a step does not see all of them
PADDED_TO = 32  # the length of rows that are not packed is a multiple of this

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How many samples are longer than a row, and how they are cut."""

    row_tokens: int
    samples: int
    longer: int = 0  # than a row
    cut: int = 0  # conversations of which the beginning is trained on
    divided: int = 0  # texts in several rows
    left_out: int = 0  # samples with nothing to train on in their row
    lost: int = 0  # tokens to train on that are in no row
    first_left_out: str = ""  # place of its row in the data

    @property
    def share(self) -> float:
        """Return the share of the samples that fit into a row."""
        return 1 - self.longer / self.samples if self.samples else 1.0

    def sentences(self) -> list[str]:
        """Return the notes for a person, a sentence each; none where everything fits."""
        told = []
        if self.cut:
            told.append(
                f"{_samples(self.cut)} of {self.samples:,} longer than a row of {self.row_tokens} "
                f"tokens {_are(self.cut)} cut: what is behind is not trained on"
            )
        if self.left_out:
            told.append(
                f"{_samples(self.left_out)} of {self.samples:,} {_are(self.left_out)} left out: "
                f"nothing to train on is within their first {self.row_tokens} tokens (first: "
                f"{self.first_left_out}); raise data.sequence_length to keep them"
            )
        if self.divided:
            told.append(
                f"{self.divided:,} of {self.samples:,} texts are longer than a row of "
                f"{self.row_tokens} tokens and are cut into several"
            )
        return told


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Packing:
    """Which pieces of a data set's tokens make which row; 24 bytes a piece."""

    starts: Ints  # (P,) of each piece, those of a row next to each other
    lengths: Ints  # (P,)
    first_piece: Ints  # (R + 1,): row r has the pieces first_piece[r] to before first_piece[r + 1]
    predicted_count: int  # tokens with a label
    fit: Fit

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.first_piece) - 1


def pack_rows(tokens: TokenSource, spans: Spans, row_tokens: int, pack: bool = True) -> Packing:
    """Cut spans to pieces and fill rows with them; `pack=False` puts one piece in a row."""
    if row_tokens < 2:
        raise BadInput(
            f"data.sequence_length is {row_tokens}: a row needs 2 tokens at least, "
            "one to see and one to predict"
        )
    starts, lengths = _pieces(tokens, spans, row_tokens)
    predicted = trained_in(tokens, starts, lengths)
    fit = _fit_of(tokens, spans, starts, predicted, row_tokens)
    kept = predicted > 0  # every row has a token to train on
    starts, lengths = starts[kept], lengths[kept]
    row_of = _best_fit_in_parts(lengths, row_tokens) if pack else np.arange(len(lengths))
    order = np.argsort(row_of, kind="stable")  # pieces of a row in file order
    rows = int(row_of.max()) + 1 if len(row_of) else 0
    first_piece = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=rows), out=first_piece[1:])
    return Packing(
        starts=starts[order],
        lengths=lengths[order],
        first_piece=first_piece,
        predicted_count=int(predicted[kept].sum()),
        fit=fit,
    )


class PackedRows:
    """The rows of a split; a row is made on request, so only the tokens take memory.

    `pack=False` puts one piece in a row, for models in which packed documents would see each other.
    """

    def __init__(
        self,
        tokens: TokenSource,
        spans: Spans,
        sequence_length: int,
        pad_id: int = 0,
        pack: bool = True,
    ) -> None:
        self.sequence_length = sequence_length
        self.packed = pack
        self._tokens = tokens
        self._pad_id = pad_id
        self._packing = pack_rows(tokens, spans, sequence_length, pack)
        self.fit = self._packing.fit
        self.pieces = len(self._packing.starts)
        self.token_count = int(self._packing.lengths.sum())
        self.predicted_count = self._packing.predicted_count

    def __len__(self) -> int:
        return self._packing.rows

    @property
    def mixes(self) -> bool:
        """Return whether a row has more than one document."""
        return len(self) < self.pieces

    def fullest(self, count: int) -> Ints:
        """Return the numbers (count,) of the rows with the most documents; fewer if fewer exist."""
        return np.argsort(-np.diff(self._packing.first_piece), kind="stable")[:count]

    def row_lengths(self, indices: Ints) -> Ints:
        """Return how many tokens the rows at `indices` have without padding, where one piece makes
        a row."""
        return np.asarray(self._packing.lengths[self._packing.first_piece[indices]])

    def __getitem__(self, index: int) -> Rows:
        return self.take(np.asarray([index]))

    def take(self, indices: Ints, trim: bool = False) -> Rows:
        """Return the rows at `indices`, in that order. Raises IndexError beyond the last row.

        `trim` leaves out padding that all of them have, for rows that are not packed.
        """
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"row {index} of {len(self)}")
        length = self.sequence_length
        if trim and not self.packed and len(indices):
            longest = int(self.row_lengths(indices).max())
            length = min(length, -(-longest // PADDED_TO) * PADDED_TO)
        shape = (len(indices), length)
        rows = Rows(
            np.full(shape, self._pad_id, dtype=np.int64),
            np.full(shape, IGNORED, dtype=np.int64),
            np.zeros(shape, dtype=np.int64),
            np.full(shape, -1, dtype=np.int64),
        )
        for place, index in enumerate(indices):
            self._fill(rows, place, int(index))
        return rows

    def fingerprint(self) -> str:
        """Hash every token and its place, to detect other data on resume."""
        digest = blake2b(self._tokens.digest().encode(), digest_size=16)
        for array in (self._packing.starts, self._packing.lengths, self._packing.first_piece):
            digest.update(np.ascontiguousarray(array).data.cast("B"))
        digest.update(f"{self.sequence_length} {self.packed}".encode())
        return digest.hexdigest()

    def _fill(self, rows: Rows, place: int, index: int) -> None:
        packing, row_tokens = self._packing, rows.input_ids.shape[1]
        at = 0
        pieces = range(int(packing.first_piece[index]), int(packing.first_piece[index + 1]))
        for document, piece in enumerate(pieces):
            start, length = int(packing.starts[piece]), int(packing.lengths[piece])
            here = slice(at, at + length)
            ids = self._tokens.ids_at(start, length)
            rows.input_ids[place, here] = ids
            rows.document_ids[place, here] = document
            rows.position_ids[place, at:] = np.arange(row_tokens - at)
            trained = slice(at + 1, at + length)  # the first token follows nothing
            rows.labels[place, trained] = ids[1:]
            if self._tokens.has_marks:
                skipped = ~self._tokens.marks_at(start + 1, length - 1)
                rows.labels[place, trained][skipped] = IGNORED
            at += length


def _pieces(tokens: TokenSource, spans: Spans, row_tokens: int) -> tuple[Ints, Ints]:
    """Cut longer texts into pieces of a row and a rest; cut longer conversations to one row."""
    counts = -(-spans.lengths // row_tokens)
    if tokens.has_marks:
        longer = np.flatnonzero(counts > 1)
        trained = trained_in(tokens, spans.starts[longer], spans.lengths[longer])
        counts[longer[trained < spans.lengths[longer] - 1]] = 1
    span_of = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    offsets = (np.arange(len(span_of)) - first[span_of]) * row_tokens
    return spans.starts[span_of] + offsets, np.minimum(row_tokens, spans.lengths[span_of] - offsets)


def _best_fit_in_parts(lengths: Ints, row_tokens: int) -> Ints:
    """Return the row of each piece; only pieces of the same part of the data share rows."""
    parts: list[Ints] = []
    rows = 0
    for first in range(0, len(lengths), PACKED_AT_ONCE):
        part = _best_fit(lengths[first : first + PACKED_AT_ONCE], row_tokens) + rows
        rows = int(part.max()) + 1
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


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


def _fit_of(
    tokens: TokenSource, spans: Spans, starts: Ints, predicted: Ints, row_tokens: int
) -> Fit:
    """Compare spans with their pieces: where these start, how many tokens of each are trained."""
    longer = spans.lengths > row_tokens
    pieces = np.searchsorted(starts, spans.starts + spans.lengths) - np.searchsorted(
        starts, spans.starts
    )
    sums = np.concatenate([[0], np.cumsum(predicted)])
    firsts = np.searchsorted(starts, spans.starts)
    trained = sums[firsts + pieces] - sums[firsts]
    left_out = (trained == 0) & (spans.lengths > 1)
    cut = longer & (pieces == 1) & ~left_out
    dropped = np.flatnonzero(cut | left_out)
    lost = trained_in(tokens, spans.starts[dropped], spans.lengths[dropped]) - trained[dropped]
    first = np.flatnonzero(left_out)[:1]
    return Fit(
        row_tokens=row_tokens,
        samples=len(spans.lengths),
        longer=int(longer.sum()),
        cut=int(cut.sum()),
        divided=int((pieces > 1).sum()),
        left_out=int(left_out.sum()),
        lost=int(lost.sum()),
        first_left_out=_origin(tokens, int(spans.starts[first[0]])) if len(first) else "",
    )


def _origin(tokens: TokenSource, place: int) -> str:
    return tokens.origin(int(np.searchsorted(tokens.starts, place, side="right")) - 1)


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count:,} samples"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


@dataclass(frozen=True, slots=True)
class RowLength:
    """A length of rows, with the reason."""

    tokens: int
    because: str


def choose_row_length(
    lengths: Ints, *, talks: bool, positions: int | None, share: float = 1.0
) -> RowLength:
    """Choose the shortest power of two that `WANTED_SHARE` of the samples fit into.

    `lengths` are the tokens of the first samples, a `share` of all; `positions` those that the
    model knows. Conversations (`talks`) get longer rows than texts, as they cannot be divided; few
    texts get shorter ones, as they can.
    """
    limit = LONGEST_TALK if talks else LONGEST_TEXT
    most = limit if positions is None else min(limit, positions)
    wanted = int(np.quantile(lengths, WANTED_SHARE, method="higher"))
    tokens = min(most, max(SHORTEST, 1 << max(0, wanted - 1).bit_length()))
    total = float(lengths.sum()) / share
    few = False
    while not talks and tokens > SHORTEST and total < LEAST_ROWS * tokens:
        tokens, few = tokens // 2, True
    tokens = max(2, min(tokens, int(lengths.sum())))
    fit = float((lengths <= tokens).mean())
    seen = " that were looked at" if share < 1 else ""
    longest = int(lengths.max())
    why = f"{fit:.1%} of {len(lengths):,} samples{seen} fit, the longest has {longest:,} tokens"
    if fit == 1.0:
        why += ", so none is cut or left out"
    if few:
        why += f"; longer rows would be fewer than {LEAST_ROWS}"
    elif tokens == positions and fit < WANTED_SHARE:
        why += f"; the model knows {positions:,} positions"
    elif fit < WANTED_SHARE:
        why += f"; longer rows than {limit:,} must be asked for"
    return RowLength(tokens, why)
