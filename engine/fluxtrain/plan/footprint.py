"""How many bytes a layout of a model takes on the device and on the host. Pure arithmetic.

Where the bytes of each `offload` live:

| offload   | weights             | gradients, optimizer | boundary activations |
|-----------|---------------------|----------------------|----------------------|
| none      | device              | device               | device               |
| optimizer | device, copy at home| host                 | device               |
| weights   | host, through slots | host                 | device               |
| max       | host, through slots | host                 | host                 |

The parts outside the blocks (embedding, head, last norm) have their weights on the device in every
layout. Without a GPU the "device" is a buffer in host memory, so its bytes count as the host's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Offload = Literal["none", "optimizer", "weights", "max"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "weights", "max")  # least offload first

SLOTS: dict[Offload, int] = {"none": 0, "optimizer": 0, "weights": 3, "max": 2}
STAGING_BUFFERS = 4  # rounded gradients on their way home
BOUNDARIES_IN_FLIGHT = 2  # on the device when the boundaries themselves are on the host
LOGITS_CHUNK_BYTES = 256 << 20  # fp32 logits of one chunk of tokens
LOGITS_COPIES = 3  # the logits, their gradient, and both once more in the weights' dtype
FP32_BYTES = 4

# Optimizer state beside the weight itself, bytes a trained parameter: bf16 keeps the lower half of
# an fp32 master, m and v (2 + 4 + 4); fp32 is its own master (4 + 4). The gradient comes on top.
STATE_BYTES = {2: 10, 4: 8}

# Tensors of (tokens, hidden) that one decoder block keeps for its backward pass, with what the
# backward adds: an estimate for a gated MLP of 3.5 times the hidden size, until it is measured.
ACTIVATION_TENSORS = 24


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of a model and of one row (sequence) of its data."""

    block_bytes: tuple[int, ...]  # weights of each block, in forward order
    edge_bytes: int  # weights outside the blocks
    trained_parameters: int
    dtype_bytes: int  # 2 (bf16) or 4 (fp32)
    activation_row_bytes: int  # of one block for one row, recomputed in the backward pass
    hidden: int
    vocabulary: int
    sequence_length: int

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.block_bytes)

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(self.block_bytes) + self.edge_bytes

    @property
    def boundary_row_bytes(self) -> int:
        """One row between two blocks: (sequence_length, hidden)."""
        return self.sequence_length * self.hidden * self.dtype_bytes

    @property
    def host_arena_bytes(self) -> int:
        """Weights at home with states and gradients: 14 bytes a trained bf16 parameter, 16 fp32."""
        return self.weight_bytes + self.trained_parameters * self.update_bytes

    @property
    def update_bytes(self) -> int:
        """States and gradient of one trained parameter."""
        return STATE_BYTES[self.dtype_bytes] + self.dtype_bytes

    def largest_trained(self, group_bytes: int) -> int:
        """At most so many trained parameters are in a group of `group_bytes`."""
        return min(group_bytes // self.dtype_bytes, self.trained_parameters)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run the model."""

    offload: Offload
    resident_blocks: int  # the first ones; only `weights` and `max` stream the others
    batch_rows: int
    chunk_rows: int

    def slots(self, layers: int) -> int:
        """Device slots that the streamed blocks share."""
        return min(SLOTS[self.offload], layers - self.resident_blocks)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Predicted peaks."""

    device_bytes: int
    host_bytes: int


def activation_row_estimate(hidden: int, sequence_length: int, dtype_bytes: int) -> int:
    """`activation_row_bytes` of a decoder block that nobody has measured yet."""
    return ACTIVATION_TENSORS * sequence_length * hidden * dtype_bytes


def footprint(facts: ModelFacts, layout: Layout, *, has_gpu: bool) -> Footprint:
    """Peaks of `layout`. Without a GPU the host's include the device's."""
    device = (
        _weights(facts, layout) + _gradients_and_states(facts, layout) + _activations(facts, layout)
    )
    host = 0 if layout.offload == "none" else facts.host_arena_bytes
    if layout.offload == "max":
        host += _boundaries(facts, layout)
    return Footprint(device_bytes=device, host_bytes=host if has_gpu else host + device)


def _weights(facts: ModelFacts, layout: Layout) -> int:
    if layout.offload in ("none", "optimizer"):
        return facts.weight_bytes
    resident = facts.block_bytes[: layout.resident_blocks]
    streamed = facts.block_bytes[layout.resident_blocks :]
    slots = layout.slots(facts.layers) * max(streamed, default=0)
    return sum(resident) + slots + facts.edge_bytes


def _gradients_and_states(facts: ModelFacts, layout: Layout) -> int:
    block = facts.largest_trained(max(facts.block_bytes, default=0))
    edge = facts.largest_trained(facts.edge_bytes)
    sums = FP32_BYTES * (block + edge)
    if layout.offload == "none":
        return sums + facts.trained_parameters * facts.update_bytes
    return sums + STAGING_BUFFERS * facts.dtype_bytes * max(block, edge)


def _activations(facts: ModelFacts, layout: Layout) -> int:
    rows = BOUNDARIES_IN_FLIGHT if layout.offload == "max" else facts.layers + 1
    boundaries = rows * layout.batch_rows * facts.boundary_row_bytes
    all_logits = layout.batch_rows * facts.sequence_length * facts.vocabulary * FP32_BYTES
    head = LOGITS_COPIES * min(LOGITS_CHUNK_BYTES, all_logits)
    return boundaries + layout.chunk_rows * facts.activation_row_bytes + head


def _boundaries(facts: ModelFacts, layout: Layout) -> int:
    return (facts.layers + 1) * layout.batch_rows * facts.boundary_row_bytes
