"""What one block of a model really took on a machine. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line `base + slope * count`: seconds or bytes over rows computed at once, or over
    chunks."""

    base: float
    slope: float

    def at(self, count: int) -> float:
        """Return the value for `count` rows or chunks; 0 for none."""
        return self.base + self.slope * count if count else 0.0

    def times(self, factor: float) -> Line:
        """Return the line multiplied by `factor`."""
        return Line(base=factor * self.base, slope=factor * self.slope)

    def plus(self, each: float) -> Line:
        """Return the line with `each` added to its base."""
        return Line(base=self.base + each, slope=self.slope)


def line_through(few: tuple[int, float], many: tuple[int, float]) -> Line:
    """Return the line through (rows, value) at two sizes, `many` the larger, with nothing below
    zero. Where noise makes the smaller size cost more a row than the larger, the larger decides
    alone: it was measured over more work."""
    (few_rows, few_value), (many_rows, many_value) = few, many
    if many_rows <= few_rows:
        return Line(base=0.0, slope=many_value / many_rows)
    slope = (many_value - few_value) / (many_rows - few_rows)
    slope = min(max(slope, 0.0), many_value / many_rows)
    return Line(base=many_value - slope * many_rows, slope=slope)


def line_of_chunks(rows: int, whole: float, chunks: int, cut: float) -> Line:
    """Return the line over the rows of one chunk, where `rows` took `whole` at once and `cut` in
    `chunks` chunks. The work is the same, so the difference is the cost of the further chunks."""
    base = (cut - whole) / (chunks - 1) if chunks > 1 else 0.0
    base = min(max(base, 0.0), whole)
    return Line(base=base, slope=(whole - base) / rows)


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """Extra seconds of a step whose groups are on the host and streamed: updates and copies of
    `copied_bytes`, on the same cores that compute."""

    longer_s: float
    updated_bytes: int  # that AdamW moved
    copied_bytes: int  # of weights and gradients
    groups: int

    def beside_bytes_s(self, update_bytes_per_s: float, copy_bytes_per_s: float) -> float:
        """Return the seconds of one group that its bytes do not explain: threads and
        bookkeeping."""
        known_s = self.updated_bytes / update_bytes_per_s + self.copied_bytes / copy_bytes_per_s
        return max(0.0, self.longer_s - known_s) / self.groups


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Seconds that a GPU's host needs to queue work, without its waits, in whole steps of one
    kind: with updates in backward, or with clipping.

    The lines are of one block, over its chunks. While AdamW runs, each chunk is queued about as
    fast as without it; work done once a block (waking up for its update, its copies) takes longer.
    """

    forward: Line
    backward: Line
    forward_beside: Line  # while AdamW runs
    backward_beside: Line  # while moments are updated, or blocks of a step in backward
    offload_forward_s: float  # what offloading the input of a block adds
    offload_backward_s: float
    outside_s: float  # of a batch: all but the blocks, both ways
    host_group_update_s: float  # `step()`, of a group on the host
    device_update_s: float  # the same of a group that lives on the device


@dataclass(frozen=True, kw_only=True)
class StepsNotTimed:
    """Why whole steps were not timed before a training."""

    why: str  # with numbers, as a part of a sentence
    lasts: bool = False  # with every model of this shape

    @property
    def text(self) -> str:
        """Return the reason in words, with its consequence for predicted times."""
        return (  # so much as four such cases were on an H200 (docs/planner.md)
            f"whole steps were not timed ({self.why}), so AdamW and the queueing of the GPU's "
            "work count as fast as each is alone, and a step that waits for the host may be "
            "predicted 25 to 40 % too short"
        )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured seconds of one block and of the modules outside the blocks, and bytes of
    activations. A block's lines are over the rows of one chunk, the others over those of a batch.
    """

    forward: Line  # one block
    backward: Line  # one block: recomputed, gradients of inputs and of weights
    outside_forward: Line  # embedding, masks, last norm, head and loss with its gradient
    outside_backward: Line  # gradients of head and embedding on their way to their sums
    activation_bytes: int  # of one block and row, at the peak of its backward pass
    edge_bytes: int = 0  # a row: of what stands behind the blocks, at its peak there, on a GPU
    kept_backward: Line | None = None  # one block that keeps its activations; None: not timed
    kept_bytes: int | None = None  # of one block and row, without its input
    host_block_s: float = 0.0  # the host queues one chunk of a block's forward and backward
    host_forward_s: float = 0.0  # of the forward alone
    host: HostTimes | None = None  # the same in whole steps, with a GPU
    steps_not_timed: StepsNotTimed | None = None  # why there are none, with a GPU
    device_update_s: float = 0.0  # for each parameter whose states live on a GPU
    streamed: Streamed | None = None  # without a GPU
    adamw_per_s: float | None = None  # parameters, at the size of this model; None: as probed
    adamw_8bit_per_s: float | None = None  # with 8-bit states, where the run has them
    adamw_weights_per_s: float | None = None  # the weights' pass alone, on a GPU's host
    adamw_moments_per_s: float | None = None  # the moments' pass alone, there
    adamw_beside_per_s: float | None = (
        None  # with the threads and copies of a step in backward, there
    )
    adamw_8bit_beside_per_s: float | None = None  # the same with 8-bit states
    runtime_bytes: int = 0  # what the process grew by when it first computed
    rows: tuple[int, int]  # of the two chunks
    measured_at_s: float  # Unix time
    measuring_s: float
    others_share: float | None = None  # of all processors, used by other programs meanwhile


def chunked(line: Line, batch_rows: int, chunk_rows: int) -> float:
    """Return the value of `line` over a batch in chunks, of which the last may be smaller."""
    whole, left = divmod(batch_rows, max(1, min(chunk_rows, batch_rows)))
    return whole * line.at(min(chunk_rows, batch_rows)) + line.at(left)


def timed_rows(sequence_length: int, batch_rows: int | None, chunk_tokens: int) -> tuple[int, int]:
    """Return the rows of the two chunks to time: a quarter of a run's chunk, and about the
    whole."""
    many = 1 << (max(1, chunk_tokens // sequence_length).bit_length() - 1)
    if batch_rows is not None:
        many = min(many, batch_rows)
    many = max(2, many)
    return max(1, many // 4), many


def median(values: Sequence[float]) -> float:
    """Return the median; of an even number the lower one, which other programs disturbed less."""
    return sorted(values)[(len(values) - 1) // 2]
