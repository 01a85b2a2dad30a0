"""The placement rule never exceeds what there is, and says why it chose what it chose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.errors import EXIT_DOES_NOT_FIT, BadInput, DoesNotFit
from fluxtrain.plan.facts import OFFLOADS, GroupFacts, ModelFacts, Room, RowFacts, Wishes
from fluxtrain.plan.footprint import Layout, activation_estimate, footprint
from fluxtrain.plan.placement import Placement, RunPlacement, place, place_for_any_rows
from fluxtrain.plan.search import AUTO_SHARE, BATCH_LIMIT_ROWS, FIXED_SHARE, HOST_SHARE
from fluxtrain.units import GIB, MIB

# The shape of Qwen2.5-1.5B: 28 blocks, hidden 1536, vocabulary 151,936, tied embedding.
BLOCK_PARAMETERS = 46_797_824
EDGE_PARAMETERS = 151_936 * 1536


def group(name: str, parameters: int, *, trained: bool = True, users: int = 1) -> GroupFacts:
    return GroupFacts(
        name=name,
        kind="block" if name.startswith("layers") else "edge",
        weight_bytes=2 * parameters,
        trained_bf16=parameters if trained else 0,
        users=users,
    )


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


def gpu(device_gib: float, host_gib: float | None = 256.0) -> Room:
    host = None if host_gib is None else int(host_gib * GIB)
    return Room(device_free_bytes=int(device_gib * GIB), host_available_bytes=host)


def because(placement: Placement) -> dict[str, str]:
    """Each choice's reason, by name."""
    return {choice.name: choice.because for choice in placement.choices}


@st.composite
def groups(draw: st.DrawFn, name: str) -> GroupFacts:
    bf16, fp32 = draw(st.integers(0, 200 * MIB)), draw(st.integers(0, 20 * MIB))
    trained = draw(st.sampled_from([(0, 0), (bf16, 0), (0, fp32), (bf16, fp32)]))
    return GroupFacts(
        name=name,
        kind="block" if name.startswith("layers") else "edge",
        weight_bytes=2 * trained[0] + 4 * trained[1] + draw(st.integers(1, 400 * MIB)),
        trained_bf16=trained[0],
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
        head_parameters=draw(st.sampled_from([0, *(g.trained_bf16 for g in edges)])),
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
    Room,
    device_free_bytes=st.none() | sizes,
    host_available_bytes=st.none() | sizes.map(lambda n: 4 * n),
)
wishes = st.builds(
    Wishes,
    offload=st.sampled_from(["auto", "auto", *OFFLOADS]),
    batch_rows=st.none() | st.integers(1, 100),
    chunk_rows=st.none() | st.integers(1, 100),
    device_groups=st.none() | st.none() | st.integers(0, 14),
    resident_blocks=st.none() | st.none() | st.integers(0, 14),
    budget_bytes=st.none() | sizes,
    data_rows=st.none() | st.integers(1, 1000),
    accumulates=st.booleans(),
)


def placed(facts: ModelFacts, room: Room, wish: Wishes) -> RunPlacement | None:
    try:
        return place(facts, room, wish)
    except DoesNotFit:
        return None


