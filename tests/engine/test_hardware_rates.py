"""Rates measured through torch, on the CPU."""

from __future__ import annotations

import resource
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fluxtrain.measure.probe import bandwidth as pinning
from fluxtrain.measure.probe.bandwidth import (
    BUS_RATES,
    COPY_BYTES,
    LEAST_PIN_BYTES,
    bus_rates,
    host_copy_rate,
    matmul_rate,
    pin_rate,
    sample_bytes,
)
from fluxtrain.units import GIB, MIB


def test_host_memory_copies_and_multiplies_at_a_plausible_rate() -> None:
    copy = host_copy_rate(size_bytes=16 * MIB, limit_s=0.2)
    assert copy.per_s is not None and 1e8 < copy.per_s < 1e13
    assert "16.0 MiB" in copy.how and "thread" in copy.how
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


Runtime = Callable[[int], list[str]]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """`cuda(error)`: a CUDA runtime that answers page-locks with `error` and lists its calls."""

    def pretend(error: int) -> list[str]:
        calls: list[str] = []

        def answer(name: str, code: int) -> Callable[..., int]:
            return lambda *_: calls.append(name) or code  # type: ignore[func-returns-value]

        runtime = SimpleNamespace(
            cudaHostRegister=answer("register", error), cudaHostUnregister=answer("unregister", 0)
        )

        def kernel(*_: Any, **__: Any) -> torch.Tensor:
            """Reads the stale error, which clears it."""
            calls.append("kernel")
            if calls.count("kernel") == 1:
                raise RuntimeError("CUDA error: out of memory")
            return torch.empty(1)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
        monkeypatch.setattr(torch, "ones", kernel)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
        return calls

    return pretend


def limited_to(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))


def test_a_locked_sample_is_freed_and_held_against_the_limit(
    cuda: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = cuda(0)
    limited_to(monkeypatch, 8 * MIB)
    touch = pinning.touch
    monkeypatch.setattr(pinning, "touch", lambda memory: calls.append("touch") or touch(memory))
    rate = pin_rate(sample_bytes=LEAST_PIN_BYTES)
    assert calls == ["touch", "register", "unregister"]  # as arenas are made
    assert rate.per_s is not None
    assert rate.how == "64.0 MiB locked, the limit of 8.00 MiB does not hold for CUDA"
    limited_to(monkeypatch, 128 * MIB)
    assert pin_rate(sample_bytes=LEAST_PIN_BYTES).how == "64.0 MiB locked, the limit is 128 MiB"
    limited_to(monkeypatch, resource.RLIM_INFINITY)
    assert pin_rate(sample_bytes=LEAST_PIN_BYTES).how == "64.0 MiB locked"


def test_a_refused_page_lock_names_the_limit_and_leaves_no_error_behind(
    cuda: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = cuda(2)
    limited_to(monkeypatch, 8 * MIB)
    rate = pin_rate(sample_bytes=LEAST_PIN_BYTES)
    assert calls == ["register", "kernel", "kernel", "synchronize"]
    assert rate.per_s is None
    assert "refused to lock 64.0 MiB (error 2), the limit is 8.00 MiB" in rate.how


def test_a_small_container_is_measured_with_small_buffers_or_not_at_all() -> None:
    assert sample_bytes(None) == sample_bytes(64 * GIB) == COPY_BYTES
    assert 2 * sample_bytes(512 * MIB) == 512 * MIB // 4
    rate = host_copy_rate(sample_bytes(16 * MIB), limit_s=0.1)
    assert rate.per_s is None and "too little memory" in rate.how
