"""A head on the host whose weight is uploaded whole, or in chunks of its vocabulary.

The loss needs the logits of a chunk of tokens over one vocabulary chunk at a time: a first pass
over the vocabulary collects the sums of the softmax, a second one computes slopes. So the device
holds two chunks of the weight, and of its gradient the fp32 sum of one and what is downloaded; in
exchange the weight is uploaded twice, its logits are computed twice, and the gradient of the hidden
states is added up in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fluxtrain.plan.facts import (
    FP32_BYTES,
    GroupFacts,
    Groups,
    Head,
    HeadFacts,
    ModelFacts,
    RowFacts,
)
from fluxtrain.plan.request import RunRequest
from fluxtrain.units import bytes_text

# Who computes a head's loss: one card; all, of which the first adds up the weight's gradient in the
# order of one card; or all, each with a sum of its own
HeadDealing = Literal["one_card", "in_order", "summed"]
CHUNKS_GAIN = 1.02  # vocabulary chunks have to be faster by so much: the prediction errs as far
VOCAB_CHUNK_BYTES = (
    64 << 20
)  # of weights: 1.3 ms on a bus of 50 GB/s, and wide enough for a GPU's matmul
LOGITS_CHUNK_BYTES = 256 << 20  # fp32 logits of one chunk of tokens
FUSED_LOGITS_BYTES = 512 << 20  # on a GPU: logits in the activations' dtype, their slope in place
MULTIPLE_ROWS = 128  # in a vocabulary chunk
_HEAD_AND_LOOKUP = 2  # that compute with a tied weight
_ON_DEVICE = 2  # one is computed with, the next one is copied


def vocab_chunk_rows(row_bytes: int, rows: int) -> int:
    """Return the rows of a vocabulary chunk, of a weight with `rows` rows of `row_bytes` each."""
    fitting = VOCAB_CHUNK_BYTES // row_bytes // MULTIPLE_ROWS * MULTIPLE_ROWS
    return min(rows, max(MULTIPLE_ROWS, fitting))


@dataclass(frozen=True, kw_only=True)
class HeadChunks:
    """The memory and time of a head whose weight is uploaded in vocabulary chunks."""

    head: HeadFacts
    group: GroupFacts

    @property
    def rows(self) -> int:
        """Count the rows of the weight in one chunk."""
        return vocab_chunk_rows(self.head.row_bytes, self.head.vocabulary)

    @property
    def chunk_bytes(self) -> int:
        """Count the bytes of one chunk's weights."""
        return self.rows * self.head.row_bytes

    @property
    def on_device_bytes(self) -> int:
        """Count the bytes of weights on the device at a time."""
        return min(_ON_DEVICE * self.chunk_bytes, self.head.vocabulary * self.head.row_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Count the bytes of one chunk's gradient in the weights' dtype."""
        return self.chunk_bytes if self.head.trained else 0

    @property
    def sum_bytes(self) -> int:
        """Count the bytes of one chunk's gradient sum in fp32."""
        return self.gradient_bytes // self.head.dtype_bytes * FP32_BYTES

    @property
    def copied_bytes(self) -> int:
        """Count the bytes uploaded for one batch in both passes, without chunks that are still on
        the device."""
        return 2 * self.head.vocabulary * self.head.row_bytes - self.on_device_bytes

    @property
    def compute_share(self) -> float:
        """Return how many times the operations of a whole head this takes: logits twice, plus two
        gradients, or one where the weight is frozen."""
        return 4 / 3 if self.head.trained else 3 / 2


def head_chunks(
    facts: ModelFacts, chosen: Head, on_host: Groups, *, by_rows: bool
) -> HeadChunks | None:
    """Return the memory and time of a head on the host that is uploaded in vocabulary chunks; None
    for any other. A tied head is uploaded so where the embedding is looked up by rows."""
    head = facts.head
    if chosen != "chunks" or head is None or not comes_apart(facts) or (head.tied and not by_rows):
        return None
    group = on_host.named(head.group)
    return None if group is None else HeadChunks(head=head, group=group)


def heads_for(facts: ModelFacts, request: RunRequest) -> tuple[Head, ...]:
    """Return the ways in which the head may be copied, the preferred one first."""
    if not comes_apart(facts):
        return ("whole",)
    if request.head != "auto":
        return (request.head,)
    return ("whole", "chunks")


def comes_apart(facts: ModelFacts) -> bool:
    """Return whether the model has a head that can be uploaded in vocabulary chunks."""
    head, table = facts.head, facts.table
    if head is None or not head.tied:
        return head is not None
    return table is not None and table.name == head.group and table.users == _HEAD_AND_LOOKUP


def reason(
    facts: ModelFacts, request: RunRequest, chosen: Head, *, on_host: bool, by_rows: bool
) -> str:
    """Explain with numbers how the head is copied, where no times are known."""
    head = facts.head
    if head is None:
        return "no head is known whose vocabulary comes in chunks"
    if not comes_apart(facts):
        return f"the weight of {head.group} is tied to more than one embedding"
    if not on_host:
        return f"{head.group} lives on the device with all its vocabulary"
    if head.tied and not by_rows:
        return f"{head.group} is tied and looked up whole: chunks need placement.embedding=rows"
    if request.head != "auto":
        return "as set"
    return _sizes(head, chosen)


def _sizes(head: HeadFacts, chosen: Head) -> str:
    size = bytes_text(head.vocabulary * head.row_bytes)
    rows = vocab_chunk_rows(head.row_bytes, head.vocabulary)
    part = bytes_text(rows * head.row_bytes)
    if chosen == "whole" and _ON_DEVICE * rows >= head.vocabulary:
        return f"its {size} are no more than the two vocabulary chunks that stay on the device"
    if chosen == "whole":
        return f"vocabulary chunks of {part} take less of the device than {size}, and more time"
    return (
        f"with all of {size} on the device nothing fits: two vocabulary chunks of {part} are there "
        "at a time"
    )


def token_chunks(row: RowFacts, batch_rows: int) -> int:
    """Return the number of chunks of tokens in which a GPU computes the loss of a whole head."""
    tokens = batch_rows * row.sequence_length
    return -(-tokens // max(1, FUSED_LOGITS_BYTES // max(1, row.vocabulary * row.dtype_bytes)))


def logits_bytes(
    row: RowFacts, batch_rows: int, vocabulary: int, product_bytes: int, *, has_gpu: bool
) -> int:
    """Return the bytes of the loss of one chunk of tokens (at least one) over part of the
    vocabulary: with a GPU its logits; else twice these in fp32, or one and a half times these and
    the product that becomes the weight's gradient."""
    token = vocabulary * (row.dtype_bytes if has_gpu else FP32_BYTES)
    limit = FUSED_LOGITS_BYTES if has_gpu else LOGITS_CHUNK_BYTES
    logits = max(token, min(limit, batch_rows * row.sequence_length * token))
    return logits if has_gpu else max(2 * logits, 3 * logits // 2 + product_bytes)
