"""The wizard's pages as functions of what is known: true to it, within their width."""

from __future__ import annotations

import dataclasses
import time
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert
from msgspec.structs import replace
from textual.content import Content

from fluxtrain.errors import EXIT_BUG, EXIT_DOES_NOT_FIT
from fluxtrain.events.answers.answers import DryRunAnswer, InspectionAnswer
from fluxtrain.events.events import CardLeftOut, CardPlan
from fluxtui.answers.answers import Answers
from fluxtui.state.machine_sample import GpuProcess, GpuSample, MachineSample
from fluxtui.wizard.checks.answer_checks import Check
from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.engine.inspection import histogram, histogram_lines
from fluxtui.wizard.engine.machine import age_text, machine_table
from fluxtui.wizard.engine.plan_preview import checkpoints
from fluxtui.wizard.linear_lines import preview_lines
from fluxtui.wizard.pages.aside import aside
from fluxtui.wizard.pages.data import data_page
from fluxtui.wizard.pages.hardware import hardware_page
from fluxtui.wizard.pages.launch import launch_page
from fluxtui.wizard.pages.method import fit_words, method_page
from fluxtui.wizard.pages.preview import preview_page
from fluxtui.wizard.pages.strategy import strategy_page
from fluxtui.wizard.pages.wizard_view import WizardView
from tests.tui.wizard_pilot import LAYOUT

WIDTHS = (56, 76, 92, 160)
PAGES = (data_page, hardware_page, launch_page, method_page, preview_page, strategy_page)


@pytest.fixture
def known(wizard_pilot: ModuleType) -> WizardView:
    """Everything was asked and answered."""
    plan = wizard_pilot.planned()
    return WizardView(
        checks={"data": Check(facts=(("format", "jsonl"),))},
        probe=Asked(value=wizard_pilot.probed()),
        inspection=Asked(value=convert(wizard_pilot.INSPECTION, InspectionAnswer)),
        plan=Asked(value=plan),
        trial=Asked(value=convert(wizard_pilot.TRIAL, DryRunAnswer)),
        cards=plan.plans,
        answers=Answers(step="data"),
        free_disk_bytes=1 << 40,
    )


def widest(content: Content) -> int:
    return max(len(line) for line in content.plain.split("\n"))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_every_page_keeps_its_width(page: Any, width: int, known: WizardView) -> None:
    assert widest(page(known, width)) <= width
    assert page(WizardView(), width).plain, "and says something when nothing is known"


@pytest.mark.parametrize("page", PAGES)
def test_a_refusal_is_told_on_every_page_that_needs_the_answer(page: Any) -> None:
    refused: Asked[Any] = Asked(refusal="the model needs 80 GiB", exit_code=EXIT_DOES_NOT_FIT)
    view = WizardView(
        answers=Answers(step="data"), checks={"data": Check()}, plan=refused, inspection=refused,
        probe=refused, trial=refused,
    )  # fmt: skip
    assert "the model needs 80 GiB" in page(view, 80).plain


# --- data -----------------------------------------------------------------------------------------


def test_what_is_learnt_is_marked_by_a_bar_and_the_rest_is_not(known: WizardView) -> None:
    lines = [line.rstrip() for line in data_page(known, 80).plain.split("\n")]
    assert "▌ So it is.<|end|>" in lines
    assert "  <|user|>Why?" in lines
    assert "sample 1: 10 tokens, 4 learnt" in lines


@pytest.mark.parametrize("width", WIDTHS)
def test_on_a_low_screen_the_first_sample_stands_above_the_lengths(
    known: WizardView, width: int
) -> None:
    short = dataclasses.replace(known, short=True)
    lines = [line.rstrip() for line in data_page(short, width).plain.split("\n")]
    assert lines.index("▌ So it is.<|end|>") < 8, "below the question and its fields"
    assert widest(data_page(short, width)) <= width
    shown = "\n".join(lines)
    assert shown.index("▌") < shown.index("Lengths") and "90% full" in shown
    assert "✓ format" in shown


