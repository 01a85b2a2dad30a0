"""Several cards: which is which, rates of each and of all, and copies whose bytes are compared."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fluxtrain.events.answers.machine import TOGETHER, GpuProcess, Rate
from fluxtrain.machine.seen_cards import cards_seen, of_one_generation
from fluxtrain.measure.probe import card_rates as rates
from fluxtrain.measure.probe.card_rates import (
    further_card_names,
    further_card_rates,
    rates_together,
)
from fluxtrain.measure.probe.copies import TorchCopies
from fluxtrain.measure.probe.peers import NO_ACCESS, WRONG, peer_names, peer_rates
from fluxtrain.units import GIB, MIB
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


@dataclass
class Fake:
    """Cards in host memory; `corrupt` pairs deliver one other byte, `apart` ones do not reach."""

    cards: int = 2
    corrupt: tuple[tuple[int, int], ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    full: tuple[int, ...] = ()
    where: dict[int, int] = field(default_factory=dict)  # storage -> card
    kept: list[torch.Tensor] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)  # cards with unfinished copies
    most_at_once: int = 0

    def count(self) -> int:
        return self.cards

    def can_reach(self, source: int, target: int) -> bool:
        return (source, target) not in self.apart

    def on_card(self, card: int, size_bytes: int) -> torch.Tensor:
        if card in self.full:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        made = self.on_host(size_bytes)
        self.where[made.untyped_storage().data_ptr()] = card
        return made

    def on_host(self, size_bytes: int, *, locked: bool = True) -> torch.Tensor:
        made = torch.zeros(size_bytes, dtype=torch.uint8)
        self.kept.append(made)
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor, card: int) -> None:
        ends = [self.where.get(one.untyped_storage().data_ptr()) for one in (source, target)]
        assert card in ends, "a copy is queued on a card that has no part in it"
        target.copy_(source)
        if tuple(ends) in self.corrupt:
            target[-1] ^= 1
        self.queued.append(card)
        self.most_at_once = max(self.most_at_once, len(set(self.queued)))

    def wait(self, card: int) -> None:
        self.queued = [one for one in self.queued if one != card]


SMALL: dict[str, int] = {"checked_bytes": 4099, "timed_bytes": 16384}


def test_checked_copies_between_all_pairs_have_a_rate() -> None:
    fake = Fake(cards=3)
    found = peer_rates(3, copies=fake, **SMALL)
    assert set(found) == set(peer_names(3))
    assert all(rate.per_s for rate in found.values())
    assert all("compared byte for byte" in rate.how for rate in found.values())
    assert fake.queued == []


def test_one_wrong_byte_is_no_rate() -> None:
    found = peer_rates(2, copies=Fake(corrupt=((0, 1),)), **SMALL)
    assert found["peer_0_1"].per_s is None
    assert found["peer_0_1"].how == f"{WRONG}: 1 of 4099 were not those that were sent"
    assert found["peer_1_0"].per_s


def test_a_copy_that_never_arrives_is_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Fake):
        def copy(self, target: torch.Tensor, source: torch.Tensor, card: int) -> None:
            between = all(
                one.untyped_storage().data_ptr() in self.where for one in (target, source)
            )
            if not between:
                super().copy(target, source, card)

    found = peer_rates(2, copies=Lost(), **SMALL)
    assert all(rate.how.startswith(WRONG) for rate in found.values())


def test_cards_without_peer_access_say_so() -> None:
    found = peer_rates(2, copies=Fake(apart=((1, 0),)), **SMALL)
    assert found["peer_1_0"] == Rate(None, NO_ACCESS)
    assert found["peer_0_1"].per_s


def test_a_full_card_costs_its_own_pairs_alone() -> None:
    found = peer_rates(3, copies=Fake(cards=3, full=(2,)), **SMALL)
    assert {name for name, rate in found.items() if rate.per_s} == {"peer_0_1", "peer_1_0"}
    assert found["peer_2_0"].lacked_memory


def test_all_cards_are_measured_at_once() -> None:
    fake = Fake(cards=4)
    found = rates_together(4, 64 * MIB, copies=fake)
    assert set(found) == set(TOGETHER)
    assert all(rate.per_s and "4 cards at once" in rate.how for rate in found.values())
    assert fake.most_at_once == 4
    assert fake.queued == []


def test_cards_that_torch_does_not_see_are_not_measured() -> None:
    for found in (
        peer_rates(3, copies=Fake(cards=2), **SMALL),
        rates_together(3, 64 * MIB, copies=Fake(cards=2)),
    ):
        assert {rate.how for rate in found.values()} == {"not measured: torch has 2 cards"}


def test_too_little_memory_for_all_cards_is_told() -> None:
    assert all(r.lacked_memory for r in rates_together(2, MIB, copies=Fake()).values())


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
    assert all(found[f"card2_{name}"].lacked_memory for name in rates.ONE_CARD)


def test_torchs_calls_name_their_card(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    class Stream:
        def __init__(self, device: int) -> None:
            asked.append(("stream", device))
            self.device = device

    @contextmanager
    def current(stream: Stream) -> Any:
        asked.append(("current", stream.device))
        yield

    def tensor(card: int | None) -> Any:
        device = SimpleNamespace(index=card)
        return SimpleNamespace(is_cuda=card is not None, device=device, copy_=lambda *_, **__: None)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda card: asked.append(("wait", card)))
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda a, b: asked.append(("peer", (a, b)))
    )
    copies = TorchCopies()
    copies.copy(tensor(3), tensor(1), 1)
    assert asked == [("stream", 3), ("current", 3), ("stream", 1), ("current", 1)]
    asked.clear()
    copies.copy(tensor(3), tensor(None), 3)
    copies.copy(tensor(None), tensor(3), 3)
    assert [what for what, _ in asked].count(
        "stream"
    ) == 2  # up and down do not wait for each other
    assert {card for _, card in asked} == {3}
    asked.clear()
    copies.wait(2)
    copies.can_reach(2, 0)
    assert asked == [("wait", 2), ("peer", (2, 0))]
