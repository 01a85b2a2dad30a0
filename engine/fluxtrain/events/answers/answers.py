"""The answers of `fluxtrain inspect | dry-run | verify-resume | evaluate | export --json`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import msgspec

from fluxtrain.events.events import SampleFit
from fluxtrain.units import bytes_text, duration_text


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The one JSON object that a command prints with `--json`."""

    COMMAND: ClassVar[str]  # as a user types it after `fluxtrain`


class TextPiece(msgspec.Struct, frozen=True):
    """A stretch of a sample's text; the loss is taken on all of it or on nothing of it."""

    text: str
    trained: bool


class InspectedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A document alone in its rows, shown as far as its first row."""

    tokens: int
    shown_tokens: int
    trained_tokens: int
    rows: int
    pieces: tuple[TextPiece, ...]

    @property
    def title(self) -> str:
        """Return how long the document is, and how much of it is trained on and shown."""
        count = f"{self.tokens:,} token{'s' * (self.tokens != 1)}"
        text = f"{count}, {self.trained_tokens:,} trained on"
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
        """Return the file, how it is read, and why."""
        times = "" if self.weight == 1 else f"; drawn {self.weight:g} times an epoch"
        return f"{self.name}: {self.title} ({self.shape}), because {self.because}{times}"


class InspectionAnswer(Answer, frozen=True, kw_only=True):
    """Describes the first documents of the data, with estimates for all.

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
    cut_samples: int  # of these: conversations of which only the beginning is trained on
    left_out_samples: int  # of these: nothing to learn is within a row
    samples_fit: SampleFit | None = None  # these counts, as plan and the run tell them
    max_positions: int | None  # of the model; None where its configuration does not say
    sampled_documents: int
    sampled_share: float
    sampled_tokens: int
    estimated_documents: int
    estimated_tokens: int
    estimated_rows: int
    trained_share: float  # of the tokens
    cut_documents_share: float  # of the documents: longer than a row
    cut_tokens_share: float  # of the tokens: in such documents
    padding_share: float  # of packed rows
    lengths: tuple[int, ...]  # tokens of each sampled document
    samples: tuple[InspectedSample, ...]

    @property
    def is_whole(self) -> bool:
        """Return whether the whole file was read, so that nothing is estimated."""
        return self.sampled_share >= 1


class PairsInspectionAnswer(Answer, frozen=True, kw_only=True):
    """The pairs of images of a run, as it will learn them."""

    COMMAND: ClassVar[str] = "inspect"

    path: str
    layout: str  # how the pairs are named there
    pairs: int  # trained
    held_out: int
    sizes: dict[str, int]  # pairs of each size, as in 1024x1024
    sequence_length: int  # tokens of the largest pair, with its prompt
    notes: tuple[str, ...]
    license: str  # of the model, as its folder says
    prompts: tuple[str, ...]  # of the pairs on the contact sheet
    contact_sheet: str  # a PNG file: reference and target of the first pairs

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return name and value of every fact."""
        sizes = ", ".join(f"{count:,} of {size}" for size, count in self.sizes.items())
        return (
            ("layout", self.layout),
            ("pairs", f"{self.pairs:,} to train on, {self.held_out:,} held out: {sizes}"),
            ("a row", f"{self.sequence_length:,} tokens in the largest pair, with its prompt"),
            ("license", self.license),
            ("sheet", self.contact_sheet),
        )


class SampleAnswer(Answer, frozen=True, kw_only=True):
    """An image that a run's model made."""

    COMMAND: ClassVar[str] = "sample"

    path: str  # of the PNG file
    width: int
    height: int
    seconds: float


class PeakBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A memory's peak; None is not known."""

    predicted: int | None
    measured: int | None
    limit: int | None

    @property
    def is_over_limit(self) -> bool:
        """Return whether the use exceeds the limit, as far as both are known."""
        return self.measured is not None and self.limit is not None and self.measured > self.limit


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: predicted, and the median of the steps after the first."""

    predicted: float | None
    measured: float


class RunSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """How long the whole run takes: the plan's word, and by the fastest and the slowest step."""

    predicted: float | None
    low: float
    high: float