def test_what_the_machine_does_now_is_told_beside_what_was_measured(known: WizardView) -> None:
    gpu = GpuSample(name="card", utilisation=0.5, processes=(GpuProcess(pid=7),))
    sample = MachineSample(time.monotonic(), 0.25, 8, 1 << 30, 4 << 30, None, None, (gpu,))
    live = dataclasses.replace(known, machine=sample)
    for page in (hardware_page, aside):
        shown = page(live, 80).plain
        assert "GPU 50%" in shown and "CPU 25%" in shown and "1 other on the GPU" in shown
    waiting = WizardView(machine=sample)
    assert "CPU 25%" in hardware_page(waiting, 80).plain, "also while it is being measured"
    old = dataclasses.replace(
        known, machine=dataclasses.replace(sample, monotonic_s=sample.monotonic_s - 60)
    )
    assert "CPU 25%" not in hardware_page(old, 80).plain


def test_the_share_that_is_cut_and_the_estimate_are_told(known: WizardView) -> None:
    shown = data_page(known, 80).plain
    assert "25% of the documents are longer than a row" in shown
    assert "about 13 rows of 128, 90% full" in shown
    assert "about 16 documents, 1.60 k tokens: by 4 of them" in shown


@given(
    lengths=st.lists(st.integers(1, 100_000), min_size=1, max_size=300),
    row=st.integers(2, 8192),
    columns=st.integers(20, 120),
)
def test_a_histogram_counts_every_document_and_marks_the_row(
    lengths: list[int], row: int, columns: int
) -> None:
    found = histogram(lengths, row, columns)
    assert sum(found.counts) == len(lengths)
    assert found.marked * found.limit <= row * columns < (found.marked + 1) * found.limit
    *bars, axis = histogram_lines(found, row, 3)
    assert {len(line) for line in (*bars, axis)} == {columns}
    assert all(line[found.marked] == "│" for line in bars)
    for column, count in enumerate(found.counts):
        drawn = column == found.marked or bars[-1][column] != " "
        assert drawn or count == 0, "one document is seen too"


def test_a_length_beyond_the_last_column_is_told_with_a_plus() -> None:
    lengths = [10] * 200 + [1_000_000]
    axis = histogram_lines(histogram(lengths, 64, 60), 64, 3)[-1]
    assert axis.endswith("+")
    assert "64 = a row" in axis


def test_samples_keep_their_stretches(wizard_pilot: ModuleType) -> None:
    [sample] = convert(wizard_pilot.INSPECTION, InspectionAnswer).samples
    assert [piece.learnt for piece in sample.pieces] == [False, True]
    part = replace(sample, tokens=5000, shown_tokens=2048)
    assert part.title == "5,000 tokens, 4 learnt, the first 2,048 shown"


# --- method and hardware --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "fits"),
        ({"device": "cuda", "layout": {**LAYOUT, "offload": "none"}}, "fits"),
        ({"device": "cuda", "layout": {**LAYOUT, "offload": "weights"}}, "fits with offload"),
        ({"device": "cuda", "device_bytes": 1 << 40}, "does not fit"),
    ],
)
def test_a_card_says_whether_the_method_fits(
    changes: dict[str, Any], words: str, wizard_pilot: ModuleType
) -> None:
    view = WizardView(plan=Asked(value=wizard_pilot.planned(**changes)))
    assert fit_words(view) == words
    assert words.upper() in method_page(view, 80).plain


def test_a_model_that_does_not_fit_is_told_from_an_engine_that_failed() -> None:
    needs = WizardView(plan=Asked(refusal="needs 80 GiB", exit_code=EXIT_DOES_NOT_FIT))
    broken = WizardView(plan=Asked(refusal="a bug", exit_code=EXIT_BUG))
    assert fit_words(needs) == "does not fit"
    assert fit_words(broken) == "not known"


def test_the_machine_is_told_with_its_limits_and_who_else_uses_the_gpu(
    wizard_pilot: ModuleType,
) -> None:
    gpu = {**wizard_pilot.GPU, "other_processes": [{"pid": 77, "used_bytes": 3 << 30}]}
    machine = {
        **wizard_pilot.MACHINE, "cpu_quota": 4, "cpu_name": "EPYC", "gpus": [gpu],
        "memory_limit_bytes": 64 << 30, "memory_installed_bytes": 128 << 30,
        "memlock_limit_bytes": 8 << 20,
    }  # fmt: skip
    rates = {"pin": {"per_s": 2.1e9, "how": "1.00 GiB locked"}}
    probe = wizard_pilot.probed(machine=machine, rates=rates, measured_at_s=time.time() - 60)
    shown = hardware_page(WizardView(probe=Asked(value=probe)), 120).plain
    for text in (
        "EPYC; limited to 4 (cgroup)", "limited to 64.0 GiB (cgroup); 128 GiB installed",
        "20.0 GiB free", "process 77 (3.00 GiB)", "limit 8.00 MiB", "pinned at 2.10 GB/s",
        "programs that use GPU 0 besides: 1",
    ):  # fmt: skip
        assert text in shown
    assert age_text(probe) == "rates measured 1m 00s ago"


