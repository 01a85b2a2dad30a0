"""Footprints of real shapes, each against arithmetic written out beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fluxtrain.plan.facts import GroupFacts, ModelFacts, RowFacts, activation_estimate
from fluxtrain.plan.footprint import (
    Footprint,
    Layout,
    footprint,
    slot_count,
)
from fluxtrain.plan.spread import parted
from fluxtrain.units import MIB
from tests.unit.plan_models import group

VOCABULARY, LENGTH, ROWS, CHUNK = 151_936, 1024, 8, 4

# Qwen2.5-1.5B: q and o 1536 x 1536, k and v 1536 x 256, MLP 3 x 1536 x 8960, biases and norms.
SMALL_BLOCK = 2 * 1536**2 + 2 * 1536 * 256 + 3 * 1536 * 8960 + (1536 + 2 * 256) + 2 * 1536
SMALL_EDGE = VOCABULARY * 1536
# Qwen2.5-7B: hidden 3584, 512 for k and v, intermediate 18944.
LARGE_BLOCK = 2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944 + (3584 + 2 * 512) + 2 * 3584
LARGE_EDGE = 152_064 * 3584


def row(hidden: int, intermediate: int, vocabulary: int) -> RowFacts:
    return RowFacts(
        hidden=hidden,
        vocabulary=vocabulary,
        sequence_length=LENGTH,
        dtype_bytes=2,
        activation_bytes=activation_estimate(hidden, intermediate, LENGTH, 2),
    )


def small() -> ModelFacts:
    """Qwen2.5-1.5B: 28 blocks, one tied embedding of 233 M parameters."""
    blocks = tuple(group(f"layers.{i}", SMALL_BLOCK) for i in range(28))
    return ModelFacts(
        groups=(group("embed_tokens", SMALL_EDGE, users=2), *blocks, group("norm", 1536)),
        head_parameters=SMALL_EDGE,
        row=row(1536, 8960, VOCABULARY),
    )


def large() -> ModelFacts:
    """Qwen2.5-7B: 28 blocks, embedding and head apart."""
    blocks = tuple(group(f"layers.{i}", LARGE_BLOCK) for i in range(28))
    return ModelFacts(
        groups=(
            group("embed_tokens", LARGE_EDGE),
            *blocks,
            group("norm", 3584),
            group("lm_head", LARGE_EDGE),
        ),
        head_parameters=LARGE_EDGE,
        row=row(3584, 18944, 152_064),
    )


def need(facts: ModelFacts, **layout: int | str) -> Footprint:
    made = Layout(batch_rows=ROWS, chunk_rows=CHUNK, **layout)  # type: ignore[arg-type]
    return footprint(facts, made, has_gpu=True)


def test_the_shapes_have_their_published_parameters() -> None:
    assert SMALL_BLOCK == 46_797_824
    assert SMALL_EDGE == 233_373_696
    assert sum(g.trained_bf16 for g in small().groups) == 1_543_714_304
    assert sum(g.trained_bf16 for g in large().groups) == 7_615_616_512


def test_the_small_shape_with_the_embedding_and_eleven_blocks_on_the_device() -> None:
    found = need(small(), offload="weights", device_groups=12, resident_blocks=5)
    on_device = 233_373_696 + 11 * 46_797_824
    assert found.weights_bytes == 2 * (on_device + (5 + 3) * 46_797_824 + 1536)
    assert found.optimizer_bytes == 10 * on_device
    assert found.gradients_bytes == (
        2 * on_device  # those at home on the device
        + 4 * 46_797_824  # the sum of the block that is in its backward pass
        + 4 * 233_373_696  # the tied embedding's own: head and embedding both add to it
        + 2 * (2 * 46_797_824)  # a block's gradients on their way home, 89 MiB: two buffers
        + 2 * (2 * 1536)  # and the norm's
    )
    boundary = 8 * 1024 * 1536 * 2
    assert found.block_inputs_bytes == 29 * boundary  # each block's input, and the norm's
    activations = 4 * activation_estimate(1536, 8960, 1024, 2)
    block = 2 * 46_797_824  # its gradients in bf16
    hidden = boundary + boundary // 2  # what arrives, and what the first of two chunks gave
    assert found.workspace_bytes == activations + block + hidden > 512 * MIB + 2 * boundary
    assert found.host_bytes == found.arena_bytes == 14 * (17 * 46_797_824 + 1536)


def test_the_large_shape_with_everything_at_home() -> None:
    found = need(large(), offload="weights")
    edge, block = 544_997_376, LARGE_BLOCK
    assert found.weights_bytes == 2 * (2 * edge + 3584 + 3 * block)
    assert found.optimizer_bytes == 0
    assert found.gradients_bytes == (
        4 * edge  # the largest sum, for one group at a time
        + 2 * edge  # over 128 MiB: one buffer
        + 2 * block  # 444 MiB: one buffer
        + 2 * (2 * 3584)
    )
    boundary = 8 * 1024 * 3584 * 2
    assert found.block_inputs_bytes == 29 * boundary
    tokens = (512 * MIB) // (2 * 152_064)
    assert tokens < 8 * 1024  # logits come in chunks of 512 MiB
    assert found.workspace_bytes == 4 * edge + 512 * MIB + 2 * boundary  # fp32 sum, a chunk
    without = footprint(
        large(), Layout(offload="weights", batch_rows=8, chunk_rows=4), has_gpu=False
    )
    product = 2 * edge  # of one chunk, beside fp32 logits once and a half
    loss = 4 * edge + (256 + 128) * MIB + product + 4 * boundary
    assert without.workspace_bytes == loss + 64 * MIB  # what a heap keeps of the other phases
    assert found.host_bytes == 14 * 7_615_616_512


def test_an_embedding_by_rows_takes_those_of_a_batch() -> None:
    facts = with_table(large())
    whole = need(facts, offload="weights")
    rows = need(facts, offload="weights", embedding="rows")
    tokens, edge = ROWS * 1024, LARGE_EDGE
    crossing = 2 * 3584 * tokens
    assert whole.weights_bytes - rows.weights_bytes == 2 * edge - crossing - 8 * (2 * tokens)
    assert rows.gradients_bytes == (
        4 * LARGE_BLOCK  # no sum of a whole embedding, and the loss makes that of the head
        + 2 * edge  # the head's gradient on its way home
        + 2 * LARGE_BLOCK
        + 2 * (2 * 3584)
        + 2 * crossing  # 56 MiB: two buffers
    )
    assert rows.workspace_bytes == whole.workspace_bytes  # of the loss, in both
    assert rows.arena_bytes - whole.arena_bytes == 2 * crossing + 8 * (2 * tokens)
    on_device = need(facts, offload="weights", device_groups=1, embedding="rows")
    assert on_device == need(facts, offload="weights", device_groups=1)


def with_table(facts: ModelFacts) -> ModelFacts:
    """The first group is an untied embedding of rows that are as wide as the model."""
    assert facts.row is not None
    count = facts.groups[0].trained // facts.row.hidden
    table = replace(facts.groups[0], users=1, table_rows=count)
    return replace(facts, groups=(table, *facts.groups[1:]))


def test_the_heads_sum_becomes_that_of_the_tied_embedding() -> None:
    """Measured on an H200 (1.5 B parameters streamed, liger off): 3.65 GiB at the peak."""
    tied, untied = small(), small()
    untied = replace(untied, groups=(replace(untied.groups[0], users=1), *untied.groups[1:]))
    twice = need(tied, offload="weights")
    once = need(untied, offload="weights")
    assert twice.gradients_bytes - once.gradients_bytes == 4 * SMALL_BLOCK  # one buffer, not two
    assert once.workspace_bytes - twice.workspace_bytes == pytest.approx(643 * MIB, rel=0.01)
    assert twice.device_bytes == pytest.approx(3.654 * 1024 * MIB, rel=0.09)  # estimated


def test_all_groups_on_the_device_is_none_and_needs_no_host_memory() -> None:
    facts = large()
    whole = need(facts, offload="none")
    assert whole == need(facts, offload="weights", device_groups=31)
    assert whole.weights_bytes + whole.optimizer_bytes == 12 * 7_615_616_512
    assert whole.host_bytes == 0
    assert slot_count(facts, Layout(offload="none")) == 0


def test_optimizer_keeps_weights_on_the_device_and_everything_at_home_too() -> None:
    found = need(small(), offload="optimizer")
    assert found.weights_bytes == 2 * 1_543_714_304
    assert found.host_bytes == 14 * 1_543_714_304
    assert found == need(small(), offload="weights", resident_blocks=28)


def test_max_trades_boundaries_for_host_memory() -> None:
    streamed, least = need(small(), offload="weights"), need(small(), offload="max")
    boundary = 8 * 1024 * 1536 * 2
    assert streamed.weights_bytes - least.weights_bytes == 2 * SMALL_BLOCK  # one slot fewer
    assert streamed.block_inputs_bytes - least.block_inputs_bytes == 27 * boundary  # two under way
    assert least.host_bytes - least.arena_bytes == 29 * boundary


def test_a_block_that_keeps_its_activations_keeps_its_input_beside_those_under_way() -> None:
    boundary = 8 * 1024 * 1536 * 2
    kept = need(small(), offload="max", device_groups=11, blocks_without_recompute=10)
    assert kept.block_inputs_bytes == (10 + 2) * boundary
    assert kept.host_bytes - kept.arena_bytes == (29 - 10) * boundary
    every = need(small(), offload="none", activations="host", blocks_without_recompute=28)
    assert every.block_inputs_bytes == 29 * boundary  # never more than there are


def test_what_stands_behind_the_blocks_is_computed_with_the_whole_batch() -> None:
    """A norm of torch's own operations holds many tensors as large as the batch."""
    boundary = 8 * 1024 * 1536 * 2
    facts = small()
    assert facts.row is not None
    most = replace(facts.row, edge_bytes=100 * facts.row.block_input_bytes)
    found = need(replace(facts, row=most), offload="weights")
    assert found.workspace_bytes == 102 * boundary
    assert most.of_length(512).edge_bytes == 50 * facts.row.block_input_bytes
    little = replace(facts.row, edge_bytes=facts.row.block_input_bytes)
    assert need(replace(facts, row=little), offload="weights") == need(facts, offload="weights")


