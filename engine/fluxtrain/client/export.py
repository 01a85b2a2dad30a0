"""The answer of `fluxtrain export --json`: what was written, and how it was checked."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from fluxtrain.client.answer import Answer


class ComparedLogits(msgspec.Struct, frozen=True, kw_only=True):
    """The exported model beside base and adapter, on the same tokens. KL in nats."""

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
            f"on {self.tokens:,} tokens of {self.source}: mean KL {self.mean_kl:.2e} (limit "
            f"{self.kl_limit:.2e}), largest difference of a logit {self.largest:.3g} (limit "
            f"{self.largest_limit:.3g}), same most likely token at {self.top1:.1%}"
        )


class ComparedLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Merged weights beside their layers with the adapter, on random inputs."""

    count: int
    worst: str  # the weight that is nearest to its limit
    difference: float  # of its outputs, relative to them
    limit: float  # what rounding explains
    kept: float  # of all that the adapter changes, in the merged weights; 1 is all

    @property
    def line(self) -> str:
        """The numbers, in a line."""
        return (
            f"{self.count} merged weights: outputs differ by {self.difference:.2e} of themselves "
            f"at most (limit {self.limit:.2e}, {self.worst}), and hold {self.kept:.1%} of what the "
            "adapter changes"
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
    quantisation: ComparedLogits | None  # with `original`: beside the base as it was trained
    seconds: float
    notes: tuple[str, ...]  # sentences
