"""The answer of `fluxtrain inspect --json`: the data as the model will see it."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from fluxtrain.events.answers.answer import Answer
from fluxtrain.events.events import SampleFit


class TextPiece(msgspec.Struct, frozen=True):
    """A stretch of a sample's text; the loss is taken on all of it or on nothing of it."""

    text: str
    learnt: bool


class InspectedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A document alone in its rows, shown as far as its first row."""

    tokens: int
    shown_tokens: int
    learnt_tokens: int
    rows: int
    pieces: tuple[TextPiece, ...]

    @property
    def title(self) -> str:
        """How long the document is, and how much of it is learnt and shown."""
        text = f"{self.tokens:,} token{'s' * (self.tokens != 1)}, {self.learnt_tokens:,} learnt"
        part = self.shown_tokens < self.tokens
        return text + (f", the first {self.shown_tokens:,} shown" if part else "")


class InspectedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A data file, and how its rows are read."""

    name: str
    container: str
    shape: str
    title: str  # of the shape, in words
    because: str  # why it is read so
    size_bytes: int
    weight: float  # how often an epoch draws each row

    @property
    def line(self) -> str:
        """The file, what it is read as, and why."""
        times = "" if self.weight == 1 else f"; drawn {self.weight:g} times an epoch"
        return f"{self.name}: {self.title} ({self.shape}), because {self.because}{times}"


class InspectionAnswer(Answer, frozen=True, kw_only=True):
    """Tells what the first documents of the data hold, and estimates for all of them.

    Shares are between 0 and 1. `sampled_share` is the part of the file's bytes that was read.
    """

    COMMAND: ClassVar[str] = "inspect"

    path: str
    format: str
    because: str  # why it is read in this format
    files: tuple[InspectedFile, ...]
    held_out_files: tuple[InspectedFile, ...]  # data of its own for evaluation; else empty
    notes: tuple[str, ...]  # sentences: keys and rows that are left out, rows that repeat others
    read_share: float  # of the bytes: `notes` are about them
    sequence_length: int  # tokens of a row
    sequence_length_because: str
    fitting_share: float  # of the sampled samples: no longer than a row
    cut_samples: int  # of these: conversations of which only the beginning is learnt
    left_out_samples: int  # of these: nothing to learn is within a row
    samples_fit: SampleFit | None = None  # these counts, as plan and the run tell them
    max_positions: int | None  # of the model; None where its configuration does not say
    sampled_documents: int
    sampled_share: float
    sampled_tokens: int
    estimated_documents: int
    estimated_tokens: int
    estimated_rows: int
    learnt_share: float  # of the tokens
    cut_documents_share: float  # of the documents: longer than a row
    cut_tokens_share: float  # of the tokens: in such documents
    padding_share: float  # of packed rows
    lengths: tuple[int, ...]  # tokens of each sampled document
    samples: tuple[InspectedSample, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the whole file was read, so that nothing is estimated."""
        return self.sampled_share >= 1
