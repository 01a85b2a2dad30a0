"""A run on several cards: the same model, resumed with other cards, told card by card."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from fluxtrain.commands.preview import preview
from fluxtrain.config.schema import load_config
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import BadInput
from fluxtrain.events import events as ev
from fluxtrain.events.answers.machine import Card, Rate
from fluxtrain.machine.machine import read_machine
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity
from fluxtrain.plan.rates import Rates
from fluxtrain.train.live.setup import live_changes
from fluxtrain.train.placing import cards as planning
from fluxtrain.train.placing import placing
from fluxtrain.train.placing.placing import undealt_choice, unused_choices
from fluxtrain.units import GIB
from tests.engine.runs import MakeConfig, losses, run
from tests.on_cards import llama

SIZES = {
    "train__steps": 6, "train__batch_rows": 4, "placement__chunk_rows": 1,
    "train__checkpoint_every": "end", "train__schedule": "constant",
}  # fmt: skip


def test_a_run_on_two_cards_is_that_on_one_and_goes_on_with_three(
    run_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(**SIZES)
    one = run(config, tmp_path / "one")
    two = run(config, tmp_path / "two", "parallel.cards=2")
    assert losses(one) == losses(two)
    run(config, tmp_path / "some", "parallel.cards=3", "train.steps=3")
    some = run(config, tmp_path / "some", resume=str(tmp_path / "some"))
    assert losses(some) == losses(one)
    weights = [load_file(tmp_path / name / "model" / "model.safetensors")
               for name in ("one", "two", "some")]  # fmt: skip
    assert all(torch.equal(weights[0][key], other[key]) for other in weights for key in other)
    told = capsys.readouterr().out
    assert "parallel.cards = 2" in told and "parallel.dealing" in told
    plan = json.loads((tmp_path / "two" / "plan.json").read_text())
    assert {row["card"] for row in plan["placement"]} == {0, 1}
    sampled = [event for event in two if isinstance(event, ev.MemorySampled) and event.cards]
    assert sampled and [card.number for card in sampled[-1].cards] == [0, 1]


def test_cards_that_are_not_there_are_refused_with_numbers(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="card 0 is named twice"):
        run(run_config(**SIZES), tmp_path / "run", "parallel.cards=[0,0]")


def test_while_several_cards_train_the_placement_changes_and_the_bits_stay(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes come between steps, as a user asks for them; the losses stay."""
    how = ("parallel.cards=2", "placement.chunk_rows=2", "placement.offload=weights",
           "placement.device_groups=1", "placement.resident_blocks=0")  # fmt: skip
    whole = run(run_config(**SIZES), tmp_path / "whole", *how)
    made = live_changes
    asked = iter([{"device_groups": 4}, {"device_groups": 0}, {"resident_blocks": 2},
                  {"blocks_without_recompute": 1}, {"blocks_without_recompute": 9}])  # fmt: skip
    answers: list[tuple[bool, str]] = []

    def noted(*args: Any, **more: Any) -> Any:
        found = made(*args, **more)
        took = found.step_took

        def step_took(step: Any) -> None:
            took(step)
            change = next(asked, None)
            if change is not None:
                answers.append(found.ask("apply", change))

        monkeypatch.setattr(found, "step_took", step_took)
        return found

    monkeypatch.setattr("fluxtrain.train.run.live_changes", noted)
    events = run(run_config(**SIZES), tmp_path / "run", *how)
    assert losses(events) == losses(whole)
    changes = [(e.name, e.before, e.after) for e in events if isinstance(e, ev.ChangeApplied)]
    assert changes == [("device_groups", 2, 4), ("device_groups", 4, 0),
                       ("resident_blocks", 0, 2), ("blocks_without_recompute", 0, 1)]  # fmt: skip
    assert [ok for ok, _ in answers] == [True, True, True, True, False]
    assert "blocks_without_recompute=9: weights of 2 blocks stay on the device" in answers[-1][1]


def fake_cuda(monkeypatch: pytest.MonkeyPatch, cards: tuple[Card, ...]) -> dict[int, float]:
    shares: dict[int, float] = {}
    fakes: dict[str, Any] = {
        "current_device": lambda: 0,
        "get_device_capability": lambda index: (8, 9),
        "get_device_properties": lambda index: SimpleNamespace(name=f"card {index}"),
        "mem_get_info": lambda index: (20 * GIB, 24 * GIB),
        "set_per_process_memory_fraction": lambda share, index: shares.update({index: share}),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(planning, "cards_seen", lambda _: cards)
    return shares


def card(index: int, unusable: str = "") -> Card:
    return Card(
        index=index, gpu=index, name=f"card {index}", memory_total_bytes=24 * GIB,
        memory_free_bytes=20 * GIB, compute_capability="8.9", bf16=True, numa_node=0,
        unusable=unusable,
    )  # fmt: skip


def test_every_usable_card_is_held_to_the_budget_and_others_are_not_touched(
    monkeypatch: pytest.MonkeyPatch, run_config: MakeConfig
) -> None:
    shares = fake_cuda(monkeypatch, (card(0), card(1, "other programs fill it"), card(2)))
    found = planning.cards_of(load_config(run_config()), read_machine(), "cuda", 12 * GIB)
    assert [one.free_bytes for one in found.cards] == [12 * GIB, 0, 12 * GIB]
    assert [one.unusable for one in found.cards] == ["", "other programs fill it", ""]
    assert shares == {0: 0.5, 2: 0.5}


def test_cards_that_a_list_does_not_name_are_not_touched(
    monkeypatch: pytest.MonkeyPatch, run_config: MakeConfig
) -> None:
    asked, freed = list[int](), list[torch.device]()
    fake_cuda(monkeypatch, (card(0), card(1), card(2)))
    monkeypatch.setattr(planning, "free_memory", freed.append)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda index: (asked.append(index), (GIB, GIB))[1]
    )
    config = load_config(run_config(parallel__cards=[1]))
    found = planning.cards_of(config, read_machine(), "cuda", None)
    assert asked == [1]
    set_so = "as set with parallel.cards"
    assert [one.unusable for one in found.cards] == [set_so, "", set_so]
    monkeypatch.setattr(planning, "known_rates", lambda _: {})
    monkeypatch.setattr(planning, "_product_s", lambda index: asked.append(index) or 1e-3)
    first = Rates(has_gpu=True, matmul_per_s=1e14, adamw_per_s=1e9, h2d_bytes_per_s=5e10)
    assert planning.rates_of_cards(found, first).cards == (first,) * 3
    assert asked == [1, 1] and freed == [torch.device("cuda", 1)]


