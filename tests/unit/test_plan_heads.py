"""When a head comes in vocabulary chunks, what the plan says of it, what it saves and costs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import HeadFacts, ModelFacts, RowFacts
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.plan.heads import CHUNKS_GAIN, VOCAB_CHUNK_BYTES, vocab_chunk_rows
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import AUTO_SHARE
from fluxtrain.plan.simulation import step_time
from fluxtrain.units import GIB, MIB, bytes_text
from tests.unit.plan_models import group, room
from tests.unit.test_plan_properties import models
from tests.unit.test_plan_simulation import cores, gpus, layouts, with_table

RATES = Rates(
    has_gpu=True,
    matmul_per_s=400e12,
    adamw_per_s=5e9,
    copy_bytes_per_s=70e9,
    h2d_bytes_per_s=50e9,
    d2h_bytes_per_s=50e9,
)
VOCABULARY, HIDDEN, BLOCK = 152_064, 3584, 233_000_000
EDGE = VOCABULARY * HIDDEN
CHUNK_VOCABULARY = 9344  # of 7168 bytes each: the most of whole 128s in 64 MiB
HOME = RunRequest(offload="weights", device_groups=0, batch_rows=32, chunk_rows=8)
LAYOUT = Layout(offload="weights", batch_rows=32, chunk_rows=8, embedding="rows")
CHUNKED = replace(LAYOUT, head="chunks")


def model(*, tied: bool = False, trained: bool = True) -> ModelFacts:
    head = HeadFacts(
        group="embed_tokens" if tied else "lm_head",
        vocabulary=VOCABULARY,
        row_bytes=2 * HIDDEN,
        dtype_bytes=2,
        trained=trained,
        tied=tied,
    )
    own = () if tied else (group("lm_head", EDGE, trained_bf16=EDGE * trained),)
    return ModelFacts(
        groups=(
            group("embed_tokens", EDGE, table_rows=VOCABULARY, users=2 if tied else 1),
            *(group(f"layers.{i}", BLOCK) for i in range(28)),
            group("norm", HIDDEN),
            *own,
        ),
        head_parameters=EDGE if trained else 0,
        head=head,
        row=RowFacts(
            hidden=HIDDEN,
            vocabulary=VOCABULARY,
            sequence_length=1024,
            dtype_bytes=2,
            activation_bytes=1 << 24,
        ),
    )


def chosen(facts: ModelFacts, request: RunRequest, device: float | None = 80) -> tuple[str, str]:
    """The plan's word for the head and its reason; empty where it says none."""
    plan = place(facts, room(device, 400), request)
    told = [c for c in plan.choices if c.name == "placement.head"]
    return (told[0].value, told[0].because) if told else (plan.layout.head, "")


def test_vocab_chunks_are_of_whole_hundreds_of_words_and_no_more_than_the_head() -> None:
    assert vocab_chunk_rows(2 * HIDDEN, VOCABULARY) == CHUNK_VOCABULARY
    assert (
        CHUNK_VOCABULARY * 2 * HIDDEN <= VOCAB_CHUNK_BYTES < (CHUNK_VOCABULARY + 128) * 2 * HIDDEN
    )
    assert vocab_chunk_rows(1 << 30, VOCABULARY) == 128
    assert vocab_chunk_rows(64, 50) == 50


def test_the_head_comes_in_vocab_chunks_where_that_is_asked_for() -> None:
    assert chosen(model(), replace(HOME, head="chunks")) == ("chunks", "as set")
    assert chosen(model(), replace(HOME, head="whole")) == ("whole", "as set")
    assert chosen(model(), HOME)[0] == "whole"
    with pytest.raises(BadInput, match="head is 'half'"):
        chosen(model(), replace(HOME, head="half"))  # type: ignore[arg-type]


def test_a_tied_head_comes_in_vocab_chunks_where_rows_are_looked_up() -> None:
    chunks = replace(HOME, head="chunks")
    few = replace(chunks, batch_rows=8, chunk_rows=8)
    assert chosen(model(tied=True), few) == ("chunks", "as set")
    word, because = chosen(model(tied=True), replace(few, embedding="whole"))
    assert word == "whole" and "placement.embedding=rows" in because
    thrice = model(tied=True)
    table = replace(thrice.groups[0], users=3)
    word, because = chosen(replace(thrice, groups=(table, *thrice.groups[1:])), few)
    assert word == "whole" and "more than one" in because


def test_a_tied_head_in_vocab_chunks_keeps_sums_of_looked_up_rows_alone() -> None:
    facts = model(tied=True)
    whole, chunks = (
        footprint(facts, replace(one, batch_rows=8, chunk_rows=8), has_gpu=True)
        for one in (LAYOUT, CHUNKED)
    )
    part, rows = CHUNK_VOCABULARY * HIDDEN, 8 * 1024 * HIDDEN
    assert whole.weights_bytes - chunks.weights_bytes == 2 * EDGE - 2 * 2 * part
    shared, staging = 4 * EDGE - 4 * rows, 2 * EDGE - 2 * 2 * part - 2 * 2 * rows
    assert whole.gradients_bytes - chunks.gradients_bytes == shared + staging
    assert chunks.arena_bytes - whole.arena_bytes == 2 * rows  # where their gradients arrive
    assert chunks.device_bytes < whole.device_bytes


