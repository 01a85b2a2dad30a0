"""Predicted device memory of one rank of a sharded model, by parts."""

from __future__ import annotations

from fluxtrain.config.parallel_settings import FsdpSettings
from fluxtrain.plan.facts import FP32_BYTES, ModelFacts
from fluxtrain.plan.footprint import Footprint


def predicted(
    facts: ModelFacts, settings: FsdpSettings, shards: int, rows: int, process_bytes: int = 0
) -> Footprint:
    """Predict the peak of a rank that holds one of `shards` parts and computes `rows` rows.

    Workspace is what FSDP2 gathers (two blocks, and what stands outside of blocks), one block's
    gradients before they are summed and after, one block's activations and the logits. DDP is
    `shards` = 1, but for its buckets.
    """
    compute = facts.row.dtype_bytes if facts.row else FP32_BYTES
    trained = sum(group.trained for group in facts.groups)
    frozen = sum(group.frozen * compute for group in facts.groups if group.storage == "plain")
    packed = sum(group.packed_bytes for group in facts.groups)
    blocks = [group for group in facts.groups if group.kind == "block"]
    whole = [_gathered(g.trained + g.frozen, g.packed_bytes, compute) for g in blocks]
    outside = sum((g.trained + g.frozen) * compute for g in facts.groups if g.kind == "edge")
    keeps = settings.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD")
    gathered = (sum(whole) if keeps else 2 * max(whole, default=0)) + outside
    gradients = max((g.trained for g in facts.groups), default=0) * (compute + FP32_BYTES)
    inputs, activations = 0, 0
    if facts.row is not None:
        row = facts.row
        inputs = rows * row.block_input_bytes * len(blocks)
        activations = rows * row.activation_bytes
        if not settings.activation_checkpointing:
            activations *= len(blocks)
        logits = rows * row.sequence_length * row.vocabulary
        activations += logits * (compute + 2 * FP32_BYTES)  # in fp32, and their gradient
    arena = (16 * trained + frozen + packed) // shards
    here = 0 if settings.cpu_offload else 1
    return Footprint(
        weights_bytes=here * (FP32_BYTES * trained + frozen + packed) // shards,
        gradients_bytes=here * FP32_BYTES * trained // shards,
        optimizer_bytes=here * 2 * FP32_BYTES * trained // shards,
        block_inputs_bytes=inputs,
        workspace_bytes=gathered + gradients + activations,
        arena_bytes=0 if here else arena,
        host_bytes=process_bytes + (0 if here else arena),
    )


def _gathered(elements: int, packed_bytes: int, compute: int) -> int:
    return packed_bytes or elements * compute
