"""The placement rule never exceeds what there is, and says why it chose what it chose."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from fluxtrain.errors import EXIT_DOES_NOT_FIT, BadInput, DoesNotFit
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import Capacity, ModelFacts, RowFacts, activation_estimate
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import AUTO_SHARE, HOST_SHARE
from fluxtrain.plan.spread import parted
from fluxtrain.units import GIB
from tests.unit.plan_models import group, room

gpu = partial(room, host_gib=256.0)

# The shape of Qwen2.5-1.5B: 28 blocks, hidden 1536, vocabulary 151,936, tied embedding.
BLOCK_PARAMETERS = 46_797_824
EDGE_PARAMETERS = 151_936 * 1536


def qwen(sequence_length: int = 1024, layers: int = 28) -> ModelFacts:
    return ModelFacts(
        groups=(
            group("embed_tokens", EDGE_PARAMETERS, users=2),
            *(group(f"layers.{i}", BLOCK_PARAMETERS) for i in range(layers)),
            group("norm", 1536),
        ),
        head_parameters=EDGE_PARAMETERS,
        row=RowFacts(
            hidden=1536,
            vocabulary=151_936,
            sequence_length=sequence_length,
            dtype_bytes=2,
            activation_bytes=activation_estimate(1536, 8960, sequence_length, 2),
        ),
    )


def because(placement: Placement) -> dict[str, str]:
    """Each choice's reason, by name."""
    return {choice.name: choice.because for choice in placement.choices}


def error_names_both_numbers(refusal: str) -> bool:
    return " needs " in refusal and " may be used" in refusal


def test_a_smaller_card_offloads_more() -> None:
    cards = [place(qwen(), gpu(size), RunRequest(batch_rows=32)) for size in (80, 40, 24, 16, 9, 6)]
    offloads = ["none", "none", "weights", "weights", "weights", "max"]
    assert [card.offload for card in cards] == offloads
    counts = [card.layout.device_groups for card in cards]
    assert counts[:2] == [30, 30]
    assert 30 > counts[2] > counts[3] > 1
    assert counts[4:] == [0, 0]  # the first group is the embedding: 3 GiB
    assert [card.host_bytes for card in cards] == sorted(card.host_bytes for card in cards)


def test_more_kept_blocks_than_can_keep_are_told_with_the_numbers() -> None:
    request = RunRequest(
        offload="weights", device_groups=0, resident_blocks=3, blocks_without_recompute=99
    )
    placement = place(qwen(), gpu(80), request)
    assert placement.layout.blocks_without_recompute == 3
    told = {choice.name: choice.value for choice in placement.choices}
    assert told["placement.blocks_without_recompute"] == "3"
    reason = "99 as set, and the weights of 3 blocks stay on the device"
    assert because(placement)["placement.blocks_without_recompute"] == reason
    fewer = place(qwen(), gpu(80), replace(request, blocks_without_recompute=2))
    assert because(fewer)["placement.blocks_without_recompute"] == "as set"


def test_a_smaller_batch_is_preferred_to_max() -> None:
    placement = place(qwen(), gpu(6), RunRequest())
    assert placement.offload == "weights"
    assert placement.batch_rows < 32


def test_spare_memory_goes_to_whole_groups_before_resident_weights() -> None:
    small, large = (
        place(qwen(), gpu(size), RunRequest(offload="weights", batch_rows=8)) for size in (12, 15)
    )
    assert 1 < small.layout.device_groups < large.layout.device_groups < 29
    assert small.slots == large.slots == 3
    for placement, size in ((small, 12), (large, 15)):
        left = size * GIB * AUTO_SHARE - placement.device_bytes
        assert left < 2 * BLOCK_PARAMETERS  # no other block's weights
        assert placement.layout.resident_blocks * 2 < 14  # else one more group would have fitted