def test_a_card_without_bf16_computes_where_the_run_is_in_float16(
    monkeypatch: pytest.MonkeyPatch, run_config: MakeConfig
) -> None:
    old = msgspec.structs.replace(card(1), compute_capability="7.5", bf16=False)
    fake_cuda(monkeypatch, (card(0), old))
    for dtype, usable in (("auto", False), ("float16", True), ("float32", True)):
        config = load_config(run_config(model__dtype=dtype))
        found = planning.cards_of(config, read_machine(), "cuda", None)
        assert ("model.dtype=float16" not in found.cards[1].unusable) is usable, dtype


def test_what_is_asked_of_cards_without_effect_is_told(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config = load_config(run_config(parallel__cards=2, train__optimizer="bnb-adamw-8bit"))
    facts = facts_of(llama(4), "fp32", "plain")
    (choice,) = undealt_choice(config, facts)
    assert (choice.name, choice.value) == ("parallel.cards", "1")
    assert choice.because == "no effect: train.optimizer = bnb-adamw-8bit updates on one card"
    assert undealt_choice(load_config(run_config(parallel__cards=2)), facts) == ()
    alone = load_config(run_config(parallel__cards=[1], train__optimizer="bnb-adamw-8bit"))
    assert undealt_choice(alone, facts) == ()  # it updates on that one


def test_rates_of_a_probe_are_used_where_it_measured_all_cards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probed = {"cards_h2d": 6e10, "cards_d2h": 6e10, "card1_h2d_pinned": 1e10, "h2d_pinned": 5e10}
    monkeypatch.setattr(
        planning, "known_rates", lambda _: {name: Rate(rate, "") for name, rate in probed.items()}
    )
    first = Rates(has_gpu=True, matmul_per_s=1e14, adamw_per_s=1e9, h2d_bytes_per_s=5e10)
    both = CardsCapacity(
        cards=(CardCapacity(index=0, free_bytes=GIB), CardCapacity(index=1, free_bytes=GIB)),
        host_available_bytes=None,
    )
    found = planning.rates_of_cards(both, first)
    assert found.up_together_bytes_per_s == 6e10
    assert found.host_bytes_per_s is not None and found.host_bytes_per_s >= 26e9


@pytest.mark.parametrize(("cards", "first"), [((1,), [1]), ((None,), []), ((2, 0), [2])])
def test_the_first_card_of_a_plan_is_the_current_one(
    cards: tuple[int | None, ...], first: list[int], monkeypatch: pytest.MonkeyPatch,
    run_config: MakeConfig,
) -> None:  # fmt: skip
    """Embedding, head and what stands between the blocks are there."""
    made: list[int] = []
    given: dict[str, Any] = {}

    class Wrapped(Exception):
        pass

    def wrap_placed(*_: Any, **how: Any) -> Any:
        given.update(how)
        raise Wrapped

    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    monkeypatch.setattr("fluxtrain.core.wrap.wrap.wrap_placed", wrap_placed)
    several = len(cards) > 1
    placement: Any = SimpleNamespace(
        several_cards=several, groups=(), cards=[SimpleNamespace(index=at) for at in cards]
    )
    loaded: Any = SimpleNamespace(model=None, weight_files=())
    facts: Any = SimpleNamespace(scales_its_loss=False)
    with pytest.raises(Wrapped):
        placing.wrapped(load_config(run_config()), loaded, "cuda", placement, facts, print)
    assert made == first
    assert given["cards"] == (list(cards) if several else None)


@pytest.mark.parametrize(
    ("how", "processes", "because"),
    [
        ({}, 1, "no effect in one process"),
        ({"parallel__processes": 2}, 1, ""),  # a plan of them
        ({}, 2, ""),  # under torchrun
        ({"parallel__mode": "fsdp"}, 2, "no effect with parallel.mode=fsdp, which"),
    ],
)
def test_settings_of_several_processes_say_where_they_have_no_effect(
    run_config: MakeConfig, how: dict[str, object], processes: int, because: str
) -> None:
    asked = {"parallel__params": "shard", "parallel__gradients": "cpu_reduce"}
    found = list(unused_choices(load_config(run_config(**asked, **how)), processes=processes))
    names = [("parallel.params", "shard"), ("parallel.gradients", "cpu_reduce")] * bool(because)
    assert [(choice.name, choice.value) for choice in found] == names
    assert all(choice.because.startswith(because) for choice in found)
    assert not list(unused_choices(load_config(run_config(**how)), processes=processes))


def test_the_plan_refuses_a_compression_that_is_none(run_config: MakeConfig) -> None:
    asked = {"parallel__mode": "fsdp", "comm__compress": "int9"}
    with pytest.raises(BadInput, match="int8"):
        preview(load_config(run_config(**asked)))
