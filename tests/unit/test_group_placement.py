"""The placement table says of each group what the planner's counts mean for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.core.memory.group_memory import refuse_tiers
from fluxtrain.errors import BadInput
from fluxtrain.plan.facts import GroupFacts, HeadFacts, ModelFacts
from fluxtrain.plan.footprint import Layout, by_tier, keepable_count, kept_count, streamed_count
from fluxtrain.plan.group_placement import (
    GroupPlacement,
    alike,
    check_groups,
    check_rows,
    table_of,
)

BLOCKS = 6


def facts(*, tied: bool = False) -> ModelFacts:
    users = 2 if tied else 1
    edges = [GroupFacts(name="embed", kind="edge", weight_bytes=64, users=users, table_rows=8)]
    edges += [GroupFacts(name="norm", kind="edge", weight_bytes=8)]
    edges += [] if tied else [GroupFacts(name="head", kind="edge", weight_bytes=64)]
    blocks = [GroupFacts(name=f"layer{i}", kind="block", weight_bytes=32) for i in range(BLOCKS)]
    head = HeadFacts(
        group="embed" if tied else "head", vocabulary=8, row_bytes=8, dtype_bytes=2, trained=True,
        tied=tied,
    )  # fmt: skip
    return ModelFacts(groups=(edges[0], *blocks, *edges[1:]), head=head)


layouts = st.builds(
    Layout,
    offload=st.sampled_from(["none", "optimizer", "weights", "max"]),
    device_groups=st.integers(0, BLOCKS + 3),
    device_first=st.sampled_from(["embedding", "blocks"]),
    resident_blocks=st.integers(0, BLOCKS),
    blocks_without_recompute=st.integers(0, BLOCKS),
    activations=st.sampled_from(["device", "host"]),
    activations_on_device=st.integers(0, BLOCKS),
    embedding=st.sampled_from(["whole", "rows"]),
    head=st.sampled_from(["whole", "chunks"]),
)


@given(layouts, st.booleans())
def test_rows_add_up_to_the_counts_that_they_are_made_of(layout: Layout, tied: bool) -> None:
    model = facts(tied=tied)
    rows = table_of(model, layout)
    assert [row.name for row in rows] == [group.name for group in model.groups]
    on_device = [group.name for group in by_tier(model, layout)["device"]]
    assert [row.name for row in rows if row.weights == "device"] == on_device
    assert all(row.weights == row.state == row.gradients for row in rows)
    streaming = [r for r in rows if r.kind == "block" and r.weights == "host" and not r.resident]
    assert len(streaming) == streamed_count(model, layout)
    kept = [row for row in rows if row.activations == "kept"]
    assert len(kept) == kept_count(model, layout) <= keepable_count(model, layout)
    assert all(row.resident or row.weights == "device" for row in kept)
    waiting = [r for r in rows if r.kind == "block" and r.activations == "inputs_on_host"]
    expected = (
        BLOCKS - len(kept) - layout.activations_on_device if layout.offloads_activations else 0
    )
    assert len(waiting) == max(0, expected)


@given(layouts)
def test_inputs_stay_on_the_device_from_one_block_on_to_the_end(layout: Layout) -> None:
    recomputed = [r.activations for r in table_of(facts(), layout) if r.activations != "kept"]
    assert recomputed == sorted(recomputed, reverse=True)  # those on the host come first


def test_a_tied_embedding_has_a_way_for_the_lookup_and_one_for_the_head() -> None:
    by_rows = Layout(offload="weights", embedding="rows")
    assert table_of(facts(tied=True), by_rows)[0].transfers == ("rows", "whole")
    assert table_of(facts(), by_rows)[0].transfers == ("rows",)
    both = replace(by_rows, head="chunks")
    assert table_of(facts(tied=True), both)[0].transfers == ("rows", "vocabulary_chunks")
    assert table_of(facts(), both)[-1].transfers == ("vocabulary_chunks",)
    whole = replace(both, embedding="whole")  # a tied head comes in chunks only beside rows
    assert table_of(facts(tied=True), whole)[0].transfers == ("whole",)


def test_only_what_is_copied_whole_has_a_copy_that_stays() -> None:
    rows = table_of(facts(), Layout(offload="weights", embedding="rows", head="chunks"))
    assert [row.name for row in rows if row.resident] == ["norm"]


@dataclass
class Named:
    name: str


def test_a_table_of_another_model_is_refused_at_the_first_group_that_differs() -> None:
    rows = table_of(facts(), Layout(offload="weights"))
    check_groups(rows, [Named(row.name) for row in rows])
    with pytest.raises(BadInput, match=r"number 2: layer0 in the placement, block0 in the model"):
        check_groups(rows, [Named(row.name.replace("layer", "block")) for row in rows])
    with pytest.raises(BadInput, match=r"has 9 groups and the model has 8.*head in the placement"):
        check_groups(rows, [Named(row.name) for row in rows[:-1]])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (GroupPlacement(name="a", weights="disk"), "weights cannot live on disk here"),
        (GroupPlacement(name="a", gradients="disk"), "gradients cannot live on disk"),
        (replace(GroupPlacement.on("device", name="a"), state="disk"), "cannot be apart yet"),
        (GroupPlacement(name="a", weights="device"), "cannot be apart yet"),
        (GroupPlacement.on("moon", name="a"), "a: weights is 'moon': use one of device, host"),  # type: ignore[arg-type]
        (GroupPlacement(name="a", activations="x"), "activations is 'x': use one of kept"),  # type: ignore[arg-type]
        (GroupPlacement(name="a", transfers=("x",)), "transfer 'x' is unknown: use whole"),  # type: ignore[arg-type]
        (GroupPlacement(name="a", card=1), "there is no card 1: use one of 0 to 0"),
    ],
)
def test_what_the_engine_cannot_do_yet_is_refused(row: GroupPlacement, reason: str) -> None:
    usual = [GroupPlacement.on("host"), GroupPlacement.on("device")]
    check_rows(usual)
    refuse_tiers([*usual, GroupPlacement(name="a", weights="disk")], on_disk=["a"])

    def check() -> None:
        check_rows([row])
        refuse_tiers([row])

    with pytest.raises(BadInput, match=reason):
        check()


@given(layouts)
def test_the_compact_table_has_every_group_once_with_its_row(layout: Layout) -> None:
    rows = table_of(facts(), layout)
    told = alike(rows)
    assert len({replace(row, name="", kind="block") for row in rows}) == len(told)
    found = {}
    for one in told:
        for span in one.groups.split(","):
            first, _, last = span.partition("-")
            found |= dict.fromkeys(range(int(first), int(last or first) + 1), one)
    assert sorted(found) == list(range(len(rows)))
    for at, row in enumerate(rows):
        assert (found[at].weights, found[at].activations) == (row.weights, row.activations)
        assert (found[at].transfers, found[at].resident) == (row.transfers, row.resident)