def test_a_host_that_is_too_small_for_the_rest_gets_a_smaller_batch() -> None:
    """More of the model on the device is the only way to need less of the host."""
    ample = place(qwen(), gpu(15), RunRequest())
    tight = place(qwen(), gpu(15, host_gib=ample.host_bytes / GIB / HOST_SHARE - 1.0), RunRequest())
    assert ample.batch_rows == 32
    assert tight.batch_rows < 32
    assert tight.layout.device_groups > ample.layout.device_groups
    assert because(tight)["train.batch_rows"].startswith(f"{tight.batch_rows * 2} rows would need")


def test_reasons_carry_the_numbers_that_decided() -> None:
    placement = place(qwen(), gpu(16), RunRequest())
    reasons = because(placement)
    assert "none would need" in reasons["placement.offload"]
    assert "of 14.4 GiB device memory" in reasons["placement.offload"]
    assert "of host memory" in reasons["placement.offload"]
    count, first = placement.layout.device_groups, placement.layout.device_first
    before, after = (set(parted(qwen().groups, n, first)[0]) for n in (count, count + 1))
    (following,) = (group.name for group in after - before)
    assert f"{following} as well would need" in reasons["placement.device_groups"]
    assert "one more would need" in reasons["placement.resident_blocks"]
    assert "32 rows fit" in reasons["train.batch_rows"]
    assert "4096 tokens" in reasons["placement.chunk_rows"]


def test_max_is_explained_by_what_the_fewest_rows_would_take_otherwise() -> None:
    placement = place(qwen(), room(4.4, host_gib=None), RunRequest(batch_rows=16))
    assert placement.offload == "max"
    assert (
        "offload=weights, 16 rows in chunks of 1 would need"
        in because(placement)["placement.offload"]
    )
    assert "one more would need" in because(placement)["placement.resident_blocks"]


def test_max_as_the_last_resort_still_fills_the_device() -> None:
    """128 rows of boundaries do not fit beside anything; once they are on the host much is free."""
    placement = place(qwen(sequence_length=4096), gpu(24), RunRequest(batch_rows=128))
    assert placement.offload == "max"
    assert placement.layout.device_groups > 1
    assert 24 * GIB * AUTO_SHARE - placement.device_bytes < 2 * BLOCK_PARAMETERS
    asked = place(qwen(sequence_length=4096), gpu(24), RunRequest(batch_rows=128, offload="max"))
    assert (asked.layout.device_groups, asked.layout.resident_blocks) == (0, 0)
    assert because(asked)["placement.resident_blocks"] == "max streams every block"


def test_a_batch_is_no_larger_than_the_data() -> None:
    placement = place(qwen(), gpu(80), RunRequest(data_rows=20))
    assert placement.batch_rows == 16
    assert "20 rows" in because(placement)["train.batch_rows"]


def test_a_smaller_batch_is_explained_by_what_the_double_would_take() -> None:
    placement = place(qwen(sequence_length=8192), gpu(9), RunRequest())
    assert placement.batch_rows < 32
    assert because(placement)["train.batch_rows"].startswith(
        f"{placement.batch_rows * 2} rows would need"
    )


def test_without_a_gpu_blocks_stream_for_real() -> None:
    room = Capacity(device_free_bytes=None, host_available_bytes=64 * GIB)
    placement = place(qwen(sequence_length=256), room, RunRequest())
    assert placement.offload == "weights"
    layout = placement.layout
    assert (layout.device_groups, layout.resident_blocks, layout.slots) == (0, 0, 3)
    assert placement.budget_bytes is None
    assert "without a GPU" in because(placement)["placement.offload"]


def test_residents_can_be_set() -> None:
    placement = place(qwen(), gpu(80), RunRequest(device_groups=3, resident_blocks=5))
    assert placement.offload == "weights"
    assert (placement.layout.device_groups, placement.layout.resident_blocks) == (3, 5)
    assert because(placement)["placement.device_groups"] == "as set"
    assert because(placement)["placement.resident_blocks"] == "as set"


def test_more_residents_than_there_are_means_all() -> None:
    placement = place(qwen(), gpu(80), RunRequest(offload="weights", device_groups=99))
    assert (placement.layout.device_groups, placement.slots, placement.host_bytes) == (30, 0, 0)
    placement = place(qwen(), gpu(80), RunRequest(device_groups=9, resident_blocks=99))
    layout = placement.layout
    assert (layout.device_groups, layout.resident_blocks, layout.slots) == (9, 20, 0)


