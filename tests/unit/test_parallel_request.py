"""The `parallel` section: what can be asked of several cards, and what is refused with the cure."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from fluxtrain.config.schema import demo_config, settings, validate
from fluxtrain.errors import BadInput
from fluxtrain.plan.request import ParallelRequest, check_parallel


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({}, ParallelRequest()),
        ({"cards": 2}, ParallelRequest(cards=2)),
        ({"cards": [2, 0]}, ParallelRequest(cards=(2, 0))),
        ({"cards": "0, 3"}, ParallelRequest(cards=(0, 3))),
        ({"cards": [0]}, ParallelRequest(cards=(0,))),
        ({"dealing": "memory"}, ParallelRequest(dealing="memory")),
        ({"dealing": [20, 16]}, ParallelRequest(dealing=(20, 16))),
        ({"dealing": "20,16"}, ParallelRequest(dealing=(20, 16))),
        ({"order": "fixed"}, ParallelRequest(order="fixed")),
    ],
    ids=str,
)
def test_a_configuration_says_which_cards_compute_what(
    given: dict[str, Any], read: ParallelRequest
) -> None:
    found = validate({"parallel": given}).parallel
    assert found == read
    check_parallel(found)


def test_the_command_line_sets_lists_too() -> None:
    found = demo_config(["parallel.cards=[1, 0]", "parallel.dealing=5,3"]).parallel
    assert found == ParallelRequest(cards=(1, 0), dealing=(5, 3))


def test_every_knob_is_a_setting() -> None:
    keys = [one.key for one in settings(demo_config()) if one.key.startswith("parallel.")]
    assert keys == [f"parallel.{knob.name}" for knob in fields(ParallelRequest)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cards": 0}, ["parallel.cards = 0", "1"]),
        ({"cards": True}, ["parallel.cards = True", "true or false"]),
        ({"cards": [0, 0]}, ["card 0 is named twice", "name each card once"]),
        ({"cards": [-1]}, ["parallel.cards", "0"]),
        ({"cards": []}, ["parallel.cards = []"]),
        ({"cards": "all"}, ["parallel.cards = 'all'", "'auto'"]),
        ({"cards": ["GPU-1"]}, ["parallel.cards"]),
        ({"dealing": [4, 0]}, ["parallel.dealing", "1"]),
        ({"dealing": "fair"}, ["parallel.dealing = 'fair'", "'speed', 'memory' or 'even'"]),
        ({"order": "any"}, ["parallel.order = 'any'", "'fast' or 'fixed'"]),
        ({"order": "fast", "mode": "ddp"}, ["parallel.mode = 'ddp'", "'layers' or 'fsdp'"]),
    ],
    ids=str,
)
def test_what_no_machine_could_do_is_refused(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadInput) as refused:
        validate({"parallel": given})
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("num_gpus", "parallel.cards"),
        ("nproc_per_node", "parallel.cards"),
        ("CUDA_VISIBLE_DEVICES", "parallel.cards"),
        ("tensor_split", "parallel.dealing"),
    ],
)
def test_the_names_of_other_programs_lead_to_ours(name: str, key: str) -> None:
    with pytest.raises(BadInput, match=f"did you mean {key}"):
        validate({name: 2})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"parallel": {"processes": 2, "cards": [0, 1]}}, "so set parallel.cards=2 for each"),
        ({"parallel": {"processes": 2}, "train": {"batch_rows": 3}}, "set train.batch_rows=4"),
    ],
    ids=str,
)
def test_processes_that_cannot_share_the_work_are_refused_before_they_start(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        validate(given)
