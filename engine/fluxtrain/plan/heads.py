"""A head on the host whose weight is copied to the device whole, or in slices of its words.

The logits of a chunk of tokens over one slice are all that the loss needs at a time: a first pass
over the slices collects the sums of the softmax, a second one computes slopes. So the device holds
two slices of the weight, and of its gradient the fp32 sum of one and what is on its way home; in
exchange the weight crosses the bus twice, its logits are computed twice, and the gradient of the
hidden states is added up in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

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

SLICES_GAIN = 1.02  # a head in slices has to be faster by so much: the prediction errs as far
SLICE_BYTES = 64 << 20  # of weights: 1.3 ms on a bus of 50 GB/s, and wide enough for a GPU's matmul
LOGITS_CHUNK_BYTES = 256 << 20  # fp32 logits of one chunk of tokens
FUSED_LOGITS_BYTES = 512 << 20  # on a GPU: logits in the activations' dtype, their slope in place
MULTIPLE_WORDS = 128  # in a slice
_HEAD_AND_LOOKUP = 2  # that compute with a tied weight
_ON_DEVICE = 2  # one is computed with, the next one is copied


def slice_words(word_bytes: int, words: int) -> int:
    """Words of a slice, of a head of so many whose weights take so much each."""
    fitting = SLICE_BYTES // word_bytes // MULTIPLE_WORDS * MULTIPLE_WORDS
    return min(words, max(MULTIPLE_WORDS, fitting))


@dataclass(frozen=True, kw_only=True)
class HeadSlices:
    """What a head takes that comes in slices."""

    head: HeadFacts
    group: GroupFacts

    @property
    def words(self) -> int:
        """Of a slice."""
        return slice_words(self.head.word_bytes, self.head.words)

    @property
    def slice_bytes(self) -> int:
        """Weights of one."""
        return self.words * self.head.word_bytes

    @property
    def on_device_bytes(self) -> int:
        """Weights that are on the device at a time."""
        return min(_ON_DEVICE * self.slice_bytes, self.head.words * self.head.word_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Of one slice in the weights' dtype."""
        return self.slice_bytes if self.head.trained else 0

    @property
    def sum_bytes(self) -> int:
        """Of one slice's gradient in fp32."""
        return self.gradient_bytes // self.head.dtype_bytes * FP32_BYTES

    @property
    def copied_bytes(self) -> int:
        """Weights that go up for one batch: in both passes, but for those that are there still."""
        return 2 * self.head.words * self.head.word_bytes - self.on_device_bytes

    @property
    def compute_share(self) -> float:
        """How many times the operations of a whole head: logits twice beside two gradients, or one
        where the weight is frozen."""
        return 4 / 3 if self.head.trained else 3 / 2


def head_slices(
    facts: ModelFacts, chosen: Head, at_home: Groups, *, by_rows: bool
) -> HeadSlices | None:
    """What the head takes where it is on the host and comes in slices; a tied one does where the
    embedding is looked up by rows."""
    head = facts.head
    if chosen != "chunks" or head is None or not comes_apart(facts) or (head.tied and not by_rows):
        return None
    group = at_home.named(head.group)
    return None if group is None else HeadSlices(head=head, group=group)


def heads_for(facts: ModelFacts, request: RunRequest) -> tuple[Head, ...]:
    """How the head may be copied, what is preferred first."""
    if not comes_apart(facts):
        return ("whole",)
    if request.head != "auto":
        return (request.head,)
    return ("whole", "chunks")


def comes_apart(facts: ModelFacts) -> bool:
    """Is there a head that can come in slices?"""
    head, table = facts.head, facts.table
    if head is None or not head.tied:
        return head is not None
    return table is not None and table.name == head.group and table.users == _HEAD_AND_LOOKUP


def reason(
    facts: ModelFacts, request: RunRequest, chosen: Head, *, at_home: bool, by_rows: bool
) -> str:
    """Why, with numbers, where no time is known."""
    head = facts.head
    if head is None:
        return "no head is known whose vocabulary comes in chunks"
    if not comes_apart(facts):
        return f"the weight of {head.group} is tied to more than one embedding"
    if not at_home:
        return f"{head.group} lives on the device with all its vocabulary"
    if head.tied and not by_rows:
        return f"{head.group} is tied and looked up whole: chunks need placement.embedding=rows"
    if request.head != "auto":
        return "as set"
    return _sizes(head, chosen)


def _sizes(head: HeadFacts, chosen: Head) -> str:
    size = bytes_text(head.words * head.word_bytes)
    words = slice_words(head.word_bytes, head.words)
    part = bytes_text(words * head.word_bytes)
    if chosen == "whole" and _ON_DEVICE * words >= head.words:
        return f"two vocabulary chunks of {part}, there at a time, would hold all of its {size}"
    if chosen == "whole":
        return f"vocabulary chunks of {part} take less of the device than {size}, and more time"
    return (
        f"with all of {size} on the device nothing fits: two vocabulary chunks of {part} are there "
        "at a time"
    )


def logits_bytes(
    row: RowFacts, batch_rows: int, words: int, product_bytes: int, *, has_gpu: bool
) -> int:
    """What a chunk of tokens (at least one) takes for the loss over so many words: with a GPU its
    logits, else those twice in fp32, or once and a half beside the product that becomes the
    weight's gradient."""
    token = words * (row.dtype_bytes if has_gpu else FP32_BYTES)
    limit = FUSED_LOGITS_BYTES if has_gpu else LOGITS_CHUNK_BYTES
    logits = max(token, min(limit, batch_rows * row.sequence_length * token))
    return logits if has_gpu else max(2 * logits, 3 * logits // 2 + product_bytes)