@pytest.mark.parametrize(
    ("device_groups", "resident", "slots"),
    [(0, 0, 3), (1, 0, 3), (1, 25, 3), (1, 26, 2), (1, 28, 0), (28, 0, 1), (29, 0, 0)],
)
def test_only_blocks_at_home_that_are_not_resident_need_slots(
    device_groups: int, resident: int, slots: int
) -> None:
    layout = Layout(offload="weights", device_groups=device_groups, resident_blocks=resident)
    assert slot_count(small(), layout) == slots


def test_parts_that_compute_with_several_groups_get_a_slot_for_each() -> None:
    facts = replace(small(), groups_at_once=4)
    assert slot_count(facts, Layout(offload="max")) == 5


def test_fp32_takes_sixteen_bytes_a_parameter() -> None:
    fp32 = GroupFacts(name="layers.0", kind="block", weight_bytes=4000, trained_fp32=1000)
    assert fp32.host_bytes() == fp32.host_bytes(accumulates=True) == 16_000


def test_frozen_bf16_with_trained_adapters_counts_each_at_its_own_width() -> None:
    """A 1.5B block, frozen, with rank-16 adapters on q and v: 2 x 16 x (1536 + 1536) and 256."""
    adapters = 16 * (1536 + 1536) + 16 * (1536 + 256)
    plain = GroupFacts(name="layers.0", kind="block", weight_bytes=2 * SMALL_BLOCK)
    wide = replace(plain, weight_bytes=2 * SMALL_BLOCK + 4 * adapters, trained_fp32=adapters)
    narrow = replace(plain, weight_bytes=2 * SMALL_BLOCK + 2 * adapters, trained_bf16=adapters)
    assert plain.host_bytes() == 2 * SMALL_BLOCK
    assert wide.host_bytes() == 2 * SMALL_BLOCK + 16 * adapters
    assert narrow.host_bytes() == 2 * SMALL_BLOCK + 14 * adapters
    assert wide.sum_bytes == narrow.sum_bytes == 4 * adapters


