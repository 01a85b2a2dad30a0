"""When an embedding is looked up by rows, what the plan says of it, and what that saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fluxtrain.errors import BadInput
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import ModelFacts, RowFacts
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.simulation import step_time
from fluxtrain.units import GIB
from tests.unit.plan_models import group, room

RATES = Rates(
    has_gpu=True,
    matmul_per_s=400e12,
    adamw_per_s=5e9,
    copy_bytes_per_s=70e9,
    h2d_bytes_per_s=50e9,
    d2h_bytes_per_s=50e9,
)
BLOCK = 230_000_000
FIRST_BLOCK_S = BLOCK * (1 / 1e11 + 2 / 50e9)  # until it is updated and copied, at the quick rate


def model(vocabulary: int = 152_064, hidden: int = 3584, table: bool = True) -> ModelFacts:
    edge = vocabulary * hidden
    return ModelFacts(
        groups=(
            group("embed_tokens", edge, table_rows=vocabulary if table else 0),
            *(group(f"layers.{i}", BLOCK) for i in range(8)),
            group("norm", hidden),
            group("lm_head", edge),
        ),
        head_parameters=edge,
        row=RowFacts(
            hidden=hidden,
            vocabulary=vocabulary,
            sequence_length=1024,
            dtype_bytes=2,
            activation_bytes=1 << 28,
        ),
    )


HOME = RunRequest(offload="weights", device_groups=0, batch_rows=32, chunk_rows=8)


def chosen(facts: ModelFacts, request: RunRequest, device: float | None = 80) -> tuple[str, str]:
    """The plan's word for the embedding and its reason; empty where it says none."""
    plan = place(facts, room(device, 400), request)
    told = [c for c in plan.choices if c.name == "placement.embedding"]
    return (plan.layout.embedding, told[0].because) if told else (plan.layout.embedding, "")


@pytest.mark.parametrize("device", [80, None])
def test_a_large_table_is_looked_up_by_rows(device: float | None) -> None:
    embedding, because = chosen(model(), HOME, device)
    assert embedding == "rows"
    assert because == (
        "a batch looks at 32.8 k of the 152 k rows of embed_tokens at most: 224 MiB instead of "
        "1.02 GiB on the device"
    )


def test_a_small_table_and_a_batch_that_touches_most_of_it_stay_whole() -> None:
    assert chosen(model(vocabulary=8000), HOME)[0] == "whole"
    assert chosen(model(vocabulary=32_000), HOME)[0] == "whole"
    assert chosen(model(vocabulary=32_000), replace(HOME, batch_rows=8))[0] == "rows"


def test_a_wish_is_kept_and_another_word_refused() -> None:
    assert chosen(model(), replace(HOME, embedding="whole")) == ("whole", "as set")
    assert chosen(model(vocabulary=8000), replace(HOME, embedding="rows")) == ("rows", "as set")
    with pytest.raises(BadInput, match="embedding is 'half'"):
        chosen(model(), replace(HOME, embedding="half"))  # type: ignore[arg-type]


def test_without_a_table_rows_are_told_of_only_when_they_were_asked_for() -> None:
    assert chosen(model(table=False), HOME) == ("whole", "")
    embedding, because = chosen(model(table=False), replace(HOME, embedding="rows"))
    assert embedding == "whole"
    assert because.startswith("no embedding that can be looked up")


def tied() -> ModelFacts:
    facts = model()
    table = replace(facts.groups[0], users=2)
    return replace(facts, groups=(table, *facts.groups[1:-1]))


def test_a_tied_table_is_there_for_the_head_too_and_the_forward_begins_with_rows() -> None:
    embedding, because = chosen(tied(), HOME)
    assert embedding == "rows"
    assert because == (
        "the forward begins with 224 MiB of embed_tokens at most: the head's 1.02 GiB are copied "
        "meanwhile"
    )
    layout = Layout(offload="weights", batch_rows=32, chunk_rows=8)
    rows = replace(layout, embedding="rows")
    more = footprint(tied(), rows, has_gpu=True).device_bytes
    more -= footprint(tied(), layout, has_gpu=True).device_bytes
    tokens = 32 * 1024
    assert more == 2 * 3584 * tokens + 8 * 2 * tokens
    quick = replace(RATES, adamw_per_s=1e11, matmul_per_s=1e13)
    saved_s = step_time(tied(), layout, quick).step_s - step_time(tied(), rows, quick).step_s
    copied_s = 152_064 * 3584 * 2 / 50e9
    assert 0 < saved_s <= copied_s
    assert tokens / 152_064 * copied_s < FIRST_BLOCK_S


def test_a_table_that_lives_on_the_device_is_whole() -> None:
    plan = place(model(), room(80, 400), RunRequest(offload="none", batch_rows=1, chunk_rows=1))
    told = next(c for c in plan.choices if c.name == "placement.embedding")
    assert told.value == "whole"
    assert told.because == "embed_tokens lives on the device with all its rows"


def test_rows_that_nobody_knows_count_as_none() -> None:
    facts = replace(model(), row=None)
    plan = place(facts, room(80, 400), RunRequest(offload="weights", device_groups=0))
    whole = place(
        facts, room(80, 400), RunRequest(offload="weights", device_groups=0, embedding="whole")
    )
    assert (plan.layout.embedding, whole.layout.embedding) == ("rows", "whole")
    assert plan.device_bytes < whole.device_bytes


def test_rows_fit_where_the_whole_does_not() -> None:
    small = replace(HOME, batch_rows=1, chunk_rows=1)
    need = {
        word: place(model(), room(80, 400), replace(small, embedding=word)).device_bytes  # type: ignore[arg-type]
        for word in ("whole", "rows")
    }
    assert need["whole"] - need["rows"] > 2 * GIB  # a copy, and a sum that is larger than a block's


def test_a_forward_that_waits_for_updates_waits_for_that_of_the_table_too() -> None:
    slow = replace(RATES, adamw_per_s=1e9)
    layout = Layout(offload="weights", batch_rows=32, chunk_rows=8)
    whole = step_time(model(), layout, slow)
    rows = step_time(model(), replace(layout, embedding="rows"), slow)
    assert whole.binds == rows.binds == "AdamW on the host"
    assert rows.parts_s["host_update"] == whole.parts_s["host_update"]  # all of it is still made
    assert rows.step_s == pytest.approx(whole.step_s, rel=0.01)


def test_a_forward_that_computes_begins_when_the_rows_are_there() -> None:
    quick = replace(RATES, adamw_per_s=1e11, matmul_per_s=1e13)
    layout = Layout(offload="weights", batch_rows=32, chunk_rows=8)
    whole = step_time(model(), layout, quick)
    rows = step_time(model(), replace(layout, embedding="rows"), quick)
    copied_s = 152_064 * 3584 * 2 / 50e9
    assert 0 < whole.step_s - rows.step_s <= 2 * copied_s  # weights up, and gradients down


def test_fewer_bytes_cross_and_no_step_is_slower() -> None:
    layout = Layout(offload="weights", batch_rows=32, chunk_rows=8)
    whole = step_time(model(), layout, RATES)
    rows = step_time(model(), replace(layout, embedding="rows"), RATES)
    assert rows.parts_s["upload_forward"] < whole.parts_s["upload_forward"]
    assert rows.parts_s["download"] < whole.parts_s["download"]
    assert rows.step_s <= whole.step_s
    timed = place(model(), room(20, 400), HOME, rates=RATES)
    assert timed.layout.embedding == "rows"
    assert timed.need == footprint(model(), timed.layout, has_gpu=True)