@pytest.mark.parametrize("offload", ["optimizer", "max"])
def test_explicit_optimizer_and_max_keep_every_group_at_home(offload: str) -> None:
    placement = place(qwen(), gpu(80), RunRequest(offload=offload))  # type: ignore[arg-type]
    assert placement.layout.device_groups == 0
    assert placement.layout.resident_blocks == (28 if offload == "optimizer" else 0)


def test_a_model_whose_rows_are_not_known_takes_half_of_the_budget() -> None:
    fixed = replace(qwen(), row=None)
    small, middle, large = (place(fixed, gpu(s), RunRequest()) for s in (5, 24, 80))
    assert (small.offload, small.layout.device_groups) == ("weights", 0)
    assert small.layout.resident_blocks == 0
    assert small.device_bytes > 2.5 * GIB  # even the least takes more than half
    assert middle.offload == "weights"
    assert 12 * GIB - 14 * BLOCK_PARAMETERS < middle.device_bytes <= 12 * GIB
    assert large.offload == "none"
    assert "which leaves the rest to activations" in because(middle)["placement.device_groups"]
    assert [c.name for c in middle.choices] == [
        "placement.offload", "placement.device_groups", "placement.resident_blocks",
        "placement.prefetch",
    ]  # fmt: skip


def test_a_chunk_takes_half_of_what_the_fixed_parts_leave() -> None:
    fixed = replace(qwen(), row=None)
    placement = place(fixed, gpu(24), RunRequest())
    left = 24 * GIB * AUTO_SHARE - placement.device_bytes
    assert placement.chunk_for(row_bytes=int(left) // 20, rows=64) == 10
    assert placement.chunk_for(row_bytes=1, rows=64) == 64
    assert placement.chunk_for(row_bytes=100 * GIB, rows=64) == 1


def test_a_refusal_of_wrap_names_its_arguments() -> None:
    fixed = replace(qwen(), row=None)
    with pytest.raises(DoesNotFit, match="offload=weights fits"):
        place(fixed, gpu(12), RunRequest(offload="none"))
    with pytest.raises(DoesNotFit, match="budget_gib left out fits"):
        place(fixed, gpu(24), RunRequest(budget_gib=1))


@pytest.mark.parametrize(
    ("room", "wish", "resource", "cure"),
    [
        (gpu(2.5), RunRequest(), "device memory", "smaller model or a machine with more memory"),
        (gpu(8, host_gib=16), RunRequest(), "host memory", "smaller model or a machine"),
        (gpu(24), RunRequest(offload="none"), "device memory", "placement.offload=weights fits"),
        (gpu(9), RunRequest(batch_rows=4000), "device memory", "train.batch_rows=32 fits"),
        (gpu(24), RunRequest(budget_gib=2), "device memory", "placement.budget_gib left out"),
        (gpu(9), RunRequest(chunk_rows=64, batch_rows=64), "device memory",
         "placement.chunk_rows=4 "),
        (gpu(24), RunRequest(device_groups=30), "device memory",
         "placement.device_groups left out"),
        (gpu(4.5), RunRequest(resident_blocks=40), "device memory",
         "placement.resident_blocks left"),
        (gpu(12),
         RunRequest(blocks_without_recompute=40, resident_blocks=40, batch_rows=32),
         "device memory",
         ": placement.blocks_without_recompute left out fits"),
        (gpu(24), RunRequest(offload="none", batch_rows=4000), "device memory",
         ": train.batch_rows and all of placement left out fits"),
    ],
)  # fmt: skip
def test_what_does_not_fit_says_the_need_the_room_and_the_cure(
    room: Capacity, wish: RunRequest, resource: str, cure: str
) -> None:
    with pytest.raises(DoesNotFit) as refused:
        place(qwen(), room, wish)
    assert refused.value.exit_code == EXIT_DOES_NOT_FIT
    message = str(refused.value)
    assert resource in message
    assert cure in message
    assert error_names_both_numbers(message)


def test_a_limit_of_host_memory_that_is_set_is_told_with_the_one_that_suffices() -> None:
    asked = RunRequest(host_gib=1.0, batch_rows=1)
    with pytest.raises(DoesNotFit) as refused:
        place(qwen(), gpu(8, host_gib=1.0), asked)
    told = re.search(r": set placement\.host_gib=([\d.]+), or leave it out", str(refused.value))
    assert told, refused.value
    enough = float(told[1])
    assert place(qwen(), gpu(8, host_gib=enough), replace(asked, host_gib=enough)).host_bytes


def test_another_packages_optimizer_is_never_told_to_keep_states_at_home() -> None:
    facts = qwen().without_masters("8bit")
    request = RunRequest(offload="none", batch_rows=64)
    with pytest.raises(DoesNotFit, match=r": train\.batch_rows=\d+ fits"):
        place(facts, gpu(22), request)
    with pytest.raises(DoesNotFit, match=r": train\.optimizer=adamw with train\.states=8bit fits"):
        place(facts, gpu(8), replace(request, batch_rows=1))
    own = place(qwen().with_states("8bit"), gpu(8), RunRequest(batch_rows=1))
    assert own.offload == "weights"


def test_a_host_that_is_too_small_is_told_what_the_device_leaves_to_it() -> None:
    """Never numbers of a layout that the device could not hold either."""
    with pytest.raises(DoesNotFit) as refused:
        place(qwen(), gpu(12, host_gib=8), RunRequest(batch_rows=8))
    assert "of host memory and 7.20 GiB may be used" in str(refused.value)
    assert "of device memory" not in str(refused.value)


def test_a_host_that_is_too_small_for_fp32_states_is_told_of_8_bit_ones() -> None:
    facts = qwen()
    large = tuple(
        replace(g, narrow=g.trained_bf16) if g.name != "norm" else g for g in facts.groups
    )
    facts = replace(facts, groups=large)
    with pytest.raises(DoesNotFit) as refused:
        place(facts, gpu(8, host_gib=16), RunRequest())
    told = str(refused.value)
    assert "host memory" in told
    assert "train.states=8bit fits: optimizer states of 8 bits take" in told
    narrow = place(facts.with_states("8bit"), gpu(8, host_gib=16), RunRequest())
    assert narrow.need.arena_bytes < 8.1 * sum(g.trained_bf16 for g in facts.groups)
    with pytest.raises(DoesNotFit, match=r": states=8bit fits"):
        place(replace(facts, row=None), gpu(8, host_gib=16), RunRequest())


def test_a_host_that_is_too_small_for_sums_of_several_passes_is_told_of_one() -> None:
    wish = RunRequest(batch_rows=2, passes=2)
    with pytest.raises(DoesNotFit, match=r": train\.accumulation=1 fits"):
        place(qwen(), gpu(8, host_gib=23.5), wish)
    place(qwen(), gpu(8, host_gib=23.5), replace(wish, passes=1))


def test_rows_of_several_passes_are_not_said_to_be_all_of_the_data() -> None:
    plan = place(qwen(), gpu(24), RunRequest(data_rows=3, passes=1000))
    told = {choice.name: choice.because for choice in plan.choices}
    assert "3 rows for each of 1000 backward passes" in told["train.batch_rows"]


def test_a_length_that_would_fit_is_named() -> None:
    long = qwen(sequence_length=1 << 17)
    with pytest.raises(DoesNotFit, match=r"data\.sequence_length=\d+ fits"):
        place(long, gpu(6), RunRequest())


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        (RunRequest(offload="everything"), "use .auto., .none."),  # type: ignore[arg-type]
        (RunRequest(batch_rows=0), "batch_rows is 0"),
        (RunRequest(chunk_rows=-1), "chunk_rows is -1"),
        (RunRequest(budget_gib=0), "budget_gib is 0"),
        (RunRequest(resident_blocks=-1), "resident_blocks is -1"),
        (RunRequest(device_groups=-1), "device_groups is -1"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(wish: RunRequest, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        place(qwen(), gpu(80), wish)