def test_several_backward_passes_keep_bf16_gradients_in_fp32_as_well() -> None:
    facts = small()
    layout = Layout(offload="weights", device_groups=1, passes=2)
    once = footprint(facts, replace(layout, passes=1), has_gpu=True)
    several = footprint(facts, layout, has_gpu=True)
    at_home = 28 * SMALL_BLOCK + 1536
    assert several.arena_bytes - once.arena_bytes == 4 * at_home
    assert several.gradients_bytes - once.gradients_bytes == 4 * SMALL_EDGE


def test_without_a_gpu_the_device_buffer_counts_as_host_memory() -> None:
    layout = Layout(offload="weights", batch_rows=4, chunk_rows=2)
    with_gpu = footprint(small(), layout, has_gpu=True)
    without = footprint(small(), layout, has_gpu=False)
    assert without.host_bytes == without.arena_bytes + without.device_bytes
    assert without.arena_bytes == with_gpu.host_bytes
    assert without.device_bytes > with_gpu.device_bytes  # a heap gives less back between phases


def test_without_rows_only_what_does_not_depend_on_them_is_counted() -> None:
    facts = replace(small(), row=None)
    found = footprint(facts, Layout(offload="weights"), has_gpu=True)
    assert found.block_inputs_bytes == 0
    assert (
        found.workspace_bytes == 2 * SMALL_EDGE
    )  # the embedding's gradient; its sum is the head's
    known = need(small(), offload="weights")
    assert found.weights_bytes == known.weights_bytes
    assert found.gradients_bytes == known.gradients_bytes


def test_loose_parameters_are_on_the_device_in_every_layout() -> None:
    facts = replace(small(), loose_bytes=1000)
    for offload in ("none", "optimizer", "weights", "max"):
        found = need(facts, offload=offload)
        assert found.weights_bytes == need(small(), offload=offload).weights_bytes + 1000


def test_the_embedding_or_the_blocks_go_to_the_device_first() -> None:
    facts = large()
    kinds = [group.kind for group in facts.groups]
    assert kinds[0] == "edge"
    assert "block" not in kinds[-2:]  # last norm and head
    assert parted(facts.groups, 2, "embedding") == (facts.groups[:2], facts.groups[2:])
    assert parted(facts.groups, 3, "embedding")[0] == facts.groups[:3]
    blocks, others = parted(facts.groups, 2, "blocks")
    assert blocks == facts.groups[1:3]
    assert others == (facts.groups[0], *facts.groups[3:])
    most, rest = parted(facts.groups, facts.layers + 1, "blocks")
    assert most == facts.groups[:-2]  # in forward order
    assert rest == facts.groups[-2:]
    for first in ("embedding", "blocks"):
        assert parted(facts.groups, len(facts.groups), first) == (facts.groups, ())
