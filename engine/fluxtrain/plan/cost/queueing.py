"""How long a GPU's host takes to queue a step's work, where that was tried. Pure arithmetic.

The host queues what the GPU computes a little later. Where it is the slower of the two, a pass
takes as long as the host does; where it waits for something (an update, moments), it is no longer
ahead. While AdamW runs on the host's cores too, it is slower still, as slow as in the timed
steps of a small model (`calibration/timed_steps.py`). Under the head, few large operations, it gets
ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import Layout, by_tier, offloading_blocks


@dataclass(frozen=True, kw_only=True)
class Queueing:
    """Seconds of the host; those of a block are of all its chunks."""

    blocks: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_beside_s: float = 0.0  # while AdamW runs
    backward_beside_s: float = 0.0  # while what a backward pass of this kind has beside it runs
    lead_s: float = 0.0  # by which it is ahead when a backward pass begins
    outside_s: float = 0.0  # of all but the blocks
    optimizer_s: float = 0.0  # once a step, behind the last backward pass

    def forward(self, block_s: float, beside_s: float) -> float:
        """A forward pass of which AdamW takes the first `beside_s`, where the GPU needs `block_s`
        a block."""
        return _partly(
            self.blocks, max(block_s, self.forward_s), max(block_s, self.forward_beside_s), beside_s
        )

    def backward(self, beside_s: float) -> float:
        """A backward pass, `beside_s` of it beside AdamW, less the lead."""
        pass_s = _partly(self.blocks, self.backward_s, self.backward_beside_s, beside_s)
        return max(0.0, pass_s - self.lead_s)

    def step(self, passes: int) -> float:
        """All of a step of `passes` passes, none of it beside AdamW."""
        blocks_s = self.blocks * (self.forward_s + self.backward_s)
        return passes * (blocks_s + self.outside_s) + self.optimizer_s


def _partly(blocks: int, alone_s: float, beside_s: float, lasting_s: float) -> float:
    """Seconds of `blocks`, of which those within the first `lasting_s` take `beside_s` each."""
    beside_s = max(alone_s, beside_s)
    if not beside_s:
        return 0.0
    slower = min(float(blocks), lasting_s / beside_s)
    return slower * beside_s + (blocks - slower) * alone_s


def queueing_of(
    facts: ModelFacts, layout: Layout, rates: Rates, head_s: float, *, clips: bool
) -> Queueing:
    """Of a layout; nothing takes time where no block was tried."""
    tried = rates.calibration
    if tried is None:
        return Queueing(blocks=facts.layers)
    chunks = -(-layout.batch_rows // max(1, layout.chunk_rows))
    host = tried.host
    if host is None:
        backward_s = max(0.0, tried.host_block_s - tried.host_forward_s)
        return Queueing(
            blocks=facts.layers,
            forward_s=chunks * tried.host_forward_s,
            backward_s=chunks * backward_s,
            lead_s=float("inf"),  # only a step as a whole is known
        )
    here, on_host = (len([g for g in groups if g.trained]) for groups in by_tier(facts, layout))
    optimizer_s = here * host.device_update_s + on_host * host.host_group_update_s
    backward_beside = host.backward_beside
    if not clips:  # each group is stepped in the backward pass
        backward_beside = backward_beside.plus(here * host.device_update_s / max(1, facts.layers))
    offloaded = offloading_blocks(facts, layout) / max(1, facts.layers)
    there_s = offloaded * host.offload_forward_s  # once a batch
    back_s = offloaded * host.offload_backward_s
    return Queueing(
        blocks=facts.layers,
        forward_s=host.forward.at(chunks) + there_s,
        backward_s=host.backward.at(chunks) + back_s,
        forward_beside_s=host.forward_beside.at(chunks) + there_s,
        backward_beside_s=backward_beside.at(chunks) + back_s,
        lead_s=max(0.0, head_s - host.outside_s),
        outside_s=host.outside_s,
        optimizer_s=optimizer_s if clips else 0.0,
    )
