"""Rates measured through torch, on the CPU."""

from __future__ import annotations

import pytest
import torch

from fluxtrain.hardware.bandwidth import BUS_RATES, bus_rates, host_copy_rate, matmul_rate
from fluxtrain.units import MIB


def test_host_memory_copies_and_multiplies_at_a_plausible_rate() -> None:
    copy = host_copy_rate(size_bytes=16 * MIB, limit_s=0.2)
    assert copy.per_s is not None and 1e8 < copy.per_s < 1e13
    assert "16.0 MiB" in copy.how and "threads" in copy.how
    product = matmul_rate("cpu", limit_s=0.2)
    assert product.per_s is not None and 1e8 < product.per_s < 1e15
    assert "1024 x 1024 float32" in product.how


def test_without_a_gpu_every_bus_rate_is_missing_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rates = bus_rates()
    assert set(rates) == set(BUS_RATES)
    assert all(rate.per_s is None and "no GPU" in rate.how for rate in rates.values())
