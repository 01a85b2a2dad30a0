"""What the second and later backward passes of a step move more than the first.

The first one's gradients are downloaded rounded. Each further pass uploads what is on the host (the
rounded gradients, then sums in fp32), adds to it, and downloads the sum in fp32. The sums of an
embedding by rows stay on the device and are downloaded with each pass; a head in vocabulary chunks
waits for the upload of each chunk's sum, and nothing hides that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.facts import FP32_BYTES, ModelFacts
from fluxtrain.plan.footprint import Layout, by_tier, chunked_head, rows_of_table


@dataclass(frozen=True)
class Again:
    """Bytes of gradients in one backward pass of a step."""

    up: int  # beside the blocks' backward pass
    at_head: int  # up too, while the head's backward pass waits for them
    down: int


def again(facts: ModelFacts, layout: Layout, number: int) -> Again:
    """Of backward pass `number`, from 2 on."""
    on_host = by_tier(facts, layout)[1]
    rounded, trained = on_host.rounded_bytes, on_host.trained
    down = at_head = 0
    by_rows = rows_of_table(facts, layout, on_host)
    if by_rows is not None and by_rows.in_vocab_chunks:
        down += by_rows.kept_bytes
    elif by_rows is not None and by_rows.gradient_bytes:
        rounded -= by_rows.table.rounded_bytes
        trained -= by_rows.table.trained
        down += by_rows.sum_bytes(number)
    chunked = chunked_head(facts, layout, on_host)
    if chunked is not None:
        group = chunked.group
        at_head = group.rounded_bytes if number == 2 else FP32_BYTES * group.trained
        rounded -= group.rounded_bytes
        trained -= group.trained
        down += FP32_BYTES * group.trained
    up = rounded if number == 2 else FP32_BYTES * trained
    return Again(up=up, at_head=at_head, down=down + FP32_BYTES * trained)


def passes_again(
    facts: ModelFacts,
    layout: Layout,
    rates: Rates,
    loss: dict[str, float],
    backward: dict[str, float],
    passes: int,
) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """Loss and backward of the passes that add to the first one's gradients, as phases of a
    step: seconds of what overlaps in each."""
    for number in range(2, passes + 1):
        more = again(facts, layout, number)
        downloads = more.down / rates.down_both
        uploads = backward["uploads"] + more.up / rates.up_both
        compute = loss["compute"] + more.at_head / rates.up
        yield {**loss, "compute": compute}, {**backward, "uploads": uploads, "downloads": downloads}
