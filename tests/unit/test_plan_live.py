"""A change is possible or refused, with the numbers, before anything is touched."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.train.live.edit import MemoryInUse, changed, settings_after
from fluxtrain.train.live.settings import LIVE_SETTINGS, Change, parse_change
from fluxtrain.units import GIB, MIB
from tests.live_settings import settings_with
from tests.unit.live_ground import BLOCKS, ground


def test_the_settings_of_a_plan_are_those_that_it_set() -> None:
    planned = ground().planned
    values = {name: planned.value(name) for name in LIVE_SETTINGS}
    assert values == {
        "prefetch": 2, "resident_blocks": 0, "chunk_rows": 2, "device_groups": 0,
        "blocks_without_recompute": 0,
    }  # fmt: skip
    assert planned.value("activations_on_device") == BLOCKS
    assert ground(activations="host").planned.value("activations_on_device") == 0
    assert ground(offload="max").planned.prefetch == 1
    assert ground(resident_blocks=BLOCKS - 1).planned.value("resident_blocks") == BLOCKS - 1
    run = ground(resident_blocks=3)
    assert run.placement_with(run.planned) == run.placement


def test_what_other_settings_count_stays_as_far_as_it_can() -> None:
    on = ground(budget_bytes=64 * GIB, resident_blocks=BLOCKS, blocks_without_recompute=5)
    for groups, resident, kept in ((3, BLOCKS - 2, 5), (0, BLOCKS, 5)):
        now = settings_with(on, device_groups=groups)
        assert now.value("resident_blocks") == resident
        assert now.value("blocks_without_recompute") == kept
    fewer = settings_with(on, resident_blocks=3)
    assert fewer.value("blocks_without_recompute") == 3
    assert all(row.resident for row in fewer.rows if row.activations == "kept")


def test_slots_never_outnumber_the_blocks_that_stream() -> None:
    on = ground()
    for resident in range(BLOCKS + 1):
        settings = settings_with(on, prefetch=4, resident_blocks=resident)
        assert on.placement_with(settings).slots == min(5, BLOCKS - resident)


def test_what_exceeds_the_budget_is_refused_with_the_numbers() -> None:
    on = ground(budget_bytes=2 * GIB)
    use = MemoryInUse(device_peak_bytes=(2 * GIB - 250 * MIB,))
    fits = Change(name="resident_blocks", value=2)
    assert settings_after(on, on.planned, fits, use).value("resident_blocks") == 2
    with pytest.raises(DoesNotFit, match=r"300 MiB more.*2.00 GiB.*measured peak.*leaves 250 MiB"):
        settings_after(on, on.planned, Change(name="resident_blocks", value=3), use)
    peak = on.need(on.planned).device_bytes
    tight = ground(budget_bytes=peak + MIB)
    with pytest.raises(DoesNotFit, match="predicted peak"):
        settings_after(tight, tight.planned, Change(name="prefetch", value=3), MemoryInUse())


def test_a_smaller_change_is_made_even_where_the_budget_is_exceeded() -> None:
    on = ground(budget_bytes=GIB, resident_blocks=4)
    less = Change(name="resident_blocks", value=1)
    use = MemoryInUse(device_peak_bytes=(2 * GIB,))
    assert settings_after(on, on.planned, less, use).value("resident_blocks") == 1


def test_without_a_gpu_the_host_has_to_have_room() -> None:
    on = ground(budget_bytes=None)
    change = Change(name="resident_blocks", value=BLOCKS)
    settings_after(on, on.planned, change, MemoryInUse(host_available_bytes=GIB))
    with pytest.raises(DoesNotFit, match="more host memory, and 100 MiB is free"):
        settings_after(on, on.planned, change, MemoryInUse(host_available_bytes=100 * MIB))


@pytest.mark.parametrize(
    ("layout", "change", "reason"),
    [
        ({}, ("chunk_rows", 2), "is 2 already"),
        ({}, ("chunk_rows", 9), "8 rows, use 1 to 8"),
        ({}, ("chunk_rows", 0), "use 1 to 8"),
        ({}, ("resident_blocks", 9), "8 blocks are on the host, use 0 to 8"),
        ({}, ("prefetch", 8), "8 blocks stream, use 1 to 7"),
        ({"resident_blocks": 7}, ("prefetch", 3), "1 blocks stream"),
        ({"offload": "none"}, ("prefetch", 3), "none stream"),
        ({"offload": "optimizer"}, ("resident_blocks", 3), "all weights stay"),
        ({"device_groups": 5}, ("resident_blocks", 5), "4 blocks are on the host"),
        ({}, ("device_groups", 11), "the model has 10 groups, use 0 to 10"),
        ({"offload": "none"}, ("device_groups", 2), "all weights stay"),
    ],
)
def test_what_makes_no_sense_for_a_run_is_refused_with_the_reason(
    layout: dict[str, Any], change: tuple[Any, int], reason: str
) -> None:
    on = ground(**layout)
    with pytest.raises(BadInput, match=reason):
        settings_after(on, on.planned, Change(name=change[0], value=change[1]), MemoryInUse())


@pytest.mark.parametrize(
    "arguments",
    [{}, {"prefetch": 1, "chunk_rows": 2}, {"offload": 3}, {"prefetch": "3"}, {"prefetch": True},
     {"chunk_rows": 2.0}, {"chunk_rows": None}],
)  # fmt: skip
def test_arguments_that_are_no_change_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        parse_change(arguments)
    assert parse_change({"chunk_rows": 4}) == Change(name="chunk_rows", value=4)
    assert parse_change({"placement.chunk_rows": 4}) == Change(name="chunk_rows", value=4)


@given(
    prefetch=st.integers(1, BLOCKS),
    resident=st.integers(0, BLOCKS),
    chunk=st.integers(1, 8),
    change=st.builds(
        Change,
        name=st.sampled_from(LIVE_SETTINGS),
        value=st.integers(0, 10),
    ),
    budget=st.integers(GIB // 2, 4 * GIB),
)
def test_an_accepted_change_never_exceeds_the_budget(
    prefetch: int, resident: int, chunk: int, change: Change, budget: int
) -> None:
    on = ground(budget_bytes=budget)
    now = settings_with(on, prefetch=prefetch, resident_blocks=resident, chunk_rows=chunk)
    try:
        new = settings_after(on, now, change, MemoryInUse())
    except (BadInput, DoesNotFit):
        return
    need = on.device_bytes(new, 0)
    assert need <= budget or need <= on.device_bytes(now, 0)
    assert new.value(change.name) == change.value


def test_blocks_that_leave_the_device_go_back_to_their_files() -> None:
    run = ground(trained=False, disk_groups=5)
    planned = {row.name for row in run.planned.rows if row.weights == "disk"}
    assert len(planned) == 5
    more = changed(run, run.planned, Change(name="device_groups", value=6))
    there = {row.name for row in more.rows if row.weights == "disk"}
    assert there < planned and run.host_bytes(more) <= run.host_bytes(run.planned)
    less = changed(run, more, Change(name="device_groups", value=0))
    assert {row.name for row in less.rows if row.weights == "disk"} == planned
    assert run.host_bytes(less) == run.host_bytes(run.planned)
