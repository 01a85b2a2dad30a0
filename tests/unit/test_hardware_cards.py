"""Several cards: which is which, rates of each and of all, and copies whose bytes are compared."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fluxtrain.core.device import multi_gpu_streams
from fluxtrain.events.answers.machine import TOGETHER, GpuProcess, Rate
from fluxtrain.machine.seen_cards import cards_seen, of_one_generation
from fluxtrain.measure.probe import cards as rates
from fluxtrain.measure.probe.cards import (
    NO_ACCESS,
    WRONG,
    further_card_names,
    further_card_rates,
    peer_names,
    peer_rates,
    rates_together,
)
from fluxtrain.units import GIB
from tests.unit.fake_cards import Cuda, gpu, machine


@pytest.mark.parametrize(
    ("uuids", "gpus"),
    [
        (("00", "11"), [0, 1]),
        (("33", "11"), [3, 1]),  # CUDA_VISIBLE_DEVICES with holes, fastest first
        (("GPU-22", "GPU-00"), [2, 0]),
        (("77", "00"), [None, 0]),
    ],
)
def test_torchs_cards_are_the_drivers_by_their_uuids(
    uuids: tuple[str, ...], gpus: list[int | None]
) -> None:
    found = cards_seen(machine(*map(gpu, range(4))), Cuda(*uuids))
    assert [card.index for card in found] == [0, 1]
    assert [card.gpu for card in found] == gpus
    nodes = [None if number is None else number % 2 for number in gpus]
    assert [card.numa_node for card in found] == nodes


def test_a_card_is_told_by_both_numbers_where_they_differ() -> None:
    same, other = cards_seen(machine(*map(gpu, range(4))), Cuda("00", "33"))
    assert same.text == "card 0 (RTX 4090)"
    assert other.text == "card 1 (RTX 4090, GPU 3 of nvidia-smi)"


def test_without_uuids_the_place_counts_where_the_name_agrees() -> None:
    class Old(Cuda):
        def get_device_properties(self, index: int) -> Any:
            facts = super().get_device_properties(index)
            del facts.uuid
            return facts

    found = cards_seen(machine(gpu(1), gpu(3, name="RTX 3060")), Old("a", "b"))
    assert [card.gpu for card in found] == [1, None]


def test_one_card_is_no_several() -> None:
    assert cards_seen(machine(gpu(0)), Cuda("00")) == ()


def test_a_card_that_other_programs_fill_is_not_usable_and_names_them() -> None:
    programs = (GpuProcess(pid=7, used_bytes=22 * GIB), GpuProcess(pid=9, used_bytes=None))
    full = gpu(1, memory_free_bytes=GIB, other_processes=programs)
    free, filled = cards_seen(machine(gpu(0), full), Cuda("00", "11"))
    assert free.unusable == ""
    assert "pid 7 22.0 GiB, pid 9" in filled.unusable
    assert "1.00 GiB of 24.0 GiB is free: end them" in filled.unusable


def test_a_slice_of_mig_computes_alone() -> None:
    split = gpu(1, mig=True, mig_slices=("MIG-ab-1",))
    _, slice_of = cards_seen(machine(gpu(0), split), Cuda("00", "ab-1"))
    assert slice_of.gpu == 1
    assert "split by MIG" in slice_of.unusable
    assert "nvidia-smi -i 1 -mig 0" in slice_of.unusable


def test_a_card_without_bf16_is_left_out_of_a_run_in_bf16() -> None:
    found = cards_seen(machine(gpu(0), gpu(1)), Cuda("00", "11", capability=(7, 5)))
    assert all(not card.unusable for card in of_one_generation(found, needs_bf16=False))
    for card in of_one_generation(found, needs_bf16=True):
        assert "compute capability 7.5" in card.unusable and "float16" in card.unusable


def test_further_cards_are_measured_as_torchs_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current: list[int] = []

    @contextmanager
    def device(card: int) -> Any:
        current.append(card)
        yield
        current.pop()

    def bus(device: str, limit_s: float, size_bytes: int, *, pageable: bool) -> dict[str, Rate]:
        assert device == f"cuda:{current[-1]}" and not pageable
        if current[-1] == 2:
            raise RuntimeError("CUDA out of memory")
        return dict.fromkeys(rates.ONE_CARD[:4], Rate(25e9, "timed"))

    def matmul(device: str, limit_s: float) -> Rate:
        assert device == f"cuda:{current[-1]}"
        return Rate(1e14, "timed")

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(rates, "bus_rates", bus)
    monkeypatch.setattr(rates, "matmul_rate", matmul)
    found = further_card_rates(3)
    assert tuple(found) == further_card_names(3)
    assert found["card1_h2d_pinned"].per_s == 25e9
    assert found["card1_gpu_matmul"].per_s == 1e14
    assert all("out of memory" in found[f"card2_{name}"].how for name in rates.ONE_CARD)


def test_pairs_of_cards_whose_bytes_do_not_arrive_have_no_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda to, source: source == 0)
    monkeypatch.setattr(multi_gpu_streams, "reaches", lambda *_: False)
    assert peer_rates(2) == {"peer_0_1": Rate(None, WRONG), "peer_1_0": Rate(None, NO_ACCESS)}


def test_cards_that_torch_does_not_see_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    unseen = Rate(None, "not measured: torch has 2 cards")
    assert peer_rates(3) == dict.fromkeys(peer_names(3), unseen)
    assert rates_together(3) == dict.fromkeys(TOGETHER, unseen)
