"""Rates between host and GPU, on a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import asdict

from fluxtrain.commands.doctor.self_test import check_streaming
from fluxtrain.machine.gpu import check_accelerator
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure.probe.bandwidth import BUS_RATES, bus_rates, matmul_rate, pin_rate
from fluxtrain.measure.probe.probe import PROBE_LIMIT_S, probe
from fluxtrain.measure.probe.table import probe_text
from fluxtrain.units import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU to use"),
]


def test_the_driver_and_torch_see_the_same_cards() -> None:
    machine = read_machine()
    assert len(machine.gpus) == torch.cuda.device_count()
    seen = {torch.cuda.get_device_properties(n).name for n in range(torch.cuda.device_count())}
    assert {gpu.name for gpu in machine.gpus} == seen
    assert check_accelerator(torch.cuda.is_available()).value == "cuda"


def test_every_direction_is_measured_and_the_memory_is_given_back() -> None:
    before = torch.cuda.memory_allocated()
    rates = bus_rates()
    assert set(rates) == set(BUS_RATES)
    for name, rate in rates.items():
        assert rate.per_s is not None, (name, rate.how)
        assert 1e8 < rate.per_s < 1e12, (name, rate)
    assert rates["h2d_pinned"].per_s > 0.8 * rates["h2d_pageable"].per_s
    assert rates["h2d_both_ways"].per_s < 1.2 * rates["h2d_pinned"].per_s
    assert torch.cuda.memory_allocated() - before < MIB


def test_a_gpu_multiplies_faster_than_a_laptop() -> None:
    rate = matmul_rate("cuda")
    assert rate.per_s is not None and rate.per_s > 1e12


def test_cuda_locks_a_sample_and_gives_it_back() -> None:
    rate = pin_rate(sample_bytes=128 * MIB)
    assert rate.per_s is not None, rate.how
    assert 1e8 < rate.per_s < 1e12
    again = pin_rate(sample_bytes=128 * MIB)
    assert again.per_s is not None, "nothing stays registered"


def test_the_slot_and_the_power_of_a_card_are_known_or_say_why_not() -> None:
    for gpu in read_machine().gpus:
        assert gpu.bf16 is (torch.cuda.get_device_capability() >= (8, 0))
        for name, value in asdict(gpu).items():
            assert value is not None or gpu.unknown[name], name


def test_the_engine_streams_on_the_gpu_as_it_trains_there() -> None:
    assert "values after" in check_streaming("cuda")


def test_the_whole_probe_keeps_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = probe(tmp_path)
    assert found.measuring_s < PROBE_LIMIT_S
    assert all(rate.per_s is not None for rate in found.rates.values()), probe_text(found)