class DryRunAnswer(Answer, frozen=True, kw_only=True):
    """A dry run's measurements, with the plan of the run itself."""

    COMMAND: ClassVar[str] = "dry-run"

    steps: int
    total_steps: int  # of the run
    loading_s: float | None  # from the first event to the first step
    steps_s: tuple[float, ...]
    losses: tuple[float, ...]
    step_s: StepSeconds
    eta_s: RunSeconds
    device_bytes: PeakBytes
    host_bytes: PeakBytes
    seconds: float  # of the dry run itself

    @property
    def is_over_limit(self) -> bool:
        """Return whether a measured peak exceeds its limit."""
        return self.device_bytes.is_over_limit or self.host_bytes.is_over_limit

    def rows(self) -> tuple[ComparedRow, ...]:
        """Return predicted and measured values in words: the memories and a step."""
        device, host, step = self.device_bytes, self.host_bytes, self.step_s
        return (
            _row("device memory", device.predicted, device.measured, bytes_text),
            _row("host memory", host.predicted, host.measured, bytes_text),
            _row("a step", step.predicted, step.measured, duration_text),
        )

    def eta_text(self) -> str:
        """Return how long the run takes at the speed of its steps."""
        low, high = duration_text(self.eta_s.low), duration_text(self.eta_s.high)
        steps = "1 step takes" if self.total_steps == 1 else f"{self.total_steps:,} steps take"
        return f"{steps} {low} to {high}"


class ComparedRow(msgspec.Struct, frozen=True):
    """A quantity as predicted and as measured, in words."""

    name: str
    predicted: str
    measured: str
    error: str  # of the prediction, "-5%": too little; "" when one is not known


def _row(
    name: str, predicted: float | None, measured: float | None, text: Callable[[Any], str]
) -> ComparedRow:
    error = "" if predicted is None or not measured else f"{predicted / measured - 1:+.0%}"
    return ComparedRow(name, text(predicted), text(measured), error)


class ResumeAnswer(Answer, frozen=True, kw_only=True):
    """Compares an uninterrupted run of `steps` steps with one resumed after `saved_step` in a new
    process."""

    COMMAND: ClassVar[str] = "verify-resume"

    steps: int
    saved_step: int
    tensors: int  # of weights, masters and moments that were compared
    values: int  # in them
    first_step: int | None = None  # whose loss, norm or rate differs
    first_tensor: str | None = None  # that differs after the last step
    difference: str | None = None  # in words
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Return whether the two were the same, bit for bit."""
        return self.difference is None


class EvaluationAnswer(Answer, frozen=True, kw_only=True):
    """The mean loss over all tokens of the data that are trained on."""

    COMMAND: ClassVar[str] = "evaluate"

    model: str
    base: str | None  # of an adapter
    data: str
    loss: float  # nats a token
    perplexity: float | None  # None: larger than a float holds
    tokens: int  # that the loss is a mean over
    rows: int
    sequence_length: int
    batch_rows: int
    dtype: str
    device: str
    placed: str  # where the weights are
    seconds: float  # of the evaluation, without loading
    notes: tuple[str, ...]  # sentences about the data


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one task."""

    task: str
    metric: str
    value: float
    error: float | None  # standard error of the value
    higher_is_better: bool
    rows: int


class TasksAnswer(Answer, frozen=True, kw_only=True):
    """The results of a model on tasks of lm-eval."""

    COMMAND: ClassVar[str] = "evaluate"

    model: str
    base: str | None  # of an adapter
    tasks: str  # their folder
    results: tuple[TaskResult, ...]
    batch_rows: int
    dtype: str
    device: str
    placed: str  # where the weights are
    seconds: float  # of the evaluation, without loading


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
    def agrees(self) -> bool:
        """Return whether rounding explains the whole difference; NaN does not agree."""
        return self.mean_kl <= self.kl_limit and self.largest <= self.largest_limit

    @property
    def line(self) -> str:
        """Return the numbers, in a line."""
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
        """Return the numbers, in a line."""
        return (
            f"{self.count} merged weights hold {self.kept:.1%} of what the adapter changes; "
            f"rounding to their dtype takes {self.difference:.2%} of a weight at most"
        )


class ExportAnswer(Answer, frozen=True, kw_only=True):
    """A folder that was written."""

    COMMAND: ClassVar[str] = "export"

    kind: Literal["adapter", "merged", "model", "gguf"]
    folder: str
    bytes: int
    files: int
    base: str  # name or folder of the base
    dtype: str  # of the written weights, as torch or GGUF names it
    onto: str | None  # of merged weights: `dequantised (nf4-double)`, `original`
    changed: int  # weights of the base that the adapter changes
    layers: ComparedLayers | None  # None: not checked
    logits: ComparedLogits | None
    quantisation: ComparedLogits | None  # with `original`: compared with the base as it was trained
    seconds: float
    notes: tuple[str, ...]  # sentences
