"""A machine that is not here is read from a file, and refused where the file says too little."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import BadInput
from fluxtrain.plan.facts import Capacity
from fluxtrain.plan.machine_file import read_machine_file
from fluxtrain.units import GIB

LEAST = {
    "machine": {"memory_total_bytes": 64 * GIB, "gpus": [{"memory_total_bytes": 24 * GIB}]},
    "rates": {"gpu_matmul": 1.6e14, "adamw": {"per_s": 1.5e9, "how": "timed"}, "pin": None},
}


def written(folder: Path, content: Any) -> Path:
    path = folder / "machine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_machine_is_read_from_the_least_that_says_it(tmp_path: Path) -> None:
    found = read_machine_file(written(tmp_path, LEAST))
    assert found.capacity == Capacity(device_free_bytes=24 * GIB, host_available_bytes=64 * GIB)
    assert found.per_s == {"gpu_matmul": 1.6e14, "adamw": 1.5e9, "pin": None}
    assert "24.0 GiB" in found.line


def test_what_is_free_counts_more_than_what_is_built_in(tmp_path: Path) -> None:
    machine = {
        "memory_total_bytes": 64 * GIB, "memory_available_bytes": 50 * GIB,
        "gpus": [{"name": "card", "memory_total_bytes": 24 * GIB, "memory_free_bytes": 22 * GIB}],
    }  # fmt: skip
    found = read_machine_file(written(tmp_path, {"machine": machine}))
    assert found.capacity == Capacity(device_free_bytes=22 * GIB, host_available_bytes=50 * GIB)
    assert "card 22.0 GiB" in found.line
    assert found.per_s == {}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("not json", "is not JSON"),
        ([], "has no 'machine'"),
        ({"machine": {}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": GIB, "gpus": [{}]}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": GIB}, "rates": {"adamw": -1}}, "the rate adamw is -1"),
        (
            {"machine": {"memory_total_bytes": GIB}, "rates": {"adamw": 1e-30}},
            "the rate adamw is 1e",
        ),
        ({"machine": {"memory_total_bytes": GIB}, "rates": {"adamw": math.nan}}, "adamw is nan"),
        ({"machine": {"memory_total_bytes": GIB}, "rates": {"adamw": math.inf}}, "adamw is inf"),
        ({"machine": {"memory_total_bytes": GIB}, "rates": [1, 2]}, "rates is no object"),
        ({"machine": {"memory_total_bytes": GIB, "gpus": {"a": 1}}}, "gpus is no list"),
        ({"machine": {"memory_total_bytes": GIB, "gpus": "card"}}, "gpus is no list"),
        ({"machine": {"memory_total_bytes": GIB, "gpus": [5]}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": math.inf}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": math.nan}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": 10**400}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": GIB}, "disk": {"free_bytes": math.inf}}, "free_bytes"),
    ],
)
def test_a_file_that_says_too_little_is_refused(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        read_machine_file(written(tmp_path, content))


def test_a_cards_name_that_a_terminal_would_obey_is_only_shown(tmp_path: Path) -> None:
    machine = {
        "memory_total_bytes": 64 * GIB,
        "gpus": [{"name": "\x1b[31mcard\n" + "x" * 500, "memory_total_bytes": 24 * GIB}],
    }
    line = read_machine_file(written(tmp_path, {"machine": machine})).line
    assert line.isprintable()
    assert "[31mcardxxx" in line
    assert len(line) < 150


def test_all_cards_of_a_file_are_read_in_torchs_order(tmp_path: Path) -> None:
    gpus = [
        {"index": at, "name": name, "memory_total_bytes": size * GIB, "compute_capability": "8.9"}
        for at, (name, size) in enumerate([("small", 8), ("large", 24), ("other", 16)])
    ]
    machine = {"memory_total_bytes": 64 * GIB, "gpus": gpus}
    found = read_machine_file(written(tmp_path, {"machine": machine}))
    assert found.cards is not None
    assert [card.free_bytes for card in found.cards.cards] == [8 * GIB, 24 * GIB, 16 * GIB]
    assert all(text in found.line for text in ("small 8.00 GiB", "large 24.0 GiB"))
    seen = [
        {"index": 0, "gpu": 1, "name": "large", "memory_free_bytes": 23 * GIB},
        {"index": 1, "gpu": 0, "name": "small", "unusable": "other programs fill it: end them"},
    ]
    found = read_machine_file(written(tmp_path, {"machine": machine, "cards": seen}))
    assert found.cards is not None
    assert [(card.name, card.free_bytes, card.unusable) for card in found.cards.cards] == [
        ("large", 23 * GIB, ""), ("small", 8 * GIB, "other programs fill it: end them"),
    ]  # fmt: skip
    assert found.capacity.device_free_bytes == 23 * GIB


def test_a_card_without_bf16_beside_one_that_has_it_cannot_be_used(tmp_path: Path) -> None:
    gpus = [{"memory_total_bytes": 24 * GIB, "compute_capability": told} for told in ("8.9", "7.5")]
    machine = {"memory_total_bytes": 64 * GIB, "gpus": gpus}
    found = read_machine_file(written(tmp_path, {"machine": machine}))
    assert found.cards is not None
    assert [bool(card.unusable) for card in found.cards.cards] == [False, True]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_machine_file(tmp_path / "none.json")
