"""The placement rule never exceeds what there is, and says why it chose what it chose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.errors import EXIT_DOES_NOT_FIT, BadInput, DoesNotFit
from fluxtrain.plan.footprint import (
    OFFLOADS,
    Layout,
    ModelFacts,
    activation_row_estimate,
    footprint,
)
from fluxtrain.plan.placement import (
    AUTO_SHARE,
    BATCH_LIMIT_ROWS,
    HOST_SHARE,
    Placement,
    Room,
    Wishes,
    place,
)
from fluxtrain.units import GIB, MIB

# The shape of Qwen2.5-1.5B: 28 blocks, hidden 1536, vocabulary 151,936, tied embedding.
BLOCK_PARAMETERS = 46_797_824
EDGE_PARAMETERS = 151_936 * 1536


def qwen(sequence_length: int = 1024, layers: int = 28) -> ModelFacts:
    return ModelFacts(
        block_bytes=(BLOCK_PARAMETERS * 2,) * layers,
        edge_bytes=EDGE_PARAMETERS * 2,
        trained_parameters=layers * BLOCK_PARAMETERS + EDGE_PARAMETERS,
        dtype_bytes=2,
        activation_row_bytes=activation_row_estimate(1536, sequence_length, 2),
        hidden=1536,
        vocabulary=151_936,
        sequence_length=sequence_length,
    )


def gpu(device_gib: float, host_gib: float | None = 256.0) -> Room:
    host = None if host_gib is None else int(host_gib * GIB)
    return Room(device_free_bytes=int(device_gib * GIB), host_available_bytes=host)


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    dtype = draw(st.sampled_from([2, 4]))
    blocks = tuple(draw(st.lists(st.integers(1, 400 * MIB), min_size=1, max_size=12)))
    edge = draw(st.integers(0, 800 * MIB))
    hidden, length = draw(st.integers(8, 4096)), draw(st.integers(1, 4096))
    return ModelFacts(
        block_bytes=blocks,
        edge_bytes=edge,
        trained_parameters=draw(st.integers(0, (sum(blocks) + edge) // dtype)),
        dtype_bytes=dtype,
        activation_row_bytes=activation_row_estimate(hidden, length, dtype),
        hidden=hidden,
        vocabulary=draw(st.integers(2, 200_000)),
        sequence_length=length,
    )


sizes = st.floats(8, 16).map(lambda power: int(2**power * MIB))  # 256 MiB to 64 GiB
rooms = st.builds(
    Room,
    device_free_bytes=st.none() | sizes,
    host_available_bytes=st.none() | sizes.map(lambda n: 4 * n),
)
wishes = st.builds(
    Wishes,
    offload=st.sampled_from(["auto", *OFFLOADS]),
    batch_rows=st.none() | st.integers(1, 100),
    chunk_rows=st.none() | st.integers(1, 100),
    budget_bytes=st.none() | sizes,
    data_rows=st.none() | st.integers(1, 1000),
)


@given(models(), rooms, wishes)
def test_no_placement_is_over_the_budget_or_the_host(
    facts: ModelFacts, room: Room, wish: Wishes
) -> None:
    try:
        placement = place(facts, room, wish)
    except DoesNotFit:
        return
    if placement.budget_bytes is not None:
        assert placement.device_bytes <= placement.budget_bytes
        assert (
            wish.offload != "auto" or placement.device_bytes <= placement.budget_bytes * AUTO_SHARE
        )
    for given_bytes in (room.device_free_bytes, wish.budget_bytes):
        assert given_bytes is None or placement.device_bytes <= given_bytes
    if room.host_available_bytes is not None:
        assert placement.host_bytes <= room.host_available_bytes * HOST_SHARE


@given(models(), rooms, wishes)
def test_wishes_are_kept_and_the_rest_is_in_range(
    facts: ModelFacts, room: Room, wish: Wishes
) -> None:
    try:
        placement = place(facts, room, wish)
    except DoesNotFit:
        return
    assert wish.offload in ("auto", placement.offload)
    assert wish.batch_rows in (None, placement.batch_rows)
    assert 1 <= placement.chunk_rows <= placement.batch_rows
    assert placement.chunk_rows <= (wish.chunk_rows or placement.chunk_rows)
    assert 0 <= placement.resident_blocks <= facts.layers
    assert placement.slots <= facts.layers - placement.resident_blocks
    assert all(choice.because for choice in placement.choices.values())
    if wish.batch_rows is None:
        assert placement.batch_rows <= min(BATCH_LIMIT_ROWS, wish.data_rows or BATCH_LIMIT_ROWS)
        assert placement.batch_rows.bit_count() == 1


@given(models(), rooms, wishes, sizes)
def test_more_budget_never_gives_less(
    facts: ModelFacts, room: Room, wish: Wishes, more: int
) -> None:
    try:
        before = place(facts, room, wish)
    except DoesNotFit:
        return
    wider = None if wish.budget_bytes is None else wish.budget_bytes + more
    free_bytes = room.device_free_bytes
    richer = replace(room, device_free_bytes=None if free_bytes is None else free_bytes + more)
    after = place(facts, richer, replace(wish, budget_bytes=wider))
    assert after.batch_rows >= before.batch_rows
    if after.batch_rows == before.batch_rows:
        assert after.chunk_rows >= before.chunk_rows
        if after.chunk_rows == before.chunk_rows:
            assert OFFLOADS.index(after.offload) <= OFFLOADS.index(before.offload)
            if after.offload == before.offload:
                assert after.resident_blocks >= before.resident_blocks


@given(models(), st.integers(1, 64), st.integers(0, 12), st.booleans())
def test_each_offload_step_takes_no_more_of_the_device(
    facts: ModelFacts, rows: int, resident: int, has_gpu: bool
) -> None:
    kept = min(resident, facts.layers)
    needs = [
        footprint(
            facts,
            Layout(offload=o, resident_blocks=kept, batch_rows=rows, chunk_rows=1),
            has_gpu=has_gpu,
        )
        for o in ("optimizer", "weights", "max")
    ]
    weights, streamed, least = (need.device_bytes for need in needs)
    largest = max(facts.block_bytes)
    assert least <= streamed <= weights + 3 * largest
    assert all(need.host_bytes >= facts.host_arena_bytes for need in needs)


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
    if cure.endswith(" fits"):
        name, _, value = cure.removesuffix(" fits").removesuffix(" left out").partition("=")
        changed: dict[str, Any] = {
            "placement.chunk_rows": {"chunk_rows": int(value) if value.isdigit() else None},
            "placement.offload": {"offload": value},
            "train.batch_rows": {"batch_rows": int(value) if value.isdigit() else None},
            "placement.budget_gib": {"budget_bytes": None},
            "all of placement": {
                "offload": "auto",
                "batch_rows": None,
                "chunk_rows": None,
                "budget_bytes": None,
            },
        }[name]
        place(facts, room, replace(wish, **changed))


def error_names_both_numbers(refusal: str) -> bool:
    return " needs " in refusal and " may be used" in refusal


def test_a_trained_bf16_parameter_takes_14_bytes_of_the_host_and_fp32_16() -> None:
    facts = qwen()
    layout = Layout(offload="optimizer", resident_blocks=28, batch_rows=1, chunk_rows=1)
    assert footprint(facts, layout, has_gpu=True).host_bytes == 14 * facts.trained_parameters
    fp32 = replace(
        facts,
        dtype_bytes=4,
        block_bytes=tuple(2 * size for size in facts.block_bytes),
        edge_bytes=2 * facts.edge_bytes,
    )
    assert footprint(fp32, layout, has_gpu=True).host_bytes == 16 * facts.trained_parameters


def test_frozen_weights_take_no_state() -> None:
    facts = replace(qwen(), trained_parameters=1000)
    layout = Layout(offload="weights", resident_blocks=0, batch_rows=1, chunk_rows=1)
    need = footprint(facts, layout, has_gpu=True)
    assert need.host_bytes == facts.weight_bytes + 12 * 1000
    trained = footprint(qwen(), layout, has_gpu=True)
    assert need.device_bytes < trained.device_bytes


def test_without_a_gpu_the_device_buffer_counts_as_host_memory() -> None:
    layout = Layout(offload="weights", resident_blocks=0, batch_rows=4, chunk_rows=2)
    with_gpu = footprint(qwen(), layout, has_gpu=True)
    without = footprint(qwen(), layout, has_gpu=False)
    assert without.host_bytes == with_gpu.host_bytes + with_gpu.device_bytes


@pytest.mark.parametrize(
    ("device_gib", "offload"),
    [(80, "none"), (16, "optimizer"), (10, "weights"), (7, "max")],
)
def test_a_smaller_card_offloads_more(device_gib: float, offload: str) -> None:
    placement = place(qwen(), gpu(device_gib), Wishes())
    assert placement.offload == offload
    assert placement.batch_rows == 32


def resident_at(device_gib: float) -> Placement:
    return place(qwen(), gpu(device_gib), Wishes(offload="weights", batch_rows=8))


def test_spare_memory_goes_to_resident_blocks() -> None:
    small, large = resident_at(6), resident_at(7)
    assert 0 < small.resident_blocks < large.resident_blocks < 28
    assert small.slots == large.slots == 3
    assert large.device_bytes + BLOCK_PARAMETERS * 2 > 7 * GIB * AUTO_SHARE  # not one more


def test_reasons_carry_the_numbers_that_decided() -> None:
    placement = place(qwen(), gpu(10), Wishes())
    offload = placement.choices["offload"]
    assert offload.value == "weights"
    assert "optimizer would need" in offload.because
    assert "of 9.00 GiB device memory" in offload.because
    assert "one more would need" in placement.choices["resident_blocks"].because
    assert "32 rows fit" in placement.choices["batch_rows"].because
    assert "4096 tokens" in placement.choices["chunk_rows"].because


def test_a_batch_is_no_larger_than_the_data() -> None:
    placement = place(qwen(), gpu(80), Wishes(data_rows=20))
    assert placement.batch_rows == 16
    assert "20 rows" in placement.choices["batch_rows"].because


def test_a_smaller_batch_is_explained_by_what_the_double_would_take() -> None:
    placement = place(qwen(sequence_length=8192), gpu(6), Wishes())
    assert placement.batch_rows == 8
    because = placement.choices["batch_rows"].because
    assert because.startswith(f"{placement.batch_rows * 2} rows would need")


def test_without_a_gpu_blocks_stream_for_real() -> None:
    room = Room(device_free_bytes=None, host_available_bytes=64 * GIB)
    placement = place(qwen(sequence_length=256), room, Wishes())
    assert (placement.offload, placement.resident_blocks, placement.slots) == ("weights", 0, 3)
    assert placement.budget_bytes is None
    assert "without a GPU" in placement.choices["offload"].because


def test_resident_blocks_can_be_set() -> None:
    placement = place(qwen(), gpu(80), Wishes(resident_blocks=5))
    assert (placement.offload, placement.resident_blocks) == ("weights", 5)
    assert placement.choices["resident_blocks"].because == "as set"


def test_a_model_with_fewer_blocks_than_slots_gets_no_idle_slot() -> None:
    placement = place(qwen(layers=2), gpu(80), Wishes(offload="weights", resident_blocks=1))
    assert placement.slots == 1


@pytest.mark.parametrize(
    ("room", "wish", "resource", "cure"),
    [
        (gpu(3), Wishes(), "device memory", "set data.sequence_length below 1024"),
        (gpu(24, host_gib=16), Wishes(), "host memory", "set data.sequence_length"),
        (gpu(24), Wishes(offload="none"), "device memory", "placement.offload=optimizer fits"),
        (gpu(9), Wishes(batch_rows=4000), "device memory", "train.batch_rows=32 fits"),
        (gpu(24), Wishes(budget_bytes=2 * GIB), "device memory", "placement.budget_gib left out"),
        (gpu(9), Wishes(chunk_rows=64, batch_rows=64), "device memory", "placement.chunk_rows=4 "),
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


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        (Wishes(offload="everything"), "use one of auto, none"),
        (Wishes(batch_rows=0), "batch_rows is 0"),
        (Wishes(chunk_rows=-1), "chunk_rows is -1"),
        (Wishes(budget_bytes=0), "budget_bytes is 0"),
        (Wishes(resident_blocks=29), "the model has 28 blocks"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(wish: Wishes, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        place(qwen(), gpu(80), wish)


def test_a_dtype_that_cannot_be_trained_is_refused() -> None:
    with pytest.raises(BadInput, match="weights of 8 bytes"):
        place(replace(qwen(), dtype_bytes=8), gpu(80), Wishes())
