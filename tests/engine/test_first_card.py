"""A run that names its cards measures, and asks for memory, on the first of them: torch's current
card until then is the machine's first, which others may need."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

import fluxtrain
from fluxtrain.config.schema import load_config
from fluxtrain.errors import BadInput
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure.probe import probe as probing
from fluxtrain.results import opened as opening
from fluxtrain.results.model_request import ModelRequest
from fluxtrain.train.placing import cards as device_budget
from fluxtrain.train.placing import placing
from fluxtrain.units import GIB

MakeConfig = Callable[..., Path]
ENGINE = Path(fluxtrain.__file__).parent
# Asked of the current card where the last argument is left out: how many arguments name one.
ASKED = {
    "mem_get_info": 1, "memory_reserved": 1, "memory_allocated": 1, "max_memory_allocated": 1,
    "reset_peak_memory_stats": 1, "memory_stats": 1, "synchronize": 1, "current_stream": 1,
    "get_device_capability": 1, "get_device_properties": 1, "get_device_name": 1, "Stream": 1,
    "set_per_process_memory_fraction": 2,
}  # fmt: skip
# What these measure is the current card's by their docstrings, or any card's.
OF_THE_CURRENT = {
    "measure/probe/bandwidth.py", "machine/page_locking.py",
    "core/optimizer/third_party.py", "results/export/gate.py", "parallel/profile.py",
}  # fmt: skip


class Cards:
    """Pretended GPUs with 20, 30, ... GiB free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 3) -> None:
        self.current = 0
        self.shares: dict[int, float] = {}
        fakes: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: self.current,
            "set_device": self.make_current,
            "mem_get_info": lambda index: ((20 + 10 * index) * GIB, 100 * GIB),
            "memory_reserved": lambda index: 0,
            "get_device_capability": lambda index: (8, index),
            "set_per_process_memory_fraction": self.hold,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(device_budget, "_context_bytes", lambda *_: 0)

    def make_current(self, device: Any) -> None:
        self.current = device if isinstance(device, int) else device.index

    def hold(self, share: float, index: int) -> None:
        self.shares[index] = share


@pytest.mark.parametrize(
    ("cards", "first"), [([1], 1), ([2, 0], 2), ([0, 1], 0), (2, 0), ("auto", 0)]
)
def test_the_first_named_card_is_current_once_the_device_is_chosen(
    cards: Any, first: int, monkeypatch: pytest.MonkeyPatch, run_config: MakeConfig
) -> None:
    there = Cards(monkeypatch)
    config = load_config(run_config(parallel__cards=cards, placement__device="cuda"))
    assert placing.choose_device(config).value == "cuda"
    assert there.current == first
    assert placing.capacity_of(read_machine(), "cuda").device_free_bytes == (20 + 10 * first) * GIB
    assert placing.card_capability("cuda") == (8, first)


def test_a_budget_is_of_the_card_that_computes(
    monkeypatch: pytest.MonkeyPatch, run_config: MakeConfig
) -> None:
    there, made = Cards(monkeypatch), list[Any]()
    monkeypatch.setattr(device_budget.torch, "zeros", lambda _, device: made.append(device))
    placing.choose_device(load_config(run_config(parallel__cards=[1], placement__device="cuda")))
    device_budget.hold_to_budget(50.0)
    assert made == [torch.device("cuda", 1)]
    assert there.shares.keys() == {1} and there.shares[1] == pytest.approx(0.5, abs=0.01)


def test_a_budget_is_also_of_what_nccl_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    Cards(monkeypatch)
    monkeypatch.setattr(device_budget.torch, "zeros", lambda _, device: None)
    alone = device_budget.hold_to_budget(50.0)
    joined = {
        "is_initialized": lambda: True, "get_world_size": lambda: 2,
        "get_backend_config": lambda: "cpu:gloo,cuda:nccl",
    }  # fmt: skip
    for name, value in joined.items():
        monkeypatch.setattr(distributed, name, value)
    among_two = device_budget.hold_to_budget(50.0)
    assert alone is not None and among_two == alone - device_budget.nccl_bytes() < alone - GIB


def test_a_model_in_use_has_its_first_card_current_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = Cards(monkeypatch)

    def reads(*_: Any, **__: Any) -> Any:
        raise BadInput("read")

    monkeypatch.setattr(opening, "load_model", reads)
    with pytest.raises(BadInput, match="read"):
        opening.open_model(ModelRequest(named="demo", cards="2,1"), lambda _: None)
    assert there.current == 2


def test_the_probe_measures_the_first_card_whichever_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = Cards(monkeypatch)
    there.current = 1

    class Current:
        def __init__(self, card: int) -> None:
            self.card, self.before = card, there.current

        def __enter__(self) -> None:
            there.current = self.card

        def __exit__(self, *_: object) -> None:
            there.current = self.before

    monkeypatch.setattr(torch.cuda, "device", Current)
    seen: list[int] = []
    monkeypatch.setattr(probing, "bus_rates", lambda **_: seen.append(there.current) or {})
    monkeypatch.setattr(probing, "matmul_rate", lambda _: seen.append(there.current))
    machine: Any = SimpleNamespace(
        memory_available_bytes=8 * GIB, cpu_quota=None, gpus=("one", "two")
    )
    measurements = probing._measurements(machine, Path())
    for name in ("bus", "GPU arithmetic"):
        measurements[name][1]()
    assert (seen, there.current) == ([0, 0], 1)


def calls(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name of each call of `torch.cuda` in a file, and how many arguments it has."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        asked = node.func if isinstance(node, ast.Call) else None
        if isinstance(asked, ast.Attribute) and ast.unparse(asked.value) == "torch.cuda":
            assert isinstance(node, ast.Call)
            yield asked.attr, len(node.args) + len(node.keywords)


def test_the_engine_says_of_which_card_it_asks() -> None:
    silent = [
        f"{path.relative_to(ENGINE)}: torch.cuda.{name}"
        for path in sorted(ENGINE.rglob("*.py"))
        if path.relative_to(ENGINE).as_posix() not in OF_THE_CURRENT
        for name, arguments in calls(path)
        if arguments < ASKED.get(name, 0)
    ]
    assert silent == []
