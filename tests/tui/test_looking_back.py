"""Looking through the last steps."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

from fluxtui.app import FluxApp
from fluxtui.panels.recent_steps import PANEL
from fluxtui.sources.replay import ReplaySource
from fluxtui.state.run import STEPS_LIMIT, FoldedRun
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.lines import Lines


def shown(view: View, height: int = 10) -> list[int]:
    lines = ["".join(text for text, _ in spans) for spans in PANEL.body(view, 80, height)]
    return [int(text.split()[0]) for text in lines]


def test_the_list_follows_the_newest_step_until_one_looks_back(made: ModuleType) -> None:
    view = View(state=FoldedRun().after_all(made.training(80)))
    assert shown(view)[0] == 80 and view.looked_at(10) is None
    back = View(state=view.state, chart=ChartSettings(last_step=view.looked_at(-10)))
    assert shown(back) == list(range(70, 60, -1))
    assert back.looked_at(10) is None


def test_the_oldest_step_that_is_kept_ends_the_way_back(made: ModuleType) -> None:
    state = FoldedRun().after_all(made.training(300, 400))
    view = View(state=state)
    for _ in range(100):
        view = View(state=state, chart=ChartSettings(last_step=view.looked_at(-10)))
    assert shown(view) == list(range(54, 44, -1)) and 300 - STEPS_LIMIT + 1 == 45


def test_what_is_looked_at_stays_while_the_run_goes_on(made: ModuleType) -> None:
    chart = ChartSettings(last_step=50)
    early, late = (FoldedRun().after_all(made.training(steps)) for steps in (80, 120))
    assert shown(View(state=early, chart=chart)) == shown(View(state=late, chart=chart))


def test_a_run_without_steps_has_nothing_to_look_at() -> None:
    assert View().looked_at(-10) is None and View().looked_at(10) is None


def test_a_run_of_few_steps_stays_whole(made: ModuleType) -> None:
    assert View(state=FoldedRun().after_all(made.training(4))).looked_at(-10) is None


async def test_comma_and_full_stop_go_back_and_forth(made: ModuleType, tmp_path: Path) -> None:
    source = ReplaySource(made.write(tmp_path / "events.ndjson", made.training(80)), None)
    app = FluxApp(source, start_screen="transfer", sample_machine=False)
    async with app.run_test(size=(120, 40)) as pilot:
        deadline = time.monotonic() + 60
        while app.view.state.step is None:
            assert time.monotonic() < deadline
            await pilot.pause(0.05)
        await pilot.press("comma")
        assert app.view.chart.last_step == 70
        assert "up to step 70" in app.screen.query_one("#recent_steps", Lines).text
        await pilot.press("full_stop")
        assert app.view.chart.last_step is None
