"""What each screen looks like, by size and state. `pytest --snapshot-update` accepts a new look."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from textual.pilot import Pilot

from fluxtrain.events.run_folder.run_dir import RunSummary
from fluxtui.app import FluxApp

Compare = Callable[..., bool]
SMALL, WIDE, LARGE = (80, 24), (120, 40), (200, 60)
LOOKS = [
    ("waiting", SMALL), ("failed", SMALL), ("done", SMALL), ("dead", WIDE), ("running", WIDE),
    ("running", LARGE),
]  # fmt: skip


def app_in(made: ModuleType, folder: Path, state: str, **options: Any) -> FluxApp:
    """The app on a run in this state, at a fixed time."""
    run = folder / "20261121-031500-demo"
    run.mkdir()
    events: dict[str, list[Any]] = {
        "waiting": [],
        "failed": made.failed(),
        "done": made.finished(),
    }
    made.write(run / "events.ndjson", events.get(state, made.training(80)))
    if state != "waiting":
        made.write_ring(run / "timeline.ring", range(70, 201 if state == "done" else 81))
    last_s = made.training(80)[-1].wall_s
    source = made.Alive(run)
    if state == "dead":
        source.process = "dead"
    quiet_s = {"dead": 20.0}.get(state, 0.4)
    return FluxApp(source, wall_clock=lambda: last_s + quiet_s, sample_machine=False, **options)


def settled(state: str, *keys: str) -> Callable[[Pilot[None]], Awaitable[None]]:
    """Wait until the state is on the screen and nothing moves any more."""
    kinds = {"done": "finished"}

    async def run_before(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, FluxApp)
        deadline = time.monotonic() + 60
        while app.view.status.kind != kinds.get(state, state) or not read_to(app, state):
            assert time.monotonic() < deadline, app.view.status
            await pilot.pause(0.05)
        await pilot.press(*keys)
        await still(pilot)

    return run_before


def read_to(app: FluxApp, state: str) -> bool:
    """Whether the run was read to its last step."""
    if state == "waiting":
        return bool(app.view.wall_s)
    step = app.view.state.step
    return step is not None and step.step == (200 if state == "done" else 80)


async def still(pilot: Pilot[None]) -> None:
    """Wait until nothing moves for longer than two drawings are apart."""
    seen: list[object] = []
    deadline = time.monotonic() + 60
    while len(seen) < 5 or seen[-5:] != [seen[-1]] * 5:
        assert time.monotonic() < deadline
        await pilot.pause(0.15)
        seen.append(pilot.app.screen._compositor.render_strips())


@pytest.mark.parametrize(("state", "size"), LOOKS, ids=[f"{s}-{w}x{h}" for s, (w, h) in LOOKS])
def test_the_dashboard_in_each_state(
    snap_compare: Compare, made: ModuleType, tmp_path: Path, state: str, size: tuple[int, int]
) -> None:
    app = app_in(made, tmp_path, state)
    assert snap_compare(app, terminal_size=size, run_before=settled(state))


@pytest.mark.parametrize("theme", ["flux-light", "sixteen"])
def test_the_dashboard_in_each_theme(
    snap_compare: Compare, made: ModuleType, tmp_path: Path, theme: str
) -> None:
    app = app_in(made, tmp_path, "running", theme_name=theme)
    assert snap_compare(app, terminal_size=WIDE, run_before=settled("running"))


@pytest.mark.parametrize("screen", ["memory", "transfer", "log", "plan"])
def test_each_other_screen(
    snap_compare: Compare, made: ModuleType, tmp_path: Path, screen: str
) -> None:
    app = app_in(made, tmp_path, "running", start_screen=screen)
    assert snap_compare(app, terminal_size=WIDE, run_before=settled("running"))


def shown(*keys: str) -> Callable[[Pilot[None]], Awaitable[None]]:
    """Settled, then these keys, then settled again."""

    async def run_before(pilot: Pilot[None]) -> None:
        await settled("running")(pilot)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.1)
        await still(pilot)

    return run_before


IN_USE = {
    "crosshair": ("4", "left", "H", "H"),
    "block": ("2", "right", "l", "l"),
}


@pytest.mark.parametrize("name", IN_USE)
def test_a_screen_in_use(
    snap_compare: Compare, made: ModuleType, tmp_path: Path, name: str
) -> None:
    app = app_in(made, tmp_path, "running")
    assert snap_compare(app, terminal_size=SMALL, run_before=shown(*IN_USE[name]))


def test_the_settings(snap_compare: Compare, made: ModuleType, tmp_path: Path) -> None:
    app = app_in(made, tmp_path, "running")
    assert snap_compare(app, terminal_size=SMALL, run_before=shown("S", "j"))


def test_the_loss_beside_another_run(
    snap_compare: Compare, made: ModuleType, tmp_path: Path
) -> None:
    made.write(tmp_path / "other" / "events.ndjson", made.training(120))
    app = app_in(made, tmp_path, "running", start_screen="loss", runs_folder=tmp_path)

    async def run_before(pilot: Pilot[None]) -> None:
        await settled("running")(pilot)
        app.compare_with(tmp_path / "other")
        await pilot.press("b", "left", "H", "H")
        while app.view.compared is None:
            await pilot.pause(0.05)
        await still(pilot)

    assert snap_compare(app, terminal_size=WIDE, run_before=run_before)


def test_the_list_of_runs(
    snap_compare: Compare, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(root: Path) -> list[RunSummary]:
        newest_s = made.training(80)[-1].wall_s
        shared = {"started_s": 0.0, "model": "llama-demo", "method": "full", "total_steps": 200}
        return [
            RunSummary(
                run_id=name, state=state, step=step, loss=3.5,
                path=str((tmp_path if state == "running" else Path("/runs")) / name),
                updated_s=newest_s - age_s, eta_s=eta_s, stepped_s=newest_s, message=message,
                **shared,
            )
            for name, state, step, age_s, eta_s, message in (
                ("20261121-031500-demo", "running", 80, 0.2, 108.0, ""),
                ("20261120-220100-demo", "finished", 200, 18000.0, None, ""),
                ("20261120-210000-demo", "failed", 81, 22000.0, None,
                 "the loss is nan at step 81: lower train.learning_rate (now 3e-4)"),
                ("20261119-120000-demo", "dead", 40, 90000.0, None, ""),
            )
        ]  # fmt: skip

    monkeypatch.setattr("fluxtui.screens.runs.list_runs", listed)
    app = app_in(made, tmp_path, "running", start_screen="runs")
    run_before = shown("j", "j")
    assert snap_compare(app, terminal_size=WIDE, run_before=run_before)


@pytest.mark.parametrize("key", ["Q", "question_mark"])
def test_each_dialog(snap_compare: Compare, made: ModuleType, tmp_path: Path, key: str) -> None:
    app = app_in(made, tmp_path, "running")
    assert snap_compare(app, terminal_size=SMALL, run_before=settled("running", key))


def test_a_tiny_terminal(snap_compare: Compare, made: ModuleType, tmp_path: Path) -> None:
    app = app_in(made, tmp_path, "running")
    assert snap_compare(app, terminal_size=(50, 12), run_before=settled("running"))


def test_without_colours(
    snap_compare: Compare, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = app_in(made, tmp_path, "running")
    assert snap_compare(app, terminal_size=SMALL, run_before=settled("running"))