def test_a_head_that_lives_on_the_device_stays_whole() -> None:
    word, because = chosen(model(), replace(HOME, offload="none", head="chunks"), 400)
    assert word == "whole" and "lives on the device" in because


def test_the_device_holds_two_vocab_chunks_of_weight_and_no_sum_of_the_whole() -> None:
    facts = model()
    whole, chunks = (footprint(facts, one, has_gpu=True) for one in (LAYOUT, CHUNKED))
    part = CHUNK_VOCABULARY * HIDDEN
    assert whole.weights_bytes - chunks.weights_bytes == 2 * EDGE - 2 * 2 * part
    assert whole.gradients_bytes - chunks.gradients_bytes == 2 * EDGE - 2 * 2 * part
    tokens = 32 * 1024
    hidden = tokens * HIDDEN
    assert whole.workspace_bytes == 4 * EDGE + 512 * MIB + 2 * 2 * hidden
    assert chunks.workspace_bytes == 512 * MIB + (4 + 2 * 2) * hidden
    assert whole.arena_bytes == chunks.arena_bytes
    assert whole.device_bytes - chunks.device_bytes > 3 * GIB


def test_a_frozen_heads_gradient_takes_nothing() -> None:
    whole, chunks = (
        footprint(model(trained=False), one, has_gpu=True) for one in (LAYOUT, CHUNKED)
    )
    assert whole.weights_bytes - chunks.weights_bytes == 2 * EDGE - 4 * CHUNK_VOCABULARY * HIDDEN
    assert whole.gradients_bytes == chunks.gradients_bytes


def test_on_the_device_the_word_changes_nothing() -> None:
    facts, every = model(), len(model().groups)
    for word in ("whole", "chunks"):
        there = Layout(offload="none", batch_rows=4, chunk_rows=4, head=word)  # type: ignore[arg-type]
        assert footprint(facts, there, has_gpu=True) == footprint(
            facts, replace(there, head="whole"), has_gpu=True
        )
        assert step_time(facts, there, RATES) == step_time(
            facts, replace(there, head="whole"), RATES
        )
    assert every == 31


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("passes", [1, 3])
def test_vocab_chunks_cost_a_second_copy_and_a_third_more_of_the_heads_operations(
    clips: bool, passes: int
) -> None:
    facts = model()
    whole, chunks = (
        step_time(facts, one, RATES, clips=clips, passes=passes) for one in (LAYOUT, CHUNKED)
    )
    assert chunks.parts_s["head"] == pytest.approx(4 / 3 * whole.parts_s["head"])
    again = 2 * (EDGE - 2 * CHUNK_VOCABULARY * HIDDEN)  # the last two chunks are there still
    if passes == 1:
        extra_s = chunks.parts_s["upload_forward"] - whole.parts_s["upload_forward"]
        assert extra_s == pytest.approx(again / 50e9)
    assert chunks.step_s > whole.step_s


def test_few_tokens_wait_for_the_vocab_chunks() -> None:
    """One row of 1024 tokens is computed with faster than the head crosses the bus twice."""
    short = replace(CHUNKED, batch_rows=1, chunk_rows=1)
    rates = replace(RATES, adamw_per_s=1e12)
    found, whole = (
        step_time(model(), replace(short, head=word), rates) for word in ("chunks", "whole")
    )
    assert found.binds == whole.binds == "copies of weights to the GPU"
    twice_s = (
        2 * (2 * EDGE - 2 * CHUNK_VOCABULARY * HIDDEN) / 50e9
    )  # in place of the head's computation
    once_s = 2 * EDGE / 50e9  # ahead, in the forward pass
    first_s = CHUNK_VOCABULARY * 2 * HIDDEN / 50e9  # nothing is computed with before it is there
    expected_s = twice_s - whole.parts_s["head"] - once_s + first_s
    assert found.step_s - whole.step_s == pytest.approx(expected_s, rel=0.2)


def least_gib(head: str) -> float:
    """Of a device on which one row is planned with such a head."""
    fewest = Layout(offload="max", batch_rows=1, chunk_rows=1, head=head)  # type: ignore[arg-type]
    return footprint(model(), fewest, has_gpu=True).device_bytes / AUTO_SHARE / GIB


def test_by_itself_the_head_comes_in_vocab_chunks_where_nothing_fits_otherwise() -> None:
    between = (least_gib("whole") + least_gib("chunks")) / 2
    request = RunRequest(embedding="whole")
    with pytest.raises(DoesNotFit):
        place(model(), room(between, 400), replace(request, head="whole"))
    word, because = chosen(model(), request, between)
    assert word == "chunks" and "nothing fits" in because
    assert chosen(model(), request, least_gib("whole") + 0.2)[0] == "whole"


