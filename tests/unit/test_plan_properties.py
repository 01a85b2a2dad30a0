"""Invariants of the placement rule over random models, machines and request."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fluxtrain.errors import DoesNotFit
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import (
    OFFLOADS,
    Capacity,
    GroupFacts,
    ModelFacts,
    RowFacts,
    activation_estimate,
)
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import Auto, RunRequest, count_or
from fluxtrain.plan.search import AUTO_SHARE, BATCH_LIMIT_ROWS, FIXED_SHARE, HOST_SHARE
from fluxtrain.units import GIB, MIB
from tests.unit.plan_models import group


@st.composite
def groups(draw: st.DrawFn, name: str) -> GroupFacts:
    half, fp32 = draw(st.integers(0, 200 * MIB)), draw(st.integers(0, 20 * MIB))
    trained = draw(st.sampled_from([(0, 0), (half, 0), (0, fp32), (half, fp32)]))
    bf16 = draw(st.booleans())  # or fp16
    return GroupFacts(
        name=name,
        kind="block" if name.startswith("layers") else "edge",
        weight_bytes=2 * trained[0] + 4 * trained[1] + draw(st.integers(1, 400 * MIB)),
        trained_bf16=trained[0] if bf16 else 0,
        trained_fp16=0 if bf16 else trained[0],
        trained_fp32=trained[1],
        users=draw(st.sampled_from([1, 1, 1, 2])),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    blocks = [draw(groups(f"layers.{i}")) for i in range(draw(st.integers(1, 10)))]
    edges = [draw(groups(f"edge.{i}")) for i in range(draw(st.integers(0, 3)))]
    before = draw(st.integers(0, len(edges)))
    hidden, length = draw(st.integers(8, 4096)), draw(st.integers(1, 4096))
    return ModelFacts(
        groups=(*edges[:before], *blocks, *edges[before:]),
        head_parameters=draw(
            st.sampled_from([0, *(g.trained_bf16 + g.trained_fp16 for g in edges)])
        ),
        loose_bytes=draw(st.integers(0, MIB)),
        groups_at_once=draw(st.integers(1, 3)),
        row=RowFacts(
            hidden=hidden,
            vocabulary=draw(st.integers(2, 200_000)),
            sequence_length=length,
            dtype_bytes=draw(st.sampled_from([2, 4])),
            activation_bytes=activation_estimate(hidden, 4 * hidden, length, 2),
        ),
    )


def even_models() -> st.SearchStrategy[ModelFacts]:
    """Trained models of equal blocks, where each group on the device really takes more of it."""
    return st.builds(
        lambda base, layers, edge: replace(
            base,
            groups=(
                group("embed_tokens", edge, users=2),
                *(group(f"layers.{i}", 30 * MIB) for i in range(layers)),
                group("norm", 4096),
            ),
            head_parameters=edge,
        ),
        models(),
        st.integers(1, 16),
        st.integers(1, 300 * MIB),
    )


sizes = st.floats(8, 16).map(lambda power: int(2**power * MIB))  # 256 MiB to 64 GiB
rooms = st.builds(
    Capacity,
    device_free_bytes=st.none() | sizes,
    host_available_bytes=st.none() | sizes.map(lambda n: 4 * n),
)
requests = st.builds(
    RunRequest,
    offload=st.sampled_from(["auto", "auto", *OFFLOADS]),
    batch_rows=st.none() | st.integers(1, 100),
    chunk_rows=st.just("auto") | st.integers(1, 100),
    device_groups=st.just("auto") | st.just("auto") | st.integers(0, 14),
    resident_blocks=st.just("auto") | st.just("auto") | st.integers(0, 14),
    budget_gib=st.none() | sizes.map(lambda size: size / GIB),
    data_rows=st.none() | st.integers(1, 1000),
    passes=st.sampled_from((1, 1, 2, 3)),
)


def placed(facts: ModelFacts, room: Capacity, wish: RunRequest) -> Placement | None:
    try:
        return place(facts, room, wish)
    except DoesNotFit:
        return None


@given(models(), rooms, requests)
def test_no_placement_is_over_the_budget_or_the_host(
    facts: ModelFacts, room: Capacity, wish: RunRequest
) -> None:
    placement = placed(facts, room, wish)
    if placement is None:
        return
    if placement.budget_bytes is not None and wish.offload == "auto":
        assert placement.device_bytes <= placement.budget_bytes * AUTO_SHARE
    for given_bytes in (room.device_free_bytes, wish.budget_bytes):
        assert given_bytes is None or placement.device_bytes <= given_bytes
    if room.host_available_bytes is not None:
        share = HOST_SHARE if wish.offload == "auto" else 1.0
        assert placement.host_bytes <= room.host_available_bytes * share


@given(models(), rooms, requests)
def test_what_is_predicted_is_the_footprint_of_what_is_decided(
    facts: ModelFacts, room: Capacity, wish: RunRequest
) -> None:
    placement = placed(facts, room, wish)
    if placement is None:
        return
    assert placement.chunk_rows is not None
    layout = Layout(
        offload=placement.offload,
        device_groups=placement.layout.device_groups,
        resident_blocks=placement.layout.resident_blocks,
        batch_rows=placement.batch_rows,
        chunk_rows=placement.chunk_rows,
        passes=wish.passes,
    )
    assert placement.need == footprint(facts, layout, has_gpu=room.has_gpu)


@given(models(), rooms, requests)
def test_wishes_are_kept_and_the_rest_is_in_range(
    facts: ModelFacts, room: Capacity, wish: RunRequest
) -> None:
    placement = placed(facts, room, wish)
    if placement is None:
        return
    assert placement.chunk_rows is not None
    assert wish.offload in ("auto", placement.offload)
    assert wish.batch_rows in (None, placement.batch_rows)
    assert 1 <= placement.chunk_rows <= placement.batch_rows
    assert placement.chunk_rows <= count_or(wish.chunk_rows, placement.chunk_rows)
    every = len(facts.groups)
    if wish.device_groups != "auto" and placement.offload != "none":
        assert placement.layout.device_groups == min(wish.device_groups, every)
    at_home = sum(g.kind == "block" for g in facts.groups[placement.layout.device_groups :])
    if wish.resident_blocks != "auto" and placement.offload in ("weights", "max"):
        assert placement.layout.resident_blocks == min(wish.resident_blocks, at_home)
    assert 0 <= placement.layout.device_groups <= every
    assert 0 <= placement.layout.resident_blocks <= at_home
    assert placement.slots <= at_home - placement.layout.resident_blocks
    assert (placement.layout.device_groups == every) or (placement.offload != "none")
    assert all(choice.because for choice in placement.choices)
    if wish.batch_rows is None:
        assert placement.batch_rows <= min(BATCH_LIMIT_ROWS, wish.data_rows or BATCH_LIMIT_ROWS)
        assert placement.batch_rows.bit_count() == 1


@given(even_models(), rooms, requests, sizes)
def test_more_budget_never_gives_less(
    facts: ModelFacts, room: Capacity, wish: RunRequest, more: int
) -> None:
    before = placed(facts, room, wish)
    if before is None:
        return
    wider = None if wish.budget_bytes is None else (wish.budget_bytes + more) / GIB
    free_bytes = room.device_free_bytes
    richer = replace(room, device_free_bytes=None if free_bytes is None else free_bytes + more)
    after = place(facts, richer, replace(wish, budget_gib=wider))
    assert rank(after) >= rank(before)


def rank(placement: Placement) -> tuple[int, ...]:
    """What the rule prefers, first things first."""
    assert placement.chunk_rows is not None
    return (
        placement.offload != "max",
        placement.batch_rows,
        placement.chunk_rows,
        -OFFLOADS.index(placement.offload),
        placement.layout.device_groups,
        placement.layout.resident_blocks,
    )


@settings(max_examples=12)
@given(even_models(), rooms, requests)
def test_max_is_the_last_resort(facts: ModelFacts, room: Capacity, wish: RunRequest) -> None:
    wish = replace(wish, chunk_rows="auto")  # so that both questions leave the same reserve
    placement = placed(facts, room, replace(wish, offload="auto"))
    if placement is None or placement.offload != "max":
        return
    for rows in (1, placement.batch_rows):
        if wish.batch_rows in (None, rows):
            with pytest.raises(DoesNotFit):
                place(facts, room, replace(wish, offload="weights", batch_rows=rows))


@settings(max_examples=12)
@given(even_models(), rooms, requests)
def test_what_is_left_on_the_device_would_not_hold_one_more(
    facts: ModelFacts, room: Capacity, wish: RunRequest
) -> None:
    wish = replace(wish, offload="auto", device_groups="auto", resident_blocks="auto")
    placement = placed(facts, room, wish)
    if placement is None or placement.offload != "weights" or not room.has_gpu:
        return
    assert placement.budget_bytes is not None
    assert placement.chunk_rows is not None
    layout = Layout(
        offload="weights",
        device_groups=placement.layout.device_groups,
        resident_blocks=placement.layout.resident_blocks,
        batch_rows=placement.batch_rows,
        chunk_rows=placement.chunk_rows,
        passes=wish.passes,
    )
    limit = int(placement.budget_bytes * AUTO_SHARE)
    one_more = replace(layout, device_groups=layout.device_groups + 1, resident_blocks=0)
    assert footprint(facts, one_more, has_gpu=True).device_bytes > limit
    if placement.slots:
        one_more = replace(layout, resident_blocks=layout.resident_blocks + 1)
        assert footprint(facts, one_more, has_gpu=True).device_bytes > limit


@given(models(), st.integers(1, 64), st.integers(0, 12), st.integers(1, 3))
def test_more_on_the_device_needs_no_more_of_the_host(
    facts: ModelFacts, rows: int, device_groups: int, passes: int
) -> None:
    layout = Layout(
        offload="weights", device_groups=device_groups, batch_rows=rows, chunk_rows=1,
        passes=passes,
    )  # fmt: skip
    fewer = footprint(facts, layout, has_gpu=True)
    more = footprint(facts, replace(layout, device_groups=device_groups + 1), has_gpu=True)
    none = footprint(facts, replace(layout, offload="none"), has_gpu=True)
    assert fewer.host_bytes >= more.host_bytes >= none.host_bytes == 0
    most = footprint(facts, replace(layout, offload="max"), has_gpu=True)
    assert most.host_bytes >= fewer.host_bytes


@given(models(), rooms, requests, st.just("auto") | st.integers(0, 14))
def test_a_refusal_names_a_setting_that_really_fits(
    facts: ModelFacts, room: Capacity, wish: RunRequest, blocks_without_recompute: int | Auto
) -> None:
    wish = replace(wish, blocks_without_recompute=blocks_without_recompute)
    try:
        place(facts, room, wish)
        return
    except DoesNotFit as error:
        refusal = str(error)
    assert error_names_both_numbers(refusal)
    cure = refusal.rpartition(": ")[2]
    if not cure.endswith(" fits"):
        return
    name, _, value = cure.removesuffix(" fits").removesuffix(" left out").partition("=")
    if name == "data.sequence_length":
        assert facts.row is not None
        place(replace(facts, row=facts.row.of_length(int(value))), room, wish)
        return
    cures: dict[str, dict[str, Any]] = {
        "placement.chunk_rows": {"chunk_rows": int(value) if value.isdigit() else "auto"},
        "placement.device_groups": {"device_groups": "auto"},
        "placement.resident_blocks": {"resident_blocks": "auto"},
        "placement.blocks_without_recompute": {"blocks_without_recompute": "auto"},
        "placement.device_groups and placement.resident_blocks": {
            "device_groups": "auto",
            "resident_blocks": "auto",
        },
        "placement.offload": {"offload": value or "auto"},
        "train.batch_rows": {"batch_rows": int(value) if value.isdigit() else None},
        "train.accumulation": {"passes": 1},
        "placement.budget_gib": {"budget_gib": None},
        "all of placement": UNPLACED,
        "train.batch_rows and all of placement": {**UNPLACED, "batch_rows": None},
    }
    place(facts, room, replace(wish, **cures[name]))


def test_a_setting_that_fits_only_where_it_is_left_to_the_rule_is_not_named() -> None:
    """Left to the rule, `max` puts the large first part on the device, which saves slots of its
    size; asked for, it needs more than there is."""
    size = 100 * MIB  # of the large part, and of a row's boundary
    facts = ModelFacts(
        groups=tuple(
            GroupFacts(name=f"layers.{at}", kind="block", weight_bytes=size if at == 0 else 1000)
            for at in range(4)
        ),
        groups_at_once=3,
        row=RowFacts(
            hidden=size // 4096, vocabulary=16, sequence_length=1024, dtype_bytes=4,
            activation_bytes=1000,
        ),
    )  # fmt: skip
    room = Capacity(device_free_bytes=int(6.5 * size / AUTO_SHARE), host_available_bytes=None)
    wish = RunRequest(offload="none", batch_rows=1)
    by_itself = place(facts, room, replace(wish, offload="auto"))
    assert (by_itself.offload, by_itself.layout.device_groups > 0) == ("max", True)
    with pytest.raises(DoesNotFit):
        place(facts, room, replace(wish, offload="max"))
    with pytest.raises(DoesNotFit, match="placement.offload left out fits"):
        place(facts, room, wish)


UNPLACED: dict[str, Any] = {
    "offload": "auto",
    "chunk_rows": "auto",
    "device_groups": "auto",
    "resident_blocks": "auto",
    "blocks_without_recompute": "auto",
    "budget_gib": None,
}


def error_names_both_numbers(refusal: str) -> bool:
    return " needs " in refusal and " may be used" in refusal


ONE_LARGE = [  # streamed as a whole it takes 17 bytes more than may be chosen
    GroupFacts(name="layers.0", kind="block", weight_bytes=1, trained_bf16=0),
    GroupFacts(name="layers.1", kind="block", weight_bytes=1, trained_bf16=0),
    GroupFacts(
        name="layers.2", kind="block", weight_bytes=34513133, trained_bf16=0, trained_fp32=8628283
    ),
]


@given(models(), rooms, requests)
@example(
    ModelFacts(groups=tuple(ONE_LARGE)),
    Capacity(device_free_bytes=256 * MIB, host_available_bytes=None),
    RunRequest(offload="auto"),
)
def test_without_rows_what_is_chosen_leaves_half_of_the_budget(
    facts: ModelFacts, room: Capacity, wish: RunRequest
) -> None:
    fixed = replace(facts, row=None)
    wish = replace(wish, batch_rows=None)
    try:
        placement = place(fixed, room, wish)
    except DoesNotFit as error:
        assert error_names_both_numbers(str(error))
        return
    assert (placement.chunk_rows or "auto") == wish.chunk_rows
    if placement.budget_bytes is None:
        return
    assert placement.device_bytes <= placement.budget_bytes
    if wish.device_groups == wish.resident_blocks == "auto" and wish.offload == "auto":
        chosen = placement.layout.device_groups + placement.layout.resident_blocks > 0
        half = placement.budget_bytes * FIXED_SHARE
        host = room.host_available_bytes
        if chosen and host is None:
            least = replace(wish, offload="weights", device_groups=0, resident_blocks=0)
            most = int(placement.budget_bytes * AUTO_SHARE)
            assert placement.device_bytes <= half or _needs(fixed, room, least) > most


def _needs(facts: ModelFacts, room: Capacity, wish: RunRequest) -> float:
    """Bytes of the device; endless where it does not fit."""
    try:
        return place(facts, room, wish).device_bytes
    except DoesNotFit:
        return math.inf
