"""Steps in backward by hand: updates follow the backward pass, and what the forward needs comes
last."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluxtrain.plan.cost.calibration import Calibration, Line
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.cost.step import Cost, cost
from fluxtrain.plan.facts import GroupFacts, ModelFacts, RowFacts
from fluxtrain.plan.footprint import Layout

PARAMETERS = 1_000_000  # of each group
LAYERS = 10
FACTS = ModelFacts(
    groups=tuple(
        GroupFacts(
            name=name,
            kind="block" if name.isdigit() else "edge",
            weight_bytes=2 * PARAMETERS,
            trained_bf16=PARAMETERS,
        )
        for name in ("embedding", *map(str, range(LAYERS)), "head")
    ),
    row=RowFacts(
        hidden=64, vocabulary=100, sequence_length=16, dtype_bytes=2, activation_bytes=1000
    ),
)
FORWARD_S, HEAD_S, BACKWARD_S = 0.1, 0.05, 0.3  # of all blocks with the one row of LAYOUT
TRIED = Calibration(
    forward=Line(base=0.0, slope=FORWARD_S / LAYERS),
    backward=Line(base=0.0, slope=BACKWARD_S / LAYERS),
    outside_forward=Line(base=0.0, slope=HEAD_S),
    outside_backward=Line(base=0.0, slope=0.0),
    activation_bytes=1000,
    rows=(1, 4),
    measured_at_s=0.0,
    measuring_s=1.0,
)
LAYOUT = Layout(offload="weights", batch_rows=1, chunk_rows=1, optimizer_in_backward=True)
ENDLESS = 1e30  # bytes a second


def found(
    update_s: float, layout: Layout = LAYOUT, *, copy_s: float = 0.0, facts: ModelFacts = FACTS
) -> Cost:
    """A step where the host takes `update_s` for a group, and a copy of one `copy_s`."""
    bytes_per_s = 2 * PARAMETERS / copy_s if copy_s else ENDLESS
    rates = Rates(
        has_gpu=True,
        matmul_per_s=1.0,
        adamw_per_s=PARAMETERS / update_s,
        h2d_bytes_per_s=bytes_per_s,
        d2h_bytes_per_s=bytes_per_s,
        calibration=TRIED,
    )
    return cost(facts, layout, rates, clips=False)


COMPUTED_S = FORWARD_S + HEAD_S + BACKWARD_S


def test_updates_that_keep_up_leave_those_of_the_last_gradients_to_wait_for() -> None:
    """Block 0's gradients and the embedding's come when the backward pass ends."""
    step = found(0.01)
    assert step.step_s == pytest.approx(COMPUTED_S + 2 * 0.01)
    assert step.binds == "the GPU"


def test_updates_that_do_not_keep_up_are_waited_for_from_the_first_gradients_on() -> None:
    """The head's are there when the backward pass begins; the forward begins after all twelve."""
    step = found(0.1)
    assert step.step_s == pytest.approx(12 * 0.1 + FORWARD_S + HEAD_S)
    assert step.binds == "AdamW on the host"


def test_the_embedding_is_copied_after_its_update_before_the_forward_begins() -> None:
    """Its gradients come home beside the last update but one; then it is updated and goes up."""
    step = found(0.01, copy_s=0.002)
    assert step.step_s == pytest.approx(COMPUTED_S + 0.002 + 0.01 + 0.01 + 0.002)


def test_blocks_on_the_device_compute_while_the_first_one_at_home_is_updated() -> None:
    """The embedding and four blocks live there, two of them at the front: six blocks and the head
    are updated at home."""
    layout = replace(LAYOUT, device_groups=5)
    waits_s = 7 * 0.06 - BACKWARD_S
    hidden_s = 2 / LAYERS * FORWARD_S
    assert found(0.06, layout).step_s == pytest.approx(COMPUTED_S + waits_s - hidden_s)
    assert found(0.04, layout).step_s == pytest.approx(COMPUTED_S)  # hidden by those two


def test_an_embedding_at_home_is_waited_for_though_every_block_lives_on_the_device() -> None:
    layout = replace(LAYOUT, device_groups=LAYERS, device_first="blocks")
    assert found(0.05, layout).step_s == pytest.approx(COMPUTED_S + 0.05)
    on_device = replace(LAYOUT, device_groups=LAYERS + 1)
    assert found(0.05, on_device).step_s == pytest.approx(COMPUTED_S)


def test_copies_are_asked_for_when_the_wait_has_ended() -> None:
    """Copies that take longer than the forward computes: they come after the updates."""
    fast, slow = (found(0.5, copy_s=copy_s).step_s for copy_s in (1e-9, 0.03))
    ups_s, downs_s = 12 * 0.03, 0.03  # of all groups in the forward; of the head, before its update
    assert slow - fast == pytest.approx(ups_s - FORWARD_S + downs_s, rel=1e-3)


