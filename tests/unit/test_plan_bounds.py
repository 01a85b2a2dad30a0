"""The fastest layout is found without timing every one, and not by luck."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.plan.choices.ranked import Frontier
from fluxtrain.plan.cost.calibration import Calibration, HostTimes, Line
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.cost.step import cost, least_cost
from fluxtrain.plan.facts import (
    OFFLOADS,
    Capacity,
    GroupFacts,
    Groups,
    HeadFacts,
    ModelFacts,
    RowFacts,
)
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import MOST_COUNTS, SOME_COUNTS, Search, tried_counts
from fluxtrain.units import GIB
from tests.unit.test_plan_properties import even_models, models

layouts = st.builds(
    Layout,
    offload=st.sampled_from(OFFLOADS),
    device_groups=st.integers(0, 14),
    device_first=st.sampled_from(["embedding", "blocks"]),
    resident_blocks=st.integers(0, 10),
    blocks_without_recompute=st.integers(0, 10),
    activations=st.sampled_from(["device", "host"]),
    activations_on_device=st.integers(0, 10),
    batch_rows=st.integers(1, 8),
    chunk_rows=st.integers(1, 8),
    embedding=st.sampled_from(["whole", "rows"]),
    deferred_moments=st.booleans(),
)
per_s = st.floats(6, 12).map(lambda power: 10**power)
lines = st.builds(Line, base=st.floats(0, 0.1), slope=st.floats(0, 0.1))
HOST_TIMES = {
    name: lines if str(field.type) == "Line" else st.floats(0, 0.1)
    for name, field in HostTimes.__dataclass_fields__.items()
}
calibrations = st.builds(
    Calibration,
    forward=lines,
    backward=lines,
    outside_forward=lines,
    outside_backward=lines,
    activation_bytes=st.integers(1, GIB),
    kept_backward=st.none() | lines,
    kept_bytes=st.integers(1, 1 << 26),
    host_block_s=st.floats(0, 0.1),
    host_forward_s=st.floats(0, 0.1),
    host=st.none() | st.builds(HostTimes, **HOST_TIMES),
    device_update_s=st.floats(0, 1e-9),
    rows=st.just((1, 4)),
    measured_at_s=st.just(0.0),
    measuring_s=st.just(1.0),
)
gpus = st.builds(
    Rates,
    has_gpu=st.just(True),
    matmul_per_s=st.just(1e14),
    adamw_per_s=per_s,
    adamw_weights_per_s=st.none() | per_s,
    adamw_moments_per_s=st.none() | per_s,
    adamw_beside_per_s=st.none() | per_s,
    h2d_bytes_per_s=per_s,
    d2h_bytes_per_s=per_s,
    calibration=st.none() | calibrations,
)
cores = st.builds(
    Rates,
    has_gpu=st.just(False),
    matmul_per_s=st.just(1e11),
    adamw_per_s=per_s,
    copy_bytes_per_s=per_s,
)


def with_table(facts: ModelFacts, table_rows: int) -> ModelFacts:
    """Rows of its first group can be looked up where that is an edge."""
    first, *others = facts.groups
    rows = table_rows if first.kind == "edge" else 0
    return replace(facts, groups=(replace(first, table_rows=rows), *others))


@given(models(), st.integers(0, 4096), layouts, gpus | cores, st.booleans(), st.integers(1, 3))
def test_no_step_is_shorter_than_its_bound(
    facts: ModelFacts, table_rows: int, layout: Layout, rates: Rates, in_backward: bool, passes: int
) -> None:
    facts, layout = (
        with_table(facts, table_rows),
        replace(layout, optimizer_in_backward=in_backward),
    )
    otherwise = replace(layout, deferred_moments=not layout.deferred_moments)
    one, other = (
        cost(facts, at, rates, clips=not in_backward, passes=passes) for at in (layout, otherwise)
    )
    told, free = (
        least_cost(facts, layout, rates, clips=not in_backward, passes=passes, moments_free=either)
        for either in (False, True)
    )
    assert told.step_s <= one.step_s * (1 + 1e-9)
    assert told.carried_s == pytest.approx(one.carried_s)
    assert free.step_s <= min(one.step_s, other.step_s) * (1 + 1e-9)
    assert free.carried_s <= min(one.carried_s, other.carried_s) * (1 + 1e-9)


@settings(max_examples=15)
@given(even_models(), st.floats(2, 30), gpus, st.booleans(), st.floats(0, 1))
def test_no_layout_within_a_stop_is_faster_than_the_one_that_is_chosen(
    facts: ModelFacts, device_gib: float, rates: Rates, in_backward: bool, share: float
) -> None:
    room = Capacity(device_free_bytes=int(device_gib * GIB), host_available_bytes=None)
    search = Search(facts, room, RunRequest(batch_rows=2, optimizer_in_backward=in_backward))
    dial = Frontier(search, rates, clips=not in_backward)
    if not dial.candidates:
        return
    chosen = dial.at(share)
    for one in dial.within(share):
        alone = dial.fastest([one])
        assert alone.layout == replace(one.layout, deferred_moments=alone.layout.deferred_moments)
        assert chosen.cost.step_s <= alone.cost.step_s + 1e-9


@pytest.mark.parametrize("most", [0, 1, 36, MOST_COUNTS])
def test_every_number_of_groups_is_tried(most: int) -> None:
    assert tried_counts(most) == list(range(most + 1))


@pytest.mark.parametrize("most", [MOST_COUNTS + 1, 1000, 1_000_000])
def test_of_many_groups_some_numbers_are_tried_with_none_and_all(most: int) -> None:
    tried = tried_counts(most)
    assert tried[0] == 0
    assert tried[-1] == most
    assert len(tried) == SOME_COUNTS + 1
    assert tried == sorted(set(tried))


def looks_of(blocks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Groups that were iterated over while layouts were weighed, and how many layouts."""
    seen = 0
    groups = [
        GroupFacts(name=f"layers.{i}", kind="block", weight_bytes=2000, trained_bf16=1000)
        for i in range(blocks)
    ]
    edge = GroupFacts(name="lm_head", kind="edge", weight_bytes=64_000, trained_bf16=32_000)
    head = HeadFacts(
        group="lm_head", vocabulary=64, row_bytes=1000, dtype_bytes=2, trained=True, tied=False
    )
    row = RowFacts(
        hidden=16, vocabulary=64, sequence_length=8, dtype_bytes=2, activation_bytes=4000
    )
    facts = ModelFacts(groups=(*groups, edge), row=row, head=head)
    whole = Groups.__iter__

    def counted(some: Groups) -> Iterator[GroupFacts]:
        nonlocal seen
        seen += len(some)
        return whole(some)

    request = RunRequest(batch_rows=4, chunk_rows=4, offload="weights")
    room = Capacity(device_free_bytes=GIB, host_available_bytes=GIB)
    dial = Frontier(
        Search(facts, room, request),
        Rates(
            has_gpu=True,
            matmul_per_s=1e14,
            adamw_per_s=1e9,
            copy_bytes_per_s=5e10,
            h2d_bytes_per_s=5e10,
            d2h_bytes_per_s=5e10,
        ),
    )
    with monkeypatch.context() as counting:
        counting.setattr(Groups, "__iter__", counted)
        layouts = len(dial.candidates)
    return seen, layouts


def test_a_layout_of_many_groups_is_weighed_without_looking_at_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, weighed = looks_of(3000, monkeypatch)
    homes = 2 * (SOME_COUNTS + 1)  # embedding or blocks first
    assert weighed > 8 * homes
    assert seen < 4 * homes * 3000, "sums are taken once for each way to part the groups"
