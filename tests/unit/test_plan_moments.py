"""When moments are updated: predicted by hand, chosen where it is faster, and said with numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.config.schema import demo_config
from fluxtrain.errors import BadInput
from fluxtrain.plan.calibration import Calibration, Line
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import Capacity, GroupFacts, ModelFacts, RowFacts
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.rates import Rates, rates_from
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import CLEARLY
from fluxtrain.plan.simulation import step_time
from fluxtrain.units import GIB

LAYERS, BLOCK = 8, 100_000_000
TRIED = Calibration(
    forward=Line(base=0.0, slope=0.005),
    backward=Line(base=0.0, slope=0.015),
    outside_forward=Line(base=0.0, slope=0.005),
    outside_backward=Line(base=0.0, slope=0.0),
    activation_bytes=1000,
    adamw_per_s=2e9,
    rows=(1, 2),
    measured_at_s=0.0,
    measuring_s=1.0,
)
PER_S = {"h2d_pinned": 50e9, "d2h_pinned": 50e9}
STREAMED = Layout(offload="weights", batch_rows=8, chunk_rows=8)
LATER = replace(STREAMED, deferred_moments=True)
COPY_S = 0.004
LAST_BLOCK_S = COPY_S + 0.04  # is copied and computed with after its update


def model(**how: Any) -> ModelFacts:
    """Eight blocks and nothing else."""
    sizes: dict[str, Any] = {"trained_bf16": BLOCK, "narrow": BLOCK, **how}
    return ModelFacts(
        groups=tuple(
            GroupFacts(name=f"layers.{i}", kind="block", weight_bytes=2 * BLOCK, **sizes)
            for i in range(LAYERS)
        ),
        row=RowFacts(
            hidden=64, vocabulary=128, sequence_length=8, dtype_bytes=2, activation_bytes=1000
        ),
    )


def rates(**tried: Any) -> Rates:
    found = rates_from(PER_S, has_gpu=True, calibration=replace(TRIED, **tried))
    assert isinstance(found, Rates)
    return found


def planned(tried: Rates, request: RunRequest | None = None, clips: bool = True) -> Placement:
    asked = request or RunRequest(offload="weights", batch_rows=8, device_groups=0)
    room = Capacity(device_free_bytes=4 * GIB, host_available_bytes=64 * GIB)
    return place(model(), room, asked, rates=tried)


def choice(plan: Placement) -> tuple[str, str]:
    return next((c.value, c.because) for c in plan.choices if c.name == "train.moments")


def test_moments_that_outlast_loss_and_backward_make_the_step_longer_and_bind_it() -> None:
    fast = rates(backward=Line(base=0.0, slope=0.001), adamw_per_s=0.2e9)
    later = step_time(model(), LATER, fast)
    one_pass_s = LAYERS * BLOCK * 18 / 26 / 0.2e9
    assert later.step_s == pytest.approx(
        one_pass_s + one_pass_s, rel=0.05
    )  # one begins as the other ends
    assert later.binds == "AdamW on the host"
    assert later.step_s > step_time(model(), STREAMED, fast).step_s


def test_measured_rates_of_both_passes_take_the_place_of_their_bytes() -> None:
    later = step_time(model(), LATER, rates(adamw_weights_per_s=2.5e9, adamw_moments_per_s=4e9))
    assert later.parts_s["host_update"] == pytest.approx(0.32)
    assert later.parts_s["deferred_moments"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("how", "pass_bytes"),
    [
        ({}, 18),
        ({"trained_bf16": 0, "trained_fp32": BLOCK}, 20),
        ({"trained_bf16": 0, "trained_fp16": BLOCK}, 0),
        ({"states": "8bit"}, 0),
        ({"states": "bf16"}, 0),
    ],
    ids=str,
)
def test_what_has_two_passes_and_what_each_moves(how: dict[str, Any], pass_bytes: int) -> None:
    facts = model(**how)
    assert facts.groups[0].pass_bytes == pass_bytes * BLOCK
    whole, later = (step_time(facts, layout, rates()) for layout in (STREAMED, LATER))
    if not pass_bytes:
        assert later.step_s == whole.step_s
    else:
        assert later.parts_s["deferred_moments"] == pytest.approx(
            LAYERS * BLOCK * pass_bytes / 26 / 2e9
        )


def test_of_several_passes_the_first_backward_hides_the_moments() -> None:
    one, three = (step_time(model(), LATER, rates(), passes=passes) for passes in (1, 3))
    assert three.parts_s["deferred_moments"] == one.parts_s["deferred_moments"]
    assert three.step_s - one.step_s == pytest.approx(2 * (0.32 + 0.04 + 0.96), rel=0.02)


def test_cores_that_compute_too_pay_for_both_passes() -> None:
    slow = Rates(has_gpu=False, matmul_per_s=1e12, adamw_per_s=2e9, copy_bytes_per_s=1e10)
    whole, later = (step_time(model(), layout, slow) for layout in (STREAMED, LATER))
    assert later.step_s - whole.step_s == pytest.approx(0.4 * (36 / 26 - 1))


def test_it_is_deferred_where_that_is_faster_and_the_reason_has_both_times() -> None:
    plan = planned(rates())
    assert plan.deferred_moments
    value, because = choice(plan)
    assert value == "deferred"
    assert "a step is predicted, and" in because and "with the weights" in because
    assert "277 ms of AdamW on the host in place of 400 ms" in because


def test_what_the_forward_hides_anyway_is_not_deferred() -> None:
    plan = planned(rates(adamw_per_s=10e9))
    assert not plan.deferred_moments
    value, because = choice(plan)
    assert value == "with_weights"
    assert "deferred, which moves more bytes" in because


def test_steps_in_backward_defer_nothing() -> None:
    request = RunRequest(
        offload="weights", batch_rows=8, device_groups=0, optimizer_in_backward=True
    )
    plan = planned(rates(), request, clips=False)
    assert not plan.deferred_moments
    assert choice(plan) == (
        "with_weights",
        "each group is updated at once, as its gradients arrive",
    )


@pytest.mark.parametrize("wish", [True, False])
def test_a_wish_is_kept_with_and_without_a_gpu(wish: bool) -> None:
    request = RunRequest(offload="weights", batch_rows=8, device_groups=0, deferred_moments=wish)
    here = place(model(), Capacity(device_free_bytes=None, host_available_bytes=64 * GIB), request)
    for plan in (planned(rates(adamw_per_s=10e9), request), here):
        assert plan.deferred_moments == wish
        assert choice(plan) == ("deferred" if wish else "with_weights", "as set")


def test_a_wish_without_effect_is_told_so() -> None:
    request = RunRequest(offload="none", batch_rows=8, deferred_moments=True)
    plan = place(model(), Capacity(device_free_bytes=None, host_available_bytes=64 * GIB), request)
    assert choice(plan)[1] == "as set, without effect: no trained weights are on the host"


def test_without_a_gpu_nothing_is_deferred_by_itself() -> None:
    room = Capacity(device_free_bytes=None, host_available_bytes=64 * GIB)
    slow = Rates(has_gpu=False, matmul_per_s=1e12, adamw_per_s=2e9, copy_bytes_per_s=1e10)
    plan = place(model(), room, RunRequest(batch_rows=8), rates=slow)
    assert not plan.deferred_moments


@settings(max_examples=15)
@given(
    adamw=st.floats(1e8, 1e11), weights=st.none() | st.floats(1e8, 1e11),
    moments=st.none() | st.floats(1e8, 1e11), backward=st.floats(0.0, 0.05),
)  # fmt: skip
def test_what_is_chosen_is_never_predicted_clearly_slower(
    adamw: float, weights: float | None, moments: float | None, backward: float
) -> None:
    tried = rates(
        adamw_per_s=adamw, adamw_weights_per_s=weights, adamw_moments_per_s=moments,
        backward=Line(base=0.0, slope=backward),
    )  # fmt: skip
    plan = planned(tried)
    both = {
        deferred: step_time(model(), replace(STREAMED, deferred_moments=deferred), tried).step_s
        for deferred in (False, True)
    }
    chosen_s, other_s = both[plan.deferred_moments], both[not plan.deferred_moments]
    assert CLEARLY * chosen_s <= other_s
    assert not plan.deferred_moments or chosen_s < other_s


def test_deferring_with_update_in_backward_is_refused_with_the_cure() -> None:
    with pytest.raises(BadInput, match=r"max_grad_norm = null .* moments = with_weights"):
        demo_config(["train.moments=deferred", "train.max_grad_norm=null"])
    several = ["train.moments=deferred", "train.max_grad_norm=null", "train.accumulation=2"]
    assert demo_config(several).train.moments == "deferred"
