"""Frozen weights on disk: the fewest blocks with which the host suffices, timed and told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.errors import DoesNotFit
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity, DiskHome
from fluxtrain.plan.choose import place
from fluxtrain.plan.depths import DISK_RING_BYTES
from fluxtrain.plan.facts import Capacity, GroupFacts, ModelFacts, RowFacts
from fluxtrain.plan.footprint import Layout, footprint, on_disk
from fluxtrain.plan.group_placement import check_rows, table_of
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.rates import CardsRates, Rates
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import HOST_SHARE
from fluxtrain.plan.simulation import step_time
from fluxtrain.units import GIB, MIB, bytes_text, duration_text

PACKED, ADAPTERS, EDGE = 400 * MIB, 2_000_000, 100_000_000
DISK = DiskHome(folder="/cache", read_bytes_per_s=2e9)
RATES = Rates(
    has_gpu=True, matmul_per_s=3e14, adamw_per_s=3e9, h2d_bytes_per_s=25e9, d2h_bytes_per_s=25e9,
    disk_bytes_per_s=2e9,
)  # fmt: skip


def model(layers: int = 40) -> ModelFacts:
    """A base packed in 4 bits with adapters in its blocks."""
    block = GroupFacts(
        name="", kind="block", weight_bytes=PACKED + 2 * ADAPTERS, trained_bf16=ADAPTERS,
        frozen=2 * PACKED, storage="nf4", packed_bytes=PACKED, file_bytes=PACKED,
        dense_bytes=4 * PACKED,
    )  # fmt: skip
    edge = GroupFacts(name="", kind="edge", weight_bytes=2 * EDGE, frozen=EDGE)
    blocks = (replace(block, name=f"layers.{at}") for at in range(layers))
    row = RowFacts(
        hidden=4096, vocabulary=32_000, sequence_length=2048, dtype_bytes=2,
        activation_bytes=500 * MIB,
    )  # fmt: skip
    return ModelFacts(
        groups=(replace(edge, name="embed"), *blocks, replace(edge, name="head")), row=row
    )


def planned(host_gib: float, disk: DiskHome | None = DISK, rates: Rates | None = RATES,
            gpu_gib: float = 8) -> Placement:  # fmt: skip
    capacity = Capacity(
        device_free_bytes=int(gpu_gib * GIB), host_available_bytes=int(host_gib * GIB)
    )
    request = RunRequest(batch_rows=2)
    return place(model(), capacity, request, rates=rates, disk=disk)


def away(plan: Placement) -> list[str]:
    return [row.name for row in plan.groups if row.weights == "disk"]


def test_nothing_is_on_disk_where_the_host_holds_all() -> None:
    assert not away(planned(64)) and planned(64) == planned(64, disk=None)


@settings(deadline=None, max_examples=12)
@given(st.floats(4.5, 18.0), st.booleans())
def test_the_fewest_blocks_with_which_the_host_suffices(host_gib: float, timed: bool) -> None:
    plan = planned(host_gib, rates=RATES if timed else None)
    limit = int(host_gib * GIB * HOST_SHARE)
    count = len(away(plan))
    assert count == plan.layout.disk_groups and plan.need.host_bytes <= limit
    check_rows(plan.groups)
    if count:
        fewer = replace(plan.layout, disk_groups=count - 1)
        assert footprint(model(), fewer, has_gpu=True).host_bytes > limit
    for row in plan.groups:
        assert row.state != "disk" and row.gradients != "disk"
        assert row.kind == "block" or row.weights != "disk"


def test_the_bytes_are_those_of_memory_less_the_files_and_with_the_ring() -> None:
    layout = Layout(offload="weights", batch_rows=2, chunk_rows=1, resident_blocks=3)
    whole = footprint(model(), layout, has_gpu=True)
    some = replace(layout, disk_groups=7)
    need = footprint(model(), some, has_gpu=True)
    assert whole.host_bytes - need.host_bytes == 7 * PACKED - DISK_RING_BYTES
    assert need.device_bytes == whole.device_bytes
    rows = {row.name: row for row in table_of(model(), some)}
    resident = [name for name, row in rows.items() if row.resident and row.kind == "block"]
    there = [group.name for group in on_disk(model(), some)]
    assert there[:3] == resident, "blocks that are read once a run go first"


def test_a_step_reads_streamed_blocks_twice_but_for_slots_and_takes_as_long_as_that() -> None:
    layout = Layout(offload="weights", batch_rows=2, chunk_rows=1, slots=3)
    times = [step_time(model(), replace(layout, disk_groups=n), RATES) for n in (0, 20, 40)]
    assert times[0].parts_s["disk_read"] == 0 < times[1].parts_s["disk_read"]
    # what is in a slot where the pass turns, at the loss and at the step, is not read again
    assert times[2].parts_s["disk_read"] == pytest.approx(2 * (40 - 3) * PACKED / 2e9)
    assert times[2].busy_s["disk"] == pytest.approx(times[2].parts_s["disk_read"])
    assert times[0].step_s < times[1].step_s < times[2].step_s
    assert times[2].busy_s["disk"] <= times[2].step_s <= 1.1 * times[2].busy_s["disk"]
    assert "disk" in times[2].binds
    unknown = replace(RATES, disk_bytes_per_s=None)
    assert step_time(model(), replace(layout, disk_groups=20), unknown).step_s == times[0].step_s


def test_the_reason_has_the_blocks_the_bytes_and_the_seconds() -> None:
    plan = planned(8)
    (told,) = [choice for choice in plan.choices if choice.name == "weights on disk"]
    assert told.value == f"{len(away(plan))} of 40 blocks"
    assert plan.time is not None
    seconds, most_s = plan.time.parts_s["disk_read"], 2 * len(away(plan)) * PACKED / 2e9
    assert 0.9 * most_s < seconds < most_s  # what is still in slots is not read
    size = bytes_text(len(away(plan)) * PACKED)
    for words in ("/cache", "7.20 GiB", size, duration_text(seconds)):
        assert words in told.because
    assert "network" not in told.because
    shared = planned(8, replace(DISK, on_network=True)).choices
    assert any("over the network" in choice.because for choice in shared)


@pytest.mark.parametrize(
    ("disk", "says"),
    [(None, ""), (replace(DISK, unusable="model.packed_cache=true lets"), "packed_cache=true")],
)
def test_without_a_disk_the_refusal_is_today_s_with_the_cure(
    disk: DiskHome | None, says: str
) -> None:
    with pytest.raises(DoesNotFit, match="of host memory and") as refused:
        planned(8, disk)
    assert says in str(refused.value)


def test_a_host_that_lacks_memory_even_so_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="of host memory and"):
        planned(0.5)


def test_cards_share_the_host_and_the_disk() -> None:
    cards = tuple(CardCapacity(index=at, free_bytes=8 * GIB) for at in range(2))
    capacity = CardsCapacity(cards=cards, host_available_bytes=10 * GIB)
    rates = CardsRates(cards=(RATES, RATES))
    plan = place(model(), capacity, RunRequest(batch_rows=4), rates=rates, disk=DISK)
    assert away(plan) and plan.need.host_bytes <= 9 * GIB
    assert plan.layout.disk_groups == len(away(plan))
