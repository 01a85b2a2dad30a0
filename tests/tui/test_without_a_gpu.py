"""Where no GPU trains, no screen speaks of one: labels depend on the machine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtui.actions.table import ACTIONS
from fluxtui.answers.answers import STEPS
from fluxtui.panels import PANELS
from fluxtui.screens.dialogs import help_lines
from fluxtui.state.view import View

OF_A_GPU = re.compile(r"\b(bus|h2d|d2h|gpu|gpus|vram|pcie|cuda|nvml|nvidia)\b", re.IGNORECASE)
RUN_SCREENS = ("dashboard", "memory", "transfer", "loss", "log", "plan", "runs")


def words_of_a_gpu(text: str) -> list[str]:
    """The lines that speak of a GPU."""
    return [line.strip() for line in text.splitlines() if OF_A_GPU.search(line)]


@pytest.mark.thinned(7)
@pytest.mark.parametrize("screen", RUN_SCREENS)
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_no_screen_of_a_run_on_the_processor_names_one(
    run: Path, made: ModuleType, app_pilot: Any, screen: str, size: tuple[int, int]
) -> None:
    made.write_ring(run / "timeline.ring", range(70, 81))
    app = app_pilot.app_on(run, made, start_screen=screen)
    async with app.run_test(size=size) as pilot:
        await app_pilot.drawn(pilot)
        assert words_of_a_gpu(app_pilot.text_of(app)) == []


def test_a_run_on_a_gpu_has_its_own_words(made: ModuleType) -> None:
    events = [made.hello(device="cuda:0"), *made.training(80)[1:]]
    from fluxtui.state.run import FoldedRun

    view = View(state=FoldedRun().after_all(events), wall_s=events[-1].wall_s)
    assert PANELS["bus"].title_in(view) == "Bus"
    told = "\n".join("".join(t for t, _ in line) for line in PANELS["bus"].body(view, 80, 8))
    assert "H2D" in told and "D2H" in told
    on_cpu = replace(view, state=FoldedRun().after_all(made.training(80)))
    assert PANELS["bus"].title_in(on_cpu) == "Copies"
    told = "\n".join("".join(t for t, _ in line) for line in PANELS["bus"].body(on_cpu, 80, 8))
    assert words_of_a_gpu(told) == [] and "in " in told and "out" in told


def test_neither_help_nor_footer_names_one() -> None:
    for screen in RUN_SCREENS:
        told = "\n".join(
            "".join(text for text, _ in line) for line in help_lines(ACTIONS, screen, on_gpu=False)
        )
        assert words_of_a_gpu(told) == []
    assert all(not OF_A_GPU.search(f"{action.label} {action.about}") for action in ACTIONS)


async def test_the_wizard_on_a_machine_without_one_says_so_once(folder: Path, opened: Any) -> None:
    async with opened(folder, size=(120, 40)) as wizard:
        for step in STEPS:
            await wizard.go_to(step)
            if step == "strategy":
                continue  # where it says that there is none
            said = [line for line in words_of_a_gpu(wizard.text()) if "no GPU" not in line]
            assert said == [], step
