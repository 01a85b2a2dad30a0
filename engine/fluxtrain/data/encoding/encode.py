"""Encodes rows of every kind to samples, a batch at a time, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from fluxtrain.data.encoding.conversations import ConversationEncoder, PlainEncoder
from fluxtrain.data.encoding.notes import Notes
from fluxtrain.data.encoding.samples import Sample
from fluxtrain.data.encoding.texts import TextEncoder
from fluxtrain.data.encoding.tokenizer import Tokenizer, TokenKinds
from fluxtrain.data.rendering.chat_template import ChatTemplate
from fluxtrain.data.row import Row
from fluxtrain.errors import BadInput

BATCH_CHARACTERS = 1 << 20  # texts handed to the tokenizer at once: its threads share them
BATCH_ROWS = 1 << 14


class Encoder:
    """Encodes rows, and notes what the user should know."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limit: int = 0,
        notes: Notes | None = None,
        bad: Callable[[], int] = lambda: 0,
    ) -> None:
        """Prepare encoding.

        `limit` is how many rows may be refused before the run is, with the `bad` ones that the
        reading left out; `notes` are of rows that were encoded before.
        """
        self._tokenizer = tokenizer
        self._limit = limit
        self._bad = bad
        self.notes = notes or Notes()
        self._texts = TextEncoder(tokenizer, TokenKinds(tokenizer))
        self._conversations: ConversationEncoder | None = None

    def batches(self, rows: Iterable[Row]) -> Iterator[list[tuple[Sample, int]]]:
        """Encode rows in their order; yield the samples of a batch, each with its row's number.

        Raises BadInput when more rows than the limit give no sample, with the first ones' reasons.
        """
        for batch in _batches(rows):
            numbered = {id(row): self.notes.rows + at for at, row in enumerate(batch)}
            samples = [
                (sample, numbered[id(sample.row)])
                for _, alike in groupby(batch, key=lambda row: (bool(row.messages), row.plain))
                for sample in self._encode(list(alike))
                if len(sample.ids)
            ]
            self.notes.rows += len(batch)
            self._refuse_too_many()
            yield samples

    def samples(self, rows: Iterable[Row]) -> Iterator[tuple[Sample, int]]:
        """Encode rows, and yield their samples with the numbers of their rows.

        Raises BadInput as `batches` does, and when no sample comes out.
        """
        found = False
        for batch in self.batches(rows):
            found |= bool(batch)
            yield from batch
        if not found:
            raise self.nothing()

    def nothing(self) -> BadInput:
        """Return the error for data without anything to train on."""
        if not self.notes.rows:
            return BadInput("the data has no documents")
        if self.notes.refused:
            return BadInput(
                f"nothing of the data can be trained on: none of its {self.notes.rows:,} rows "
                f"gives a sample; {'; '.join(self.notes.refused_rows()[:3])}"
            )
        return BadInput("the tokenizer made no tokens of the data: every document is empty to it")

    def _encode(self, rows: list[Row]) -> Iterable[Sample]:
        first = rows[0]
        if not first.messages:
            return self._texts.encode(rows, self.notes)
        if first.plain and not self._tokenizer.chat_template:
            kinds = TokenKinds(self._tokenizer)
            return PlainEncoder(kinds, self._texts).encode(rows, self.notes)
        if self._conversations is None:
            template = ChatTemplate(self._tokenizer)
            kinds = TokenKinds(self._tokenizer, template)
            self._conversations = ConversationEncoder(self._tokenizer, kinds, template)
        return self._conversations.encode(rows, self.notes)

    def _refuse_too_many(self) -> None:
        notes = self.notes
        bad = notes.refused + self._bad()
        if not notes.refused or bad <= self._limit:
            return
        told = notes.refused_rows()
        if bad == 1:
            raise BadInput(f"{told[0]} (data.max_bad_rows is 0)")
        raise BadInput(
            f"{bad:,} of the first {notes.rows:,} rows cannot be trained on, and data.max_bad_rows "
            f"is {self._limit}: {'; '.join(told)}: repair them, or raise data.max_bad_rows to "
            "leave such rows out"
        )


def check_vocabulary(largest: int, embedding_rows: int) -> None:
    """Raise BadInput when a token has no row in the model's embedding."""
    if largest >= embedding_rows:
        raise BadInput(
            f"the tokenizer makes token {largest} and the model's embedding has {embedding_rows} "
            "rows: this tokenizer belongs to another model, or the embedding was not resized"
        )


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += row.characters
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_ROWS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