@given(models(), rooms, wishes)
def test_no_placement_is_over_the_budget_or_the_host(
    facts: ModelFacts, room: Room, wish: Wishes
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


@given(models(), rooms, wishes)
def test_what_is_predicted_is_the_footprint_of_what_is_decided(
    facts: ModelFacts, room: Room, wish: Wishes
) -> None:
    placement = placed(facts, room, wish)
    if placement is None:
        return
    assert placement.chunk_rows is not None
    layout = Layout(
        offload=placement.offload,
        device_groups=placement.device_groups,
        resident_blocks=placement.resident_blocks,
        batch_rows=placement.batch_rows,
        chunk_rows=placement.chunk_rows,
        accumulates=wish.accumulates,
    )
    assert placement.need == footprint(facts, layout, has_gpu=room.has_gpu)


@given(models(), rooms, wishes)
def test_wishes_are_kept_and_the_rest_is_in_range(
    facts: ModelFacts, room: Room, wish: Wishes
) -> None:
    placement = placed(facts, room, wish)
    if placement is None:
        return
    assert placement.chunk_rows is not None
    assert wish.offload in ("auto", placement.offload)
    assert wish.batch_rows in (None, placement.batch_rows)
    assert 1 <= placement.chunk_rows <= placement.batch_rows
    assert placement.chunk_rows <= (wish.chunk_rows or placement.chunk_rows)
    every = len(facts.groups)
    if wish.device_groups is not None and placement.offload != "none":
        assert placement.device_groups == min(wish.device_groups, every)
    at_home = sum(g.kind == "block" for g in facts.groups[placement.device_groups :])
    if wish.resident_blocks is not None and placement.offload in ("weights", "max"):
        assert placement.resident_blocks == min(wish.resident_blocks, at_home)
    assert 0 <= placement.device_groups <= every
    assert 0 <= placement.resident_blocks <= at_home
    assert placement.slots <= at_home - placement.resident_blocks
    assert (placement.device_groups == every) or (placement.offload != "none")
    assert all(choice.because for choice in placement.choices)
    if wish.batch_rows is None:
        assert placement.batch_rows <= min(BATCH_LIMIT_ROWS, wish.data_rows or BATCH_LIMIT_ROWS)
        assert placement.batch_rows.bit_count() == 1


@given(even_models(), rooms, wishes, sizes)
def test_more_budget_never_gives_less(
    facts: ModelFacts, room: Room, wish: Wishes, more: int
) -> None:
    before = placed(facts, room, wish)
    if before is None:
        return
    wider = None if wish.budget_bytes is None else wish.budget_bytes + more
    free_bytes = room.device_free_bytes
    richer = replace(room, device_free_bytes=None if free_bytes is None else free_bytes + more)
    after = place(facts, richer, replace(wish, budget_bytes=wider))
    assert rank(after) >= rank(before)


def rank(placement: RunPlacement) -> tuple[int, ...]:
    """What the rule prefers, first things first."""
    assert placement.chunk_rows is not None
    return (
        placement.offload != "max",
        placement.batch_rows,
        placement.chunk_rows,
        -OFFLOADS.index(placement.offload),
        placement.device_groups,
        placement.resident_blocks,
    )


@given(even_models(), rooms, wishes)
def test_max_is_the_last_resort(facts: ModelFacts, room: Room, wish: Wishes) -> None:
    placement = placed(facts, room, replace(wish, offload="auto"))
    if placement is None or placement.offload != "max":
        return
    for rows in (1, placement.batch_rows):
        if wish.batch_rows in (None, rows):
            with pytest.raises(DoesNotFit):
                place(facts, room, replace(wish, offload="weights", batch_rows=rows))


@given(even_models(), rooms, wishes)
def test_what_is_left_on_the_device_would_not_hold_one_more(
    facts: ModelFacts, room: Room, wish: Wishes
) -> None:
    wish = replace(wish, offload="auto", device_groups=None, resident_blocks=None)
    placement = placed(facts, room, wish)
    if placement is None or placement.offload != "weights" or not room.has_gpu:
        return
    assert placement.budget_bytes is not None
    assert placement.chunk_rows is not None
    layout = Layout(
        offload="weights",
        device_groups=placement.device_groups,
        resident_blocks=placement.resident_blocks,
        batch_rows=placement.batch_rows,
        chunk_rows=placement.chunk_rows,
        accumulates=wish.accumulates,
    )
    limit = int(placement.budget_bytes * AUTO_SHARE)
    one_more = replace(layout, device_groups=layout.device_groups + 1, resident_blocks=0)
    assert footprint(facts, one_more, has_gpu=True).device_bytes > limit
    if placement.slots:
        one_more = replace(layout, resident_blocks=layout.resident_blocks + 1)
        assert footprint(facts, one_more, has_gpu=True).device_bytes > limit


@given(models(), st.integers(1, 64), st.integers(0, 12), st.booleans())
def test_more_on_the_device_needs_no_more_of_the_host(
    facts: ModelFacts, rows: int, device_groups: int, accumulates: bool
) -> None:
    layout = Layout(
        offload="weights", device_groups=device_groups, batch_rows=rows, chunk_rows=1,
        accumulates=accumulates,
    )  # fmt: skip
    fewer = footprint(facts, layout, has_gpu=True)
    more = footprint(facts, replace(layout, device_groups=device_groups + 1), has_gpu=True)
    none = footprint(facts, replace(layout, offload="none"), has_gpu=True)
    assert fewer.host_bytes >= more.host_bytes >= none.host_bytes == 0
    most = footprint(facts, replace(layout, offload="max"), has_gpu=True)
    assert most.host_bytes >= fewer.host_bytes


@given(models(), rooms, wishes)
def test_a_refusal_names_a_setting_that_really_fits(
    facts: ModelFacts, room: Room, wish: Wishes
) -> None:
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
    changed: dict[str, Any] = {
        "placement.chunk_rows": {"chunk_rows": int(value) if value.isdigit() else None},
        "device_groups": {"device_groups": None, "resident_blocks": None},
        "placement.offload": {"offload": value},
        "train.batch_rows": {"batch_rows": int(value) if value.isdigit() else None},
        "placement.budget_gib": {"budget_bytes": None},
        "all of placement": {
            "offload": "auto",
            "batch_rows": None,
            "chunk_rows": None,
            "device_groups": None,
            "resident_blocks": None,
            "budget_bytes": None,
        },
    }[name]
    place(facts, room, replace(wish, **changed))


def error_names_both_numbers(refusal: str) -> bool:
    return " needs " in refusal and " may be used" in refusal


@given(models(), rooms, wishes)
def test_without_rows_what_is_chosen_leaves_half_of_the_budget(
    facts: ModelFacts, room: Room, wish: Wishes
) -> None:
    fixed = replace(facts, row=None)
    wish = replace(wish, batch_rows=None)
    try:
        placement = place_for_any_rows(fixed, room, wish)
    except DoesNotFit as error:
        assert error_names_both_numbers(str(error))
        return
    assert placement.chunk_rows == wish.chunk_rows
    if placement.budget_bytes is None:
        return
    assert placement.device_bytes <= placement.budget_bytes
    if wish.device_groups is None and wish.resident_blocks is None and wish.offload == "auto":
        chosen = placement.device_groups + placement.resident_blocks > 0
        half = placement.budget_bytes * FIXED_SHARE
        host = room.host_available_bytes
        if chosen and host is None:
            least = replace(wish, offload="weights", device_groups=0, resident_blocks=0)
            assert placement.device_bytes <= half or not _fits(fixed, room, least)


def _fits(facts: ModelFacts, room: Room, wish: Wishes) -> bool:
    try:
        place_for_any_rows(facts, room, wish)
    except DoesNotFit:
        return False
    return True


def test_a_smaller_card_offloads_more() -> None:
    cards = [place(qwen(), gpu(size), Wishes(batch_rows=32)) for size in (80, 40, 24, 16, 9, 6)]
    offloads = ["none", "none", "weights", "weights", "weights", "max"]
    assert [card.offload for card in cards] == offloads
    counts = [card.device_groups for card in cards]
    assert counts[:2] == [30, 30]
    assert 30 > counts[2] > counts[3] > 1
    assert counts[4:] == [0, 0]  # the first group is the embedding: 3 GiB
    assert [card.host_bytes for card in cards] == sorted(card.host_bytes for card in cards)


def test_a_smaller_batch_is_preferred_to_max() -> None:
    placement = place(qwen(), gpu(6), Wishes())
    assert placement.offload == "weights"
    assert placement.batch_rows < 32


def test_spare_memory_goes_to_whole_groups_before_resident_weights() -> None:
    small, large = (
        place(qwen(), gpu(size), Wishes(offload="weights", batch_rows=8)) for size in (12, 15)
    )
    assert 1 < small.device_groups < large.device_groups < 29
    assert small.slots == large.slots == 3
    for placement, size in ((small, 12), (large, 15)):
        left = size * GIB * AUTO_SHARE - placement.device_bytes
        assert left < 2 * BLOCK_PARAMETERS  # no other block's weights
        assert placement.resident_blocks * 2 < 14  # else one more group would have fitted


def test_a_host_that_is_too_small_for_the_rest_gets_a_smaller_batch() -> None:
    """More of the model on the device is the only way to need less of the host."""
    ample = place(qwen(), gpu(16), Wishes())
    tight = place(qwen(), gpu(16, host_gib=ample.host_bytes / GIB / HOST_SHARE - 0.5), Wishes())
    assert ample.batch_rows == 32
    assert tight.batch_rows < 32
    assert tight.device_groups > ample.device_groups
    assert because(tight)["batch_rows"].startswith(f"{tight.batch_rows * 2} rows would need")


def test_reasons_carry_the_numbers_that_decided() -> None:
    placement = place(qwen(), gpu(16), Wishes())
    reasons = because(placement)
    assert "none would need" in reasons["offload"]
    assert "of 14.4 GiB device memory" in reasons["offload"]
    assert "of host memory" in reasons["offload"]
    following = qwen().groups[placement.device_groups].name
    assert f"{following} as well would need" in reasons["device_groups"]
    assert "one more would need" in reasons["resident_blocks"]
    assert "32 rows fit" in reasons["batch_rows"]
    assert "4096 tokens" in reasons["chunk_rows"]


def test_max_is_explained_by_what_the_fewest_rows_would_take_otherwise() -> None:
    placement = place(qwen(), gpu(5, host_gib=None), Wishes(batch_rows=16))
    assert placement.offload == "max"
    assert "offload=weights, 16 rows in chunks of 1 would need" in because(placement)["offload"]
    assert because(placement)["resident_blocks"] == "max streams every block"


def test_a_batch_is_no_larger_than_the_data() -> None:
    placement = place(qwen(), gpu(80), Wishes(data_rows=20))
    assert placement.batch_rows == 16
    assert "20 rows" in because(placement)["batch_rows"]


def test_a_smaller_batch_is_explained_by_what_the_double_would_take() -> None:
    placement = place(qwen(sequence_length=8192), gpu(9), Wishes())
    assert placement.batch_rows < 32
    assert because(placement)["batch_rows"].startswith(
        f"{placement.batch_rows * 2} rows would need"
    )


def test_without_a_gpu_blocks_stream_for_real() -> None:
    room = Room(device_free_bytes=None, host_available_bytes=64 * GIB)
    placement = place(qwen(sequence_length=256), room, Wishes())
    assert placement.offload == "weights"
    assert (placement.device_groups, placement.resident_blocks, placement.slots) == (0, 0, 3)
    assert placement.budget_bytes is None
    assert "without a GPU" in because(placement)["offload"]


def test_residents_can_be_set() -> None:
    placement = place(qwen(), gpu(80), Wishes(device_groups=3, resident_blocks=5))
    assert placement.offload == "weights"
    assert (placement.device_groups, placement.resident_blocks) == (3, 5)
    assert because(placement)["device_groups"] == "as set"
    assert because(placement)["resident_blocks"] == "as set"


def test_more_residents_than_there_are_means_all() -> None:
    placement = place(qwen(), gpu(80), Wishes(offload="weights", device_groups=99))
    assert (placement.device_groups, placement.slots, placement.host_bytes) == (30, 0, 0)
    placement = place(qwen(), gpu(80), Wishes(device_groups=9, resident_blocks=99))
    assert (placement.device_groups, placement.resident_blocks, placement.slots) == (9, 20, 0)


@pytest.mark.parametrize("offload", ["optimizer", "max"])
def test_explicit_optimizer_and_max_keep_every_group_at_home(offload: str) -> None:
    placement = place(qwen(), gpu(80), Wishes(offload=offload))  # type: ignore[arg-type]
    assert placement.device_groups == 0
    assert placement.resident_blocks == (28 if offload == "optimizer" else 0)


def test_a_model_whose_rows_are_not_known_takes_half_of_the_budget() -> None:
    fixed = replace(qwen(), row=None)
    small, middle, large = (place_for_any_rows(fixed, gpu(s), Wishes()) for s in (6, 24, 80))
    assert (small.offload, small.device_groups) == ("weights", 0)
    assert small.resident_blocks == 0
    assert small.device_bytes > 3 * GIB  # even the least takes more than half
    assert middle.offload == "weights"
    assert 12 * GIB - 14 * BLOCK_PARAMETERS < middle.device_bytes <= 12 * GIB
    assert large.offload == "none"
    assert "which leaves the rest to activations" in because(middle)["device_groups"]
    assert [c.name for c in middle.choices] == ["offload", "device_groups", "resident_blocks"]


def test_a_chunk_takes_half_of_what_the_fixed_parts_leave() -> None:
    fixed = replace(qwen(), row=None)
    placement = place_for_any_rows(fixed, gpu(24), Wishes())
    left = 24 * GIB * AUTO_SHARE - placement.device_bytes
    assert placement.chunk_for(row_bytes=int(left) // 20, rows=64) == 10
    assert placement.chunk_for(row_bytes=1, rows=64) == 64
    assert placement.chunk_for(row_bytes=100 * GIB, rows=64) == 1


def test_a_refusal_of_wrap_names_its_arguments() -> None:
    fixed = replace(qwen(), row=None)
    with pytest.raises(DoesNotFit, match="offload=weights fits"):
        place_for_any_rows(fixed, gpu(12), Wishes(offload="none"))
    with pytest.raises(DoesNotFit, match="budget_bytes left out fits"):
        place_for_any_rows(fixed, gpu(24), Wishes(budget_bytes=GIB))


@pytest.mark.parametrize(
    ("room", "wish", "resource", "cure"),
    [
        (gpu(3), Wishes(), "device memory", "smaller model or a machine with more memory"),
        (gpu(8, host_gib=16), Wishes(), "host memory", "smaller model or a machine"),
        (gpu(24), Wishes(offload="none"), "device memory", "placement.offload=weights fits"),
        (gpu(9), Wishes(batch_rows=4000), "device memory", "train.batch_rows=32 fits"),
        (gpu(24), Wishes(budget_bytes=2 * GIB), "device memory", "placement.budget_gib left out"),
        (gpu(9), Wishes(chunk_rows=64, batch_rows=64), "device memory", "placement.chunk_rows=4 "),
        (gpu(24), Wishes(device_groups=30), "device memory", "device_groups left out fits"),
    ],
)
def test_what_does_not_fit_says_the_need_the_room_and_the_cure(
    room: Room, wish: Wishes, resource: str, cure: str
) -> None:
    with pytest.raises(DoesNotFit) as refused:
        place(qwen(), room, wish)
    assert refused.value.exit_code == EXIT_DOES_NOT_FIT
    message = str(refused.value)
    assert resource in message
    assert cure in message
    assert error_names_both_numbers(message)


def test_a_length_that_would_fit_is_named() -> None:
    long = qwen(sequence_length=1 << 17)
    with pytest.raises(DoesNotFit, match=r"data\.sequence_length=\d+ fits"):
        place(long, gpu(6), Wishes())


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        (Wishes(offload="everything"), "use one of auto, none"),  # type: ignore[arg-type]
        (Wishes(batch_rows=0), "batch_rows is 0"),
        (Wishes(chunk_rows=-1), "chunk_rows is -1"),
        (Wishes(budget_bytes=0), "budget_bytes is 0"),
        (Wishes(resident_blocks=-1), "resident_blocks is -1"),
        (Wishes(device_groups=-1), "device_groups is -1"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(wish: Wishes, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        place(qwen(), gpu(80), wish)