def test_no_more_gradients_are_waiting_for_their_updates_than_there_is_memory_for() -> None:
    """Six blocks and the head at home have gradients of one size, which three buffers hold: those
    of the last one leave when the fourth from the end is updated. Two blocks follow on the
    device, and hide what is left then; the other two there were hidden by waits."""
    update_s, block_s = 0.2, BACKWARD_S / LAYERS
    layout = replace(LAYOUT, device_groups=5)
    step = found(update_s, layout)
    assert step.backward_phase_s == pytest.approx(4 * update_s + 2 * block_s)
    left_s = 7 * update_s - step.backward_phase_s
    hidden_s = 2 / LAYERS * FORWARD_S
    assert step.forward_phase_s == pytest.approx(FORWARD_S + left_s - hidden_s)
    assert step.binds == "AdamW on the host"


def with_table(users: int) -> ModelFacts:
    """The embedding has 1000 rows, and a batch 16 tokens; a tied one is the head too."""
    table = replace(FACTS.groups[0], table_rows=1000, users=users)
    return replace(FACTS, groups=(table, *FACTS.groups[1 : LAYERS + 1 if users > 1 else None]))


BY_ROWS = replace(LAYOUT, embedding="rows")


def test_an_in_backward_forward_waits_for_the_update_of_a_table_by_rows_as_of_a_whole_one() -> None:
    """Its update is the last one: of block 0's and its own nothing is hidden."""
    step = found(0.01, BY_ROWS, facts=with_table(users=1))
    whole = found(0.01, facts=with_table(users=1))
    assert step.step_s == whole.step_s == pytest.approx(COMPUTED_S + 2 * 0.01)


def test_a_forward_begins_when_its_tied_table_is_updated() -> None:
    """The tied table is the last of eleven groups, and the only one without work of its own."""
    for update_s in (0.05, 0.2):
        step = found(update_s, BY_ROWS, facts=with_table(users=2))
        begins_s = BACKWARD_S / LAYERS + (LAYERS + 1) * update_s
        assert step.step_s == pytest.approx(begins_s + FORWARD_S + HEAD_S)


layouts = st.builds(
    Layout,
    offload=st.sampled_from(["weights", "max", "optimizer"]),
    device_groups=st.integers(0, 12),
    device_first=st.sampled_from(["embedding", "blocks"]),
    resident_blocks=st.integers(0, LAYERS),
    embedding=st.sampled_from(["whole", "rows"]),
    batch_rows=st.integers(1, 8),
    chunk_rows=st.integers(1, 8),
    optimizer_in_backward=st.just(True),
)
seconds = st.floats(1e-4, 1.0)
models = st.sampled_from([FACTS, with_table(users=1), with_table(users=2)])


@given(layouts, models, seconds, seconds)
def test_one_more_group_on_the_device_never_makes_a_step_in_backward_slower(
    layout: Layout, facts: ModelFacts, update_s: float, copy_s: float
) -> None:
    layout = replace(layout, resident_blocks=0, offload="weights")
    more = replace(layout, device_groups=layout.device_groups + 1)
    before, after = (
        found(update_s, one, copy_s=copy_s, facts=facts).step_s for one in (layout, more)
    )
    assert after <= before * (1 + 1e-12)


@given(layouts, models, seconds, seconds, st.sampled_from([0.5, 0.99]))
def test_a_faster_host_or_bus_never_makes_a_step_in_backward_slower(
    layout: Layout, facts: ModelFacts, update_s: float, copy_s: float, share: float
) -> None:
    before = found(update_s, layout, copy_s=copy_s, facts=facts).step_s
    assert found(share * update_s, layout, copy_s=copy_s, facts=facts).step_s <= before * (
        1 + 1e-12
    )
    assert found(update_s, layout, copy_s=share * copy_s, facts=facts).step_s <= before * (
        1 + 1e-12
    )


AHEAD = replace(LAYOUT, device_groups=5, device_first="blocks", embedding="rows")
WITH_ROWS = replace(FACTS, groups=(replace(FACTS.groups[0], table_rows=1000), *FACTS.groups[1:]))


@given(layouts, models, seconds, seconds)
@example(AHEAD, WITH_ROWS, 1.0, 0.125)  # the table's update goes on under the next backward pass
def test_no_in_backward_step_is_shorter_than_its_computation_or_its_updates(
    layout: Layout, facts: ModelFacts, update_s: float, copy_s: float
) -> None:
    step = found(update_s, layout, copy_s=copy_s, facts=facts)
    assert step.step_s >= step.forward_s + step.head_s + step.backward_s - 1e-9
    assert step.step_s >= step.host_update_s - 1e-9