def test_a_tied_head_comes_in_vocab_chunks_where_nothing_fits_otherwise() -> None:
    small = least_gib("whole") / 2
    asked = RunRequest(embedding="rows", batch_rows=1, chunk_rows=1)
    with pytest.raises(DoesNotFit):
        place(model(tied=True), room(small, 400), replace(asked, head="whole"))
    word, because = chosen(model(tied=True), asked, small)
    assert word == "chunks" and "nothing fits" in because
    word, because = chosen(model(tied=True), replace(HOME, embedding="rows"))
    assert word == "whole" and "and more time" in because


@pytest.mark.parametrize("tied", [False, True])
def test_of_a_head_no_larger_than_two_vocab_chunks_no_less_is_said_to_be_on_the_device(
    tied: bool,
) -> None:
    facts = model(tied=tied)
    assert facts.head is not None
    facts = replace(facts, head=replace(facts.head, vocabulary=1000))
    word, because = chosen(facts, RunRequest(offload="weights", device_groups=0, embedding="rows"))
    assert word == "whole"
    assert "are no more than the two" in because


def test_what_does_not_fit_is_told_with_the_head_in_vocab_chunks() -> None:
    with pytest.raises(DoesNotFit) as refused:
        place(
            model(),
            room(least_gib("chunks") - 0.5, 400),
            RunRequest(embedding="whole", batch_rows=1),
        )
    need = footprint(
        model(), Layout(offload="max", batch_rows=1, chunk_rows=1, head="chunks"), has_gpu=True
    )
    assert bytes_text(need.device_bytes) in str(refused.value)


@pytest.mark.parametrize(("device", "batch"), [(16, 32), (24, 4)])
def test_a_timed_plan_takes_vocab_chunks_only_where_they_are_predicted_faster_by_the_margin(
    device: float, batch: int
) -> None:
    request, timing = RunRequest(batch_rows=batch), RATES
    steps = {
        word: step_time(
            model(), place(model(), room(device, 400), one, rates=timing).layout, RATES
        ).step_s
        for word, one in (
            ("auto", request),
            ("whole", replace(request, head="whole")),
            ("chunks", replace(request, head="chunks")),
        )
    }
    plan = place(model(), room(device, 400), request, rates=timing)
    better = steps["chunks"] * CHUNKS_GAIN < steps["whole"]
    assert plan.layout.head == ("chunks" if better else "whole")
    assert steps["auto"] == pytest.approx(steps[plan.layout.head])
    told = next(choice for choice in plan.choices if choice.name == "placement.head")
    other = "whole" if better else "chunks"
    assert told.value == plan.layout.head and (other in told.because or "fits" in told.because)


@pytest.mark.parametrize(("device", "batch"), [(16, 4), (24, 32), (48, 8)])
def test_no_other_choice_is_said_to_be_faster_for_a_head_in_vocab_chunks_that_was_not_worth_it(
    device: float, batch: int
) -> None:
    plan = place(model(), room(device, 400), RunRequest(batch_rows=batch), rates=RATES)
    told = {choice.name: choice.because for choice in plan.choices}
    compared = 0
    for name in ("device_groups", "device_first", "resident_blocks", "activations", "chunk_rows"):
        beside = re.match(
            r"(\S+) (m?s) a step is predicted, and (\S+) (m?s) with ", told[f"placement.{name}"]
        )
        if beside is not None:
            compared += 1
            number, unit, other, other_unit = beside.groups()
            scale = {"s": 1.0, "ms": 0.001}
            assert float(number) * scale[unit] <= float(other) * scale[other_unit], told
    assert compared


def test_both_ways_are_chosen_somewhere() -> None:
    found = {
        place(model(), room(16, 400), RunRequest(batch_rows=rows), rates=RATES).layout.head
        for rows in (4, 32)
    }
    assert found == {"whole", "chunks"}


def with_head(facts: ModelFacts, last: bool, words: int) -> ModelFacts:
    """Its first or its last group is the head's, where that is an edge."""
    group = facts.groups[-1 if last else 0]
    if group.kind != "edge":
        return facts
    head = HeadFacts(
        group=group.name,
        vocabulary=words,
        row_bytes=max(1, group.weight_bytes // words),
        dtype_bytes=2,
        trained=group.trained > 0,
        tied=group.users > 1,
    )
    return replace(facts, head=head)


@given(
    models(), st.booleans(), st.integers(1, 200_000), layouts, gpus | cores,
    st.booleans(), st.integers(1, 3),
)  # fmt: skip
def test_no_step_in_vocab_chunks_is_shorter_than_its_parts_and_no_peak_below_nothing(
    facts: ModelFacts, last: bool, words: int, layout: Layout, rates: Rates, in_backward: bool,
    passes: int,
) -> None:  # fmt: skip
    facts = with_head(with_table(facts, words), last, words)
    layout = replace(layout, head="chunks", optimizer_in_backward=in_backward)
    found = step_time(facts, layout, rates, clips=not in_backward, passes=passes)
    assert found.step_s >= max(found.busy_s.values()) * (1 - 1e-9)
    need = footprint(facts, layout, has_gpu=rates.has_gpu)
    assert all(size >= 0 for size in vars(need).values())
