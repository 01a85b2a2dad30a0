"""The answer of `fluxtrain export --json`: what was written, and how it was checked."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from fluxtrain.events.answers.answer import Answer


class ComparedLogits(msgspec.Struct, frozen=True, kw_only=True):
    """The exported model compared with base and adapter, on the same tokens. KL in nats."""

    source: str  # where the tokens are from
    rows: int
    tokens: int
    mean_kl: float
    kl_limit: float  # what rounding explains
    largest: float  # difference of a logit
    largest_limit: float
    top1: float  # share of tokens with the same most likely next one

    @property
    def line(self) -> str:
        """The numbers, in a line."""
        return (
            f"the same next token at {self.top1:.1%} of {self.tokens:,} tokens of {self.source}, "
            f"mean KL divergence {self.mean_kl:.1e} (rounding allows {self.kl_limit:.1e})"
        )


class ComparedLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Merged weights as they were written, compared with their sums with the adapter in fp32."""

    count: int
    worst: str  # the weight that is nearest to its limit
    difference: float  # of the two, relative to the sum
    limit: float  # what rounding explains
    kept: float  # of all that the adapter changes, in the merged weights; 1 is all

    @property
    def line(self) -> str:
        """The numbers, in a line."""
        return (
            f"{self.count} merged weights hold {self.kept:.1%} of what the adapter changes; "
            f"rounding to their dtype takes {self.difference:.2%} of a weight at most"
        )


class ExportAnswer(Answer, frozen=True, kw_only=True):
    """A folder that was written."""

    COMMAND: ClassVar[str] = "export"

    kind: Literal["adapter", "merged"]
    folder: str
    bytes: int
    files: int
    base: str  # name or folder of the base
    dtype: str  # of the written weights
    onto: str | None  # of merged weights: `dequantised (nf4-double)`, `original`
    changed: int  # weights of the base that the adapter changes
    layers: ComparedLayers | None  # None: not checked
    logits: ComparedLogits | None
    quantisation: ComparedLogits | None  # with `original`: compared with the base as it was trained
    seconds: float
    notes: tuple[str, ...]  # sentences
