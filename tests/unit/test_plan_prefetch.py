"""The number of device slots: as few as hide the copies, and counted in bytes and seconds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.plan.choices.placement import place
from fluxtrain.plan.choices.timed import Timing, place_timed
from fluxtrain.plan.cost.prefetch import (
    FEWEST_SLOTS,
    LOOKS_AHEAD,
    MOST_SLOTS,
    UNEVEN,
    WORTH,
    Pass,
    pass_s,
    passes_of,
    slots_for,
)
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.cost.step import cost, passes_s
from fluxtrain.plan.facts import Capacity, GroupFacts, ModelFacts, RowFacts
from fluxtrain.plan.footprint import SLOTS, Layout, footprint, slot_count
from fluxtrain.plan.request import RunRequest
from fluxtrain.units import GIB

TRACES = Path(__file__).parents[2] / "docs" / "traces"
MIB = 1 << 20
BLOCK = 40_000_000  # parameters
RATES = Rates(
    has_gpu=True,
    matmul_per_s=4e14,
    adamw_per_s=6e9,
    h2d_bytes_per_s=50e9,
    d2h_bytes_per_s=50e9,
)


def model(layers: int = 24, *, trained: bool = True) -> ModelFacts:
    def group(name: str, size: int) -> GroupFacts:
        return GroupFacts(
            name=name,
            kind="block" if name.startswith("layers") else "edge",
            weight_bytes=2 * size,
            trained_bf16=size if trained else 0,
            frozen=0 if trained else size,
        )

    return ModelFacts(
        groups=(
            group("embed_tokens", 4 * BLOCK),
            *(group(f"layers.{i}", BLOCK) for i in range(layers)),
            group("norm", 2048),
        ),
        row=RowFacts(
            hidden=2048,
            vocabulary=32_000,
            sequence_length=1024,
            dtype_bytes=2,
            activation_bytes=64 * MIB,
        ),
    )


def ends_s(
    block_s: float, copies_s: Sequence[float], ready_s: Sequence[float], slots: int
) -> list[float]:
    """When each block has been computed: a copy begins when its weights are updated, the copy
    before has ended, and the block that had its slot before has been computed."""
    ends: list[float] = []
    bus_s = now_s = 0.0
    streamed: list[int] = []
    for at, copy_s in enumerate(copies_s):
        if copy_s:
            free_s = ends[streamed[-slots]] if len(streamed) >= slots else 0.0
            bus_s = max(bus_s, ready_s[at], free_s) + copy_s
            streamed.append(at)
            now_s = max(now_s, bus_s)
        now_s += block_s
        ends.append(now_s)
    return ends


seconds = st.floats(0.001, 1.0)


@given(st.data(), st.integers(1, 40), seconds)
def test_two_slots_hide_copies_shorter_than_a_block_whenever_updates_end(
    data: st.DataObject, blocks: int, block_s: float
) -> None:
    """Not only evenly: in bursts, late, all at once."""
    shares = st.lists(st.just(0.0) | st.floats(0.01, 1.0), min_size=blocks, max_size=blocks)
    copies_s = [block_s * share for share in data.draw(shares)]
    pauses = st.lists(st.floats(0, 5 * block_s), min_size=blocks, max_size=blocks)
    ready_s, updated_s = [], 0.0
    for pause_s in data.draw(pauses):
        updated_s += pause_s
        ready_s.append(updated_s)
    two, every = (ends_s(block_s, copies_s, ready_s, slots) for slots in (2, blocks + 1))
    assert two == pytest.approx(every)


passes = st.integers(1, 40).flatmap(
    lambda count: st.builds(
        Pass,
        block_s=seconds,
        copies_s=st.tuples(*[st.just(0.0) | seconds] * count),
        shared=st.tuples(*[st.booleans()] * count),
    )
)


@given(passes)
def test_no_slot_more_makes_a_pass_longer_and_none_beats_computing_and_bus(one: Pass) -> None:
    lasting_s = [pass_s(one, slots) for slots in range(1, 8)]
    assert lasting_s == sorted(lasting_s, reverse=True)
    first_s = next((copy_s for copy_s in one.copies_s if copy_s), 0.0)
    least_s = max(len(one.shared) * one.block_s, sum(one.copies_s) - first_s)
    assert least_s <= lasting_s[-1] * (1 + 1e-9)


@given(passes, st.data())
def test_one_block_more_on_the_device_makes_no_pass_longer(one: Pass, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(one.shared) - 1))
    copies, shared = list(one.copies_s), list(one.shared)
    copies[at], shared[at] = 0.0, False
    fewer = Pass(one.block_s, tuple(copies), tuple(shared))
    for slots in range(2, 6):
        assert pass_s(fewer, slots) <= pass_s(one, slots) * (1 + 1e-9)


@given(st.integers(2, 40), seconds, st.floats(0.01, 20.0))
def test_even_copies_of_every_block_wait_for_no_third_slot(
    blocks: int, block_s: float, share: float
) -> None:
    """Hidden where they are short; where they are long the bus never rests."""
    one = Pass(block_s, (share * block_s,) * blocks, (True,) * blocks)
    expected_s = (blocks - 1) * block_s * max(1.0, share) + block_s
    assert pass_s(one, 2) == pytest.approx(expected_s)
    assert pass_s(one, 9) == pytest.approx(expected_s)


def test_a_third_slot_uses_the_long_gap_before_a_short_one() -> None:
    """Streamed, streamed, on the device: three blocks compute for 3 s, their copies take 2.8 s."""
    there = (True, True, False) * 8
    one = Pass(1.0, tuple(1.4 * shared for shared in there), there)
    assert pass_s(one, 2) == pytest.approx(24 + 8 * 0.4)
    assert pass_s(one, 3) == pytest.approx(24 + 0.4)  # the first of them has no gap before it


def test_no_number_of_slots_copies_a_block_that_is_not_looked_for_yet() -> None:
    far = LOOKS_AHEAD + 4
    shared = (True, *(False,) * far, True)
    one = Pass(1.0, (1.0, *(0.0,) * far, 2.0 * LOOKS_AHEAD), shared)
    expected_s = (far + 1 - LOOKS_AHEAD) + 2.0 * LOOKS_AHEAD + 1
    assert pass_s(one, 3) == pass_s(one, MOST_SLOTS) == expected_s


def test_copies_count_as_uneven_as_they_were_recorded() -> None:
    """Deciles of the copies in docs/traces, each trace's beside its fastest: about those of the
    traces that the numbers are from. Of two hosts they differ by up to 0.14."""
    found: list[float] = []
    for path in sorted(TRACES.glob("*.json.gz")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        copies = [
            one["dur"]
            for one in events
            if one.get("ph") == "X" and one.get("cat") == "h2d"
            and one["args"].get("kind") == "weights" and "layers" in one["name"]
        ]  # fmt: skip
        found += [took / min(copies) for took in copies]
    found.sort()
    deciles = [found[int(len(found) * (place + 0.5) / 10)] for place in range(10)]
    assert sorted(UNEVEN) == pytest.approx(deciles, abs=0.2)


def wanted(rows: int, device_groups: int = 0, rates: Rates = RATES, *, trained: bool = True) -> int:
    facts = model(trained=trained)
    layout = Layout(
        offload="weights", device_groups=device_groups, device_first="blocks", slots=2,
        batch_rows=rows, chunk_rows=rows,
    )  # fmt: skip
    forward_s, _, backward_s = passes_s(facts, layout, rates)
    return slots_for(facts, layout, rates, forward_s, backward_s)


def test_where_a_copy_is_well_below_what_a_block_computes_two_slots_are_enough() -> None:
    assert wanted(64) == wanted(64, 8) == FEWEST_SLOTS


def test_where_the_bus_binds_two_slots_are_enough() -> None:
    thin = replace(RATES, h2d_bytes_per_s=1e9)
    assert wanted(4, rates=thin) == FEWEST_SLOTS


def test_between_the_two_blocks_on_the_device_ask_for_a_third() -> None:
    assert wanted(2, 8) == 3


@given(
    st.integers(1, 32),
    st.integers(0, 26),
    st.integers(0, 24),
    st.sampled_from(["device", "host"]),
    st.floats(1e9, 1e12),
    st.booleans(),
)
def test_the_chosen_number_is_the_fewest_that_is_nearly_as_good_as_any(
    rows: int, device_groups: int, resident: int, boundaries: str, per_s: float, trained: bool
) -> None:
    facts, rates = model(trained=trained), replace(RATES, h2d_bytes_per_s=per_s)
    layout = Layout(
        offload="weights", device_groups=device_groups, resident_blocks=resident,
        activations="host" if boundaries == "host" else "device", batch_rows=rows, chunk_rows=rows,
    )  # fmt: skip
    forward_s, _, backward_s = passes_s(facts, layout, rates)
    both = passes_of(facts, layout, rates, forward_s, backward_s)
    waited_s = [sum(pass_s(one, slots) for one in both) for slots in range(2, MOST_SLOTS + 1)]
    chosen = slots_for(facts, layout, rates, forward_s, backward_s)
    enough_s = waited_s[-1] + WORTH * (forward_s + backward_s)
    assert waited_s[chosen - 2] <= enough_s
    assert all(waited > enough_s for waited in waited_s[: chosen - 2])


def test_a_step_is_as_much_longer_as_its_passes_wait_for_slots() -> None:
    """Of frozen blocks behind an embedding on the device, so that nothing else hides it."""
    facts = model(trained=False)
    rates = replace(RATES, h2d_bytes_per_s=RATES.up / 2)
    layout = Layout(offload="weights", device_groups=9, batch_rows=4, chunk_rows=4)
    forward_s, _, backward_s = passes_s(facts, layout, rates)
    both = passes_of(facts, layout, rates, forward_s, backward_s)
    few, many = (replace(layout, slots=slots) for slots in (2, 24))
    told = cost(facts, many, rates)
    floors_s = (
        max(forward_s, told.upload_forward_s),
        max(backward_s, told.upload_backward_s, told.download_s),
    )
    longer_s = [
        max(floor_s, pass_s(one, 2)) - max(floor_s, pass_s(one, 24))
        for one, floor_s in zip(both, floors_s, strict=True)
    ]
    assert sum(longer_s) > 0
    assert cost(facts, few, rates).step_s - told.step_s == pytest.approx(sum(longer_s))
    assert cost(facts, replace(few, slots=3), rates).step_s <= cost(facts, few, rates).step_s


def gpu(device_gib: float) -> Capacity:
    return Capacity(device_free_bytes=int(device_gib * GIB), host_available_bytes=64 * GIB)


def test_the_plan_counts_the_slots_that_it_chose_and_says_why() -> None:
    facts = model()
    request = RunRequest(batch_rows=32, offload="weights", device_groups=0, resident_blocks=0)
    plan = place_timed(facts, gpu(12), request, Timing(rates=RATES))
    assert plan.slots == slot_count(facts, plan.layout) == FEWEST_SLOTS
    assert plan.need == footprint(facts, plan.layout, has_gpu=True)
    (told,) = (choice for choice in plan.choices if choice.name == "placement.prefetch")
    assert told.value == "1"
    assert "one more would take 76.3 MiB for no gain" in told.because
    ruled = place(facts, gpu(12), request)
    assert ruled.slots == SLOTS["weights"] == 3
    assert plan.need.device_bytes == replace_slots(facts, plan.layout, 3) - 2 * BLOCK
    (untimed,) = (choice for choice in ruled.choices if choice.name == "placement.prefetch")
    assert untimed.value == "2" and "no times" in untimed.because


def replace_slots(facts: ModelFacts, layout: Layout, slots: int) -> int:
    return footprint(facts, replace(layout, slots=slots), has_gpu=True).device_bytes


def test_the_plan_takes_a_third_slot_where_it_is_predicted_to_pay() -> None:
    facts = model(trained=False)
    request = RunRequest(batch_rows=4, offload="weights", device_groups=8, device_first="blocks",
                    resident_blocks=0, activations="device")  # fmt: skip
    plan = place_timed(facts, gpu(12), request, Timing(rates=replace(RATES, h2d_bytes_per_s=20e9)))
    assert plan.slots == 3
    (told,) = (choice for choice in plan.choices if choice.name == "placement.prefetch")
    assert told.value == "2" and "a step is predicted, and" in told.because
    layout = plan.layout
    rates = replace(RATES, h2d_bytes_per_s=20e9)
    assert cost(facts, layout, rates).step_s < cost(facts, replace(layout, slots=2), rates).step_s


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(
    ("slots", "at_once", "value", "why"),
    [
        (4, 1, "3", "as set"),
        (1001, 1, "5", "1000 as set, and 6 blocks stream"),
        (2, 2, "2", "1 as set, and parts that compute with 2 blocks at once need 3 slots"),
    ],
)
def test_a_number_that_was_asked_for_is_told_with_what_becomes_of_it(
    slots: int, at_once: int, value: str, why: str, *, timed: bool
) -> None:
    facts = replace(model(layers=6, trained=False), groups_at_once=at_once)
    request = RunRequest(
        batch_rows=4, offload="weights", device_groups=0, resident_blocks=0, prefetch=slots - 1
    )
    plan = place_timed(facts, gpu(24), request, Timing(rates=RATES) if timed else None)
    (told,) = (choice for choice in plan.choices if choice.name == "placement.prefetch")
    assert (told.value, told.because) == (value, why)