def test_a_rate_that_was_not_measured_says_why_and_shows_no_number(
    wizard_pilot: ModuleType,
) -> None:
    machine = {**wizard_pilot.MACHINE, "gpus": [wizard_pilot.GPU]}
    rows = machine_table(wizard_pilot.probed(machine=machine))
    row = next(row for row in rows if row[0] == "not measured")
    assert row[1:] == ("-", "bus to the GPU: no driver")


# --- strategy and preview -------------------------------------------------------------------------


def test_the_cards_show_speed_memory_time_and_what_binds(known: WizardView) -> None:
    shown = strategy_page(known, 92).plain
    for text in ("fast", "2.00 k", "1.00 MiB", "about 1.7 min", "processor", "balanced", "fit"):
        assert text in shown
    narrow = strategy_page(known, 56).plain
    assert "balanced  1.00 k tokens/s" in narrow, "under each other where there is no room"


def test_the_chosen_card_is_marked_without_colour(known: WizardView) -> None:
    chosen = dataclasses.replace(known, answers=Answers(dial="balanced"))
    shown = strategy_page(chosen, 92).plain
    assert "‹ balanced ›" in shown
    assert "▸ balanced" in shown
    assert "╔" in shown


def test_a_number_that_was_set_is_told_from_a_chosen_one(known: WizardView) -> None:
    mine = dataclasses.replace(known, answers=Answers(batch_rows=16))
    shown = strategy_page(mine, 92).plain
    assert "b batch 16 set" in shown
    assert "c chunk 4   " in shown


def test_without_rates_there_are_no_cards_and_the_reason_is_told(
    known: WizardView, wizard_pilot: ModuleType
) -> None:
    plan = wizard_pilot.planned(predicted=None, predicted_because="adamw is unknown", plans=[])
    view = dataclasses.replace(known, plan=Asked(value=plan), cards=())
    assert "no ranked plans: adamw is unknown" in strategy_page(view, 92).plain
    untried = dataclasses.replace(view, trial=Asked())
    assert "not predicted: adamw is unknown" in preview_page(untried, 92).plain


def test_where_the_dial_has_no_effect_the_reason_is_not_that_of_the_time(
    known: WizardView, wizard_pilot: ModuleType
) -> None:
    wish = {"key": "placement.offload", "value": "max", "default": "auto", "changed": True,
            "description": ""}  # fmt: skip
    plan = wizard_pilot.planned(plans=[], settings=[wish])
    view = dataclasses.replace(known, plan=Asked(value=plan), cards=())
    shown = strategy_page(view, 92).plain
    assert "no ranked plans: placement.offload=max takes the least of the GPU" in shown


def test_the_preview_has_margins_and_the_time_as_an_interval_once_it_was_tried(
    known: WizardView, wizard_pilot: ModuleType
) -> None:
    shown = preview_page(known, 92).plain
    assert "1.00 TiB left" in shown
    assert "200 steps take 1m 30s to 2m 00s, by the speed of the dry run" in shown
    untried = preview_page(dataclasses.replace(known, trial=Asked()), 92).plain
    assert "about 1.7 min, predicted" in untried
    unknown = Asked(value=wizard_pilot.planned(timing="assumed"))
    page = preview_page(dataclasses.replace(known, trial=Asked(), plan=unknown), 92).plain
    assert "time: 50 s to 20 min, as nothing of this model was timed" in page
    assert "not tried yet" in untried


