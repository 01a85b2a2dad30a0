"""What a plan says about page locks, before anything was asked and after."""

from __future__ import annotations

from fluxtrain.plan.facts import GroupFacts, ModelFacts
from fluxtrain.plan.footprint import Layout
from fluxtrain.train.placing.preflight import page_lock_choice, refused_before, wanted_bytes
from fluxtrain.units import GIB

RATES = {"pin": 2e9, "h2d_pinned": 50e9, "h2d_pageable": 10e9}


def test_weights_and_their_gradients_at_home_are_locked() -> None:
    group = GroupFacts(name="b", kind="block", weight_bytes=2000, trained_bf16=1000)
    facts = ModelFacts(groups=(group,) * 5)
    assert wanted_bytes(facts, Layout(offload="weights")) == 5 * 4000
    assert wanted_bytes(facts, Layout(offload="weights", device_groups=2)) == 3 * 4000
    assert wanted_bytes(facts, Layout(offload="none")) == 0


def test_what_is_refused_costs_one_and_a_half_crossings_at_the_slower_rate() -> None:
    choice = page_lock_choice(14 * GIB, 10 * 10**9, RATES)
    assert (choice.name, choice.value) == ("page-locked memory", "4.69 GiB")
    # 1.5 x 10 GB at 10 GB/s are 1.5 s, at 50 GB/s 0.3 s
    assert "at about 10.0 GB/s instead of 50.0 GB/s, up to 1.20 s more a step" in choice.because


def test_without_rates_the_bytes_are_said_alone() -> None:
    choice = page_lock_choice(GIB, GIB, {})
    assert choice.value == "0 B" and "1.00 GiB more" in choice.because
    assert "GB/s" not in choice.because
    assert page_lock_choice(GIB, 0, {}).value == "1.00 GiB"
    assert "50.0 GB/s" in page_lock_choice(GIB, 0, RATES).because


def test_the_probe_knows_before_when_nothing_can_be_locked() -> None:
    assert refused_before(GIB, {**RATES, "pin": None}) == GIB
    assert refused_before(GIB, RATES) == 0
    assert refused_before(GIB, {"h2d_pageable": 1e9}) == 0, "a file that does not tell"
    assert refused_before(GIB, {"pin": None, "h2d_pageable": None}) == 0, "nothing was measured"
