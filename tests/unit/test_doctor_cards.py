"""What doctor and probe tell of several cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fluxtrain.commands.doctor.card_findings import several_cards_findings
from fluxtrain.events.answers.machine import TOGETHER, Card, ProbeAnswer, Rate
from fluxtrain.machine.disk import read_disk
from fluxtrain.machine.seen_cards import cards_seen
from fluxtrain.measure.probe import probe as probing
from fluxtrain.measure.probe.cards import NO_ACCESS, WRONG, further_card_names, peer_names
from fluxtrain.measure.probe.table import card_lines, card_rows
from tests.unit.fake_cards import Cuda, gpu, machine


def answer(tmp_path: Path, cards: tuple[Card, ...], **per_s: Rate | float) -> ProbeAnswer:
    found = {n: r if isinstance(r, Rate) else Rate(r, "timed") for n, r in per_s.items()}
    return ProbeAnswer(
        machine=machine(gpu(0), gpu(1)),
        disk=read_disk(tmp_path),
        rates=found,
        cards=cards,
        measured_at_s=0.0,
        measuring_s=1.0,
    )


TWO = cards_seen(machine(gpu(0), gpu(1)), Cuda("00", "11"))
SOUND: dict[str, Any] = {
    "h2d_pinned": 25e9,
    "card1_h2d_pinned": 25e9,
    "cards_h2d": 49e9,
    "cards_d2h": 48e9,
    "cards_both_ways": 80e9,
    "peer_0_1": 300e9,
    "peer_1_0": 310e9,
}


def test_the_screen_shows_each_card_all_at_once_and_the_pairs(tmp_path: Path) -> None:
    shown = dict(card_lines(answer(tmp_path, TWO, **SOUND)))
    assert shown["card 1"].startswith(
        "RTX 4090, GPU 1 of nvidia-smi, NUMA node 1: pinned 25.0 GB/s"
    )
    assert (
        shown["all cards"] == "at once 49.0 GB/s up, 48.0 GB/s down, 80.0 GB/s both ways together"
    )
    assert shown["peers"] == "every pair: checked copies 300 GB/s to 310 GB/s"
    apart = SOUND | {"peer_0_1": Rate(None, NO_ACCESS), "peer_1_0": Rate(None, WRONG)}
    shown = dict(card_lines(answer(tmp_path, TWO, **apart)))
    assert shown["peers"] == f"0 to 1: {NO_ACCESS}; 1 to 0: {WRONG}"


def test_the_table_of_a_probe_names_cards_that_are_not_usable() -> None:
    (row,) = card_rows((replace(TWO[0], unusable="it is full: end the others"),))
    assert row[0] == "card 0" and row[1] == "23.0 GiB"
    assert row[2].endswith("not usable: it is full: end the others")


def test_sound_cards_have_nothing_to_change(tmp_path: Path) -> None:
    assert list(several_cards_findings(answer(tmp_path, TWO, **SOUND))) == []
    assert list(several_cards_findings(answer(tmp_path, TWO[:1]))) == []


@pytest.mark.parametrize(
    ("rates_", "name", "words"),
    [
        ({"card1_h2d_pinned": 6e9, "cards_h2d": 30e9}, "slot of card 1", "6.00 GB/s to card 1"),
        ({"cards_h2d": 26e9}, "shared bus", "26.0 GB/s up, each alone 50.0 GB/s in all"),
        ({"peer_1_0": Rate(None, WRONG)}, "peer access", "1 to 0"),
    ],
)
def test_what_holds_cards_back_is_found(
    tmp_path: Path, rates_: dict[str, Any], name: str, words: str
) -> None:
    (found,) = several_cards_findings(answer(tmp_path, TWO, **(SOUND | rates_)))
    assert found.name == name
    assert words in found.numbers
    assert found.cure


def test_a_card_that_is_not_usable_and_one_of_an_older_generation_are_found(tmp_path: Path) -> None:
    old = replace(TWO[1], bf16=False, unusable="other programs fill it: end them, or leave it out")
    found = list(several_cards_findings(answer(tmp_path, (TWO[0], old), **SOUND)))
    assert [one.name for one in found] == ["card 1 not usable", "cards of two generations"]
    assert found[0].cure == "end them, or leave it out"
    assert "card 1 (RTX 4090)" in found[1].numbers


def test_a_probe_measures_several_cards_and_keeps_their_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def measured(what: str, names: tuple[str, ...]) -> Any:
        def measure(*_: Any, **__: Any) -> dict[str, Rate]:
            calls.append(what)
            return {
                name: Rate(None, NO_ACCESS) if name == "peer_0_1" else Rate(1e9, "timed")
                for name in names
            }

        return measure

    two = machine(gpu(0), gpu(1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probing, "read_machine", lambda: two)
    monkeypatch.setattr(probing, "others_share", lambda _: None)
    monkeypatch.setattr(probing, "cards_seen", lambda _: TWO)
    names = ("bus_rates", "peer_rates", "rates_together", "further_card_rates")
    answers = (probing.BUS_RATES, peer_names(2), TOGETHER, further_card_names(2))
    for name, some in zip(names, answers, strict=True):
        monkeypatch.setattr(probing, name, measured(name, some))
    one = Rate(1e9, "timed")
    for name in ("host_copy_rate", "matmul_rate", "adamw_rate", "pin_rate"):
        monkeypatch.setattr(probing, name, lambda *_, **__: one)
    monkeypatch.setattr(probing, "disk_rates", lambda _: (one, one))
    first = probing.probe(tmp_path)
    assert first.cards == TWO
    assert calls == list(names)
    monkeypatch.setattr(probing, "FAILED_AGE_S", -1.0)  # what failed would be tried again
    again = probing.probe(tmp_path)
    assert calls == list(names), "no peer access is an answer, and is not asked for again"
    assert (again.cards, again.rates) == (TWO, first.rates)
    assert again.rates["peer_0_1"] == Rate(None, NO_ACCESS)