def test_the_preview_has_a_bar_for_each_of_several_cards_and_says_who_is_left_out(
    known: WizardView,
) -> None:
    plan = known.plan.value
    assert plan is not None and "card 0" not in preview_page(known, 92).plain
    gib = 1 << 30
    cards = tuple(
        CardPlan(
            number=at, index=at, name="RTX 4090", blocks=3, device_bytes=(19 + at) * gib,
            budget_bytes=23 * gib, edges=not at,
        )
        for at in range(2)
    )  # fmt: skip
    out = (CardLeftOut(index=2, name="GTX 1060", because="other programs fill it: end them"),)
    several = replace(plan, cards=cards, left_out=out)
    view = dataclasses.replace(known, plan=Asked(value=several))
    shown = " ".join(preview_page(view, 92).plain.split())
    assert "19.0 GiB of 23.0 GiB" in shown and "20.0 GiB of 23.0 GiB" in shown
    assert "cards: card 0: 3 blocks with embedding and head, card 1: 3 blocks" in shown
    assert "card 2 (GTX 1060) is left out: other programs fill it: end them" in shown
    assert any(line.startswith("cards: ") for line in preview_lines(view, several))


@pytest.mark.parametrize(
    ("every", "eta_s", "count"),
    [("auto", 100, 10), ("auto", 60_000, 100), ("end", 1, 1), (30, 1, 7)],
)
def test_the_preview_says_how_much_is_written_to_the_disk(
    every: str | int, eta_s: float, count: int, wizard_pilot: ModuleType
) -> None:
    plan = wizard_pilot.planned(
        predicted={**wizard_pilot.PLAN["predicted"], "eta_s": eta_s},
        config={"train": {"checkpoint_every": every}},
    )
    assert checkpoints(plan) == count
    shown = " ".join(preview_page(WizardView(plan=Asked(value=plan)), 92).plain.split())
    assert f"about {count} checkpoint" in shown
    assert "take 4.00 MiB at most" in shown


def test_measured_stands_beside_predicted_with_the_error_of_the_prediction(
    known: WizardView,
) -> None:
    shown = preview_page(known, 92).plain
    assert "host memory       2.00 MiB    4.00 MiB  -50%" in shown
    assert "more than there is" not in shown


def test_a_trial_over_the_limit_says_so(known: WizardView, wizard_pilot: ModuleType) -> None:
    host = {"predicted": 1, "measured": 10, "limit": 5}
    trial = convert({**wizard_pilot.TRIAL, "host_bytes": host}, DryRunAnswer)
    shown = preview_page(dataclasses.replace(known, trial=Asked(value=trial)), 92).plain
    assert "more memory than there is" in shown


def test_the_yaml_is_in_the_column_beside_where_there_is_one(known: WizardView) -> None:
    answers = Answers(step="preview", data_source="path", data_path="/d.txt")
    wide = dataclasses.replace(known, wide=True, answers=answers)
    assert "config.yaml" not in preview_page(wide, 92).plain
    assert "path: /d.txt" in aside(wide, 40).plain
    assert "path: /d.txt" in preview_page(dataclasses.replace(wide, wide=False), 92).plain
    assert "Your run" in aside(WizardView(), 40).plain


def test_data_that_the_engine_refuses_is_told_at_the_launch() -> None:
    view = WizardView(inspection=Asked(refusal="has no chat template"))
    assert "has no chat template" in launch_page(view, 80).plain
    going_on = dataclasses.replace(view, answers=Answers(start="resume", resume_run="/runs/a"))
    assert "has no chat template" not in launch_page(going_on, 80).plain
    assert "fluxtrain train --resume /runs/a" in launch_page(going_on, 80).plain


@pytest.mark.parametrize("width", [56, 76, 92])
def test_a_machine_without_a_gpu_is_told_in_words_and_without_repeating_why(
    width: int, wizard_pilot: ModuleType
) -> None:
    none = "not measured: NVML says: NVML Shared Library Not Found"
    rates: dict[str, Any] = {
        name: {"per_s": None, "how": none}
        for name in ("h2d_pinned", "d2h_pinned", "h2d_pageable", "gpu_matmul", "pin")
    }
    rates["host_copy"] = {"per_s": 1e10, "how": "256 MiB"}
    machine = {
        **wizard_pilot.MACHINE, "cores": 1, "memlock_limit_bytes": 8 << 20,
        "unknown": {"gpus": "NVML says: NVML Shared Library Not Found"},
    }  # fmt: skip
    probe = wizard_pilot.probed(machine=machine, rates=rates)
    shown = hardware_page(WizardView(probe=Asked(value=probe)), width).plain
    words = " ".join(shown.split())
    assert "NVML" not in words and "no NVIDIA driver is installed here" in words
    assert words.count("GPU") == 1 and "bus" not in words and "page-locked" not in words
    assert "cores 1 " in words and "not measured -" not in words
    assert max(map(len, shown.splitlines())) <= width
