"""The wizard's pages as functions of a view: they keep their width and say what is known."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest
from msgspec import convert

from fluxtrain.errors import EXIT_DOES_NOT_FIT
from fluxtrain.events.answers.answers import DryRunAnswer, InspectionAnswer
from fluxtui.answers.answers import Answers
from fluxtui.wizard.checks.answer_checks import Check
from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.engine.machine import machine_table
from fluxtui.wizard.engine.plan_preview import checkpoints
from fluxtui.wizard.pages.data import data_page, histogram
from fluxtui.wizard.pages.launch import launch_page
from fluxtui.wizard.pages.method import fit_words, method_page
from fluxtui.wizard.pages.strategy import strategy_page
from fluxtui.wizard.pages.wizard_view import WizardView
from tests.tui.wizard_pilot import GPU, LAYOUT, MACHINE

PAGES = (data_page, launch_page, method_page, strategy_page)


@pytest.fixture
def known(wizard_pilot: ModuleType) -> WizardView:
    """Everything was asked and answered."""
    plan = wizard_pilot.planned()
    return WizardView(
        checks={"data": Check(facts=(("format", "jsonl"),))},
        probe=Asked(value=wizard_pilot.probed()),
        inspection=Asked(value=convert(wizard_pilot.INSPECTION, InspectionAnswer)),
        plan=Asked(value=plan),
        cards=plan.plans,
        answers=Answers(step="data"),
        free_disk_bytes=1 << 40,
    )


@pytest.mark.parametrize("width", (56, 76, 92, 160))
@pytest.mark.parametrize("page", PAGES)
def test_every_page_keeps_its_width(page: Any, width: int, known: WizardView) -> None:
    for view in (known, dataclasses.replace(known, short=True)):
        assert max(map(len, page(view, width).plain.split("\n"))) <= width
    assert page(WizardView(), width).plain, "and says something when nothing is known"


@pytest.mark.parametrize("page", PAGES)
def test_a_refusal_is_told_on_every_page_that_needs_the_answer(page: Any) -> None:
    refused: Asked[Any] = Asked(refusal="the model needs 80 GiB", exit_code=EXIT_DOES_NOT_FIT)
    view = WizardView(
        answers=Answers(step="data"), checks={"data": Check()}, plan=refused, inspection=refused,
        probe=refused, trial=refused,
    )  # fmt: skip
    assert "the model needs 80 GiB" in page(view, 80).plain


def test_what_is_trained_on_is_marked_by_a_bar_and_the_rest_is_not(known: WizardView) -> None:
    lines = [line.rstrip() for line in data_page(known, 80).plain.split("\n")]
    assert "▌ So it is.<|end|>" in lines and "  <|user|>Why?" in lines
    short = data_page(dataclasses.replace(known, short=True), 80).plain
    assert short.index("▌") < short.index("Lengths"), "above the fold of a low screen"


def test_a_histogram_counts_every_document_and_marks_the_row() -> None:
    found = histogram([10, 40, 150, 200], 128, 40)
    assert sum(found.counts) == 4 and found.longest == 200
    assert found.marked == 128 * 40 // found.limit


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda"}, "fits"),
        ({"device": "cuda", "layout": {**LAYOUT, "offload": "weights"}}, "fits with offload"),
        ({"host_bytes": 2**40}, "does not fit"),
    ],
)
def test_a_card_says_whether_the_method_fits(
    changes: dict[str, Any], words: str, wizard_pilot: ModuleType
) -> None:
    view = WizardView(plan=Asked(value=wizard_pilot.planned(**changes)))
    assert fit_words(view) == words
    assert fit_words(WizardView(plan=Asked(refusal="x", exit_code=1))) == "not known"


def test_the_machine_is_told_with_its_limits_and_who_else_uses_the_gpu(
    wizard_pilot: ModuleType,
) -> None:
    other = {"pid": 12, "used_bytes": 2**30, "is_ours": False}
    gpu = {**GPU, "other_processes": [other]}
    machine = {**MACHINE, "gpus": [gpu], "memory_limit_bytes": 2**31, "memory_installed_bytes": 0}
    told = str(machine_table(wizard_pilot.probed(machine=machine)))
    assert "1 other" in told and "process 12 (1.00 GiB)" in told and "(cgroup)" in told
    without = str(machine_table(wizard_pilot.probed()))
    assert "none" in without and "bus to the GPU" not in without


def test_the_launch_tells_memory_time_and_disk_and_measures_them_in_a_dry_run(
    known: WizardView, wizard_pilot: ModuleType
) -> None:
    told = launch_page(known, 92).plain
    for words in ("2.00 MiB of 2.00 GiB", "estimated", "10 checkpoints of 1.00 MiB", "config.yaml"):
        assert words in told
    assert told.count("fluxtrain train --demo") == 1
    tried = Asked(value=convert(wizard_pilot.TRIAL, DryRunAnswer), asked_s=0.0)
    told = launch_page(dataclasses.replace(known, trial=tried), 92).plain
    assert "-50%" in told and "1m 30s to 2m 00s" in told
    assert told.index("Dry run") < told.index("model"), "in front, where it is seen"


@pytest.mark.parametrize(("every", "count"), [("end", 1), (50, 4), ("auto", 10)])
def test_checkpoints_are_counted(every: Any, count: int, wizard_pilot: ModuleType) -> None:
    plan = wizard_pilot.planned(config={"train": {"checkpoint_every": every}})
    assert checkpoints(plan) == count
