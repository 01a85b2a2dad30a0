"""Schedules rise, fall and end where they say, as the schedulers people know do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from fluxtrain.config.choices import ScheduleName, factor

NAMES = st.sampled_from(["constant", "linear", "cosine"])
TOTALS = st.integers(min_value=1, max_value=500)


@given(NAMES, TOTALS, st.integers(0, 100))
def test_the_rate_rises_during_warm_up_and_never_after(
    name: ScheduleName, total: int, warmup: int
) -> None:
    factors = [factor(name, s, warmup_steps=warmup, total_steps=total) for s in range(total + 9)]
    assert all(0.0 <= one <= 1.0 for one in factors)
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


@given(NAMES, st.integers(1, 100))
def test_no_update_of_the_warm_up_is_lost_on_a_rate_of_zero(
    name: ScheduleName, warmup: int
) -> None:
    assert factor(name, 0, warmup_steps=warmup, total_steps=200) == pytest.approx(1 / warmup)
    assert factor(name, warmup - 1, warmup_steps=warmup, total_steps=200) == 1.0


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_rate_ends_at_zero_only_after_the_last_update(name: ScheduleName) -> None:
    assert factor(name, 99, warmup_steps=10, total_steps=100) > 0
    assert factor(name, 100, warmup_steps=10, total_steps=100) == 0
    assert factor(name, 10**6, warmup_steps=10, total_steps=100) == 0


@pytest.mark.parametrize(
    ("name", "build"),
    [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)],
)
def test_the_decay_is_the_one_of_transformers(name: ScheduleName, build: object) -> None:
    assert callable(build)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build(optimizer, 10, 60)
    for step in range(60):
        if step >= 10:
            expected = scheduler.get_last_lr()[0]
            assert factor(name, step, warmup_steps=10, total_steps=60) == pytest.approx(expected)
        optimizer.step()
        scheduler.step()
