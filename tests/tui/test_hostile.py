"""What others wrote: text that would steer the terminal, impossible numbers, and bad files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from fluxtrain.events import events as ev
from fluxtrain.events.frames import Skipped, classify_line, encode_frame
from fluxtrain.events.printable import printable, printable_lines, printable_texts
from fluxtrain.events.reader import JournalFollower
from fluxtui import csv_tables
from fluxtui.answers.answers import Answers
from fluxtui.app import FluxApp
from fluxtui.panels import PANELS
from fluxtui.screens.chrome import header_line, notice_lines, status_line
from fluxtui.screens.panel_screen import framed
from fluxtui.screens.plan import plan_lines
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.view import ChartSettings, View
from fluxtui.themes import DEFAULT_THEME, load_themes

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x1b[31m[bold]evil[/\u202e\x9b5m\r\x00"
SIZE = (120, 40)
TEXTS = (ESCAPE, "", "x" * 300, "a\nb\tc", "[/]")
WHOLE = (-1, 0, 2**62, -(2**63))
FLOATS = (float("nan"), float("inf"), float("-inf"), 1e308, -1.0, 0.0, 1e-320)


# --- texts ----------------------------------------------------------------------------------------


def test_what_would_steer_a_terminal_becomes_a_mark_and_the_rest_stays() -> None:
    assert printable("Zoë 模型 🙂 [b]") == "Zoë 模型 🙂 [b]"
    shown = printable(ESCAPE)
    assert shown.isprintable() and len(shown) == len(ESCAPE) and "evil" in shown
    assert printable("a\n\t\u00a0b\ud800") == "a   b\N{REPLACEMENT CHARACTER}"
    assert printable_lines("a\x1b\nb") == "a\N{REPLACEMENT CHARACTER}\nb"


def test_an_event_without_such_text_is_the_same_one(made: ModuleType) -> None:
    for event in made.training(3):
        assert printable_texts(event) is event


def spoiled(value: Any) -> Any:
    """`value` with an escape in every text of it."""
    if isinstance(value, str):
        return value + ESCAPE
    if isinstance(value, msgspec.Struct):
        keep = ("kind", "phase", "level", "schema", "offload")  # these choose among a few words
        parts = {n: getattr(value, n) for n in value.__struct_fields__ if n not in keep}
        return msgspec.structs.replace(value, **{n: spoiled(part) for n, part in parts.items()})
    if isinstance(value, list | tuple):
        return type(value)(spoiled(item) for item in value)
    return value


def spoiled_run(made: ModuleType, path: Path) -> None:
    events = [*made.training(80), ev.LogWritten(level="error", text="it broke")]
    events += [ev.Failed(kind="bug", message="why", exit_code=1)]
    made.write(path, made.stamped([spoiled(event) for event in events]))


def test_every_text_of_a_journal_comes_printable(made: ModuleType, tmp_path: Path) -> None:
    spoiled_run(made, tmp_path / "events.ndjson")
    events = JournalFollower(tmp_path / "events.ndjson").read_all()
    assert len(events) > 80
    for event in events:
        assert printable_texts(event) is event, event


def unprintable(app: FluxApp) -> set[str]:
    """What of the screen in front is not for people."""
    strips = app.screen._compositor.render_strips()
    texts = [segment.text for strip in strips for segment in strip if not segment.control]
    return {character for text in texts for character in text if not character.isprintable()}


@pytest.mark.parametrize("size", [(80, 24), SIZE])
async def test_no_screen_hands_an_escape_of_the_journal_to_the_terminal(
    made: ModuleType, app_pilot: Any, tmp_path: Path, size: tuple[int, int]
) -> None:
    run = tmp_path / "runs" / f"r{ESCAPE}".replace("\0", "").replace("/", "")
    run.mkdir(parents=True)
    spoiled_run(made, run / "events.ndjson")
    (run / "error.json").write_text(json.dumps({"exit_code": 1, "message": ESCAPE}))
    app = app_pilot.app_on(run, made)
    async with app.run_test(size=size) as pilot:
        await app_pilot.drawn(pilot)
        for key in ("1", "2", "3", "4", "5", "6", "S", "7", "question_mark"):
            await pilot.press(key)
            await app_pilot.still(pilot)
            assert unprintable(app) == set(), key
        await pilot.press("escape", "v")
        await app_pilot.still(pilot)
        assert unprintable(app) == set()


async def test_a_notice_is_words_and_no_markup(app_pilot: Any, tmp_path: Path) -> None:
    app = FluxApp(None, start_screen="runs", runs_folder=tmp_path, sample_machine=False)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        app.notify(f"[red]{ESCAPE}[/nothing]", title=ESCAPE)
        await app_pilot.until(pilot, lambda: "[red]" in app_pilot.text_of(app))
        assert unprintable(app) == set()


async def test_the_wizard_shows_a_document_with_escapes_without_obeying_it(
    folder: Path, opened: Any
) -> None:
    inspection = json.loads((folder / "inspect.json").read_text())
    inspection["samples"][0]["pieces"][0]["text"] = ESCAPE
    (folder / "inspect.json").write_text(json.dumps(inspection))
    document = ESCAPE.replace("\0", "")
    (folder / "evil.txt").write_text(f"{document}\n" * 20)
    answers = Answers(
        step="data", data_source="path", data_path=str(folder / "evil.txt"), resume_run=ESCAPE
    )
    async with opened(folder, answers, SIZE) as wizard:
        await wizard.until(lambda: "evil[/" in wizard.text())
        assert unprintable(wizard.app) == set()
        await wizard.go_to("launch")
        await wizard.until(lambda: "step 7 of 7" in wizard.text())
        assert unprintable(wizard.app) == set()


# --- numbers --------------------------------------------------------------------------------------


def changed(value: Any, chance: random.Random) -> Any:
    """`value` with something in it that nobody expects."""
    if isinstance(value, bool):
        return not value
    for kind, odd in ((int, WHOLE), (float, FLOATS), (str, TEXTS)):
        if isinstance(value, kind):
            return chance.choice(odd)
    if isinstance(value, msgspec.Struct):
        name = chance.choice(value.__struct_fields__)
        return msgspec.structs.replace(value, **{name: changed(getattr(value, name), chance)})
    if isinstance(value, list | tuple) and value:
        items = list(value)
        at = chance.randrange(len(items))
        items[at] = changed(items[at], chance)
        return type(value)([] if chance.random() < 0.2 else items)
    if isinstance(value, dict):
        return {key: changed(item, chance) for key, item in value.items()}
    return value


def as_read(events: Iterable[Any]) -> list[Any]:
    """The events as a reader gets them; what cannot be written or read is left out."""
    read = (classify_line(encode_frame(event).rstrip(b"\n")) for event in events)
    return [event for event in read if not isinstance(event, Skipped)]


@pytest.mark.parametrize("seed", range(24))
def test_no_number_in_a_journal_ends_the_app(made: ModuleType, seed: int) -> None:
    chance = random.Random(seed)
    events = made.training(30)
    for _ in range(6):
        at = chance.randrange(1, len(events))
        events[at] = changed(events[at], chance)
    state = FoldedRun().after_all(as_read(events))
    chart = ChartSettings(
        block=chance.choice([None, 99]),
        crosshair=5,
        log_scale=seed % 2 == 0,
        by_tokens=seed % 3 == 0,
    )
    link = Link(process="alive" if seed % 2 else "dead")
    view = View(state=state, link=link, wall_s=(state.last_wall_s or 0.0) + 0.5, chart=chart)
    for width, height in ((76, 12), (37, 5)):
        for panel in PANELS.values():
            framed(panel, view, width, height, "box")
        for draw in (header_line, notice_lines, status_line, plan_lines):
            draw(view, width)
    for name in PANELS:
        csv_tables.csv_of(name, view)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-320, 1e308])
def test_a_curve_is_drawn_around_a_value_that_has_no_place(made: ModuleType, value: float) -> None:
    events = made.training(30)
    wrong = [msgspec.structs.replace(made.step(31), loss=value, grad_norm=value)]
    wrong += [ev.EvaluationFinished(step=31, loss=value, seconds=1.0, count=1)]
    state = FoldedRun().after_all([*events, *wrong])
    for log_scale in (False, True):
        view = View(state=state, wall_s=2e9, chart=ChartSettings(log_scale=log_scale))
        for name in ("loss", "grad_norm", "recent_steps"):
            assert framed(PANELS[name], view, 80, 12, "box")


@pytest.mark.parametrize("pid", [-1, 0, 2**62])
def test_a_process_number_that_none_has_is_no_trainer(pid: int) -> None:
    from fluxtui.sources.machine import MachineSampler

    MachineSampler().sample(pid)


# --- the clock ------------------------------------------------------------------------------------


# --- files ----------------------------------------------------------------------------------------


def theme_text(**changes: str) -> str:
    """The default theme with other values; a name with a dot is a table's."""
    rows = Path(load_themes()[0][DEFAULT_THEME].path).read_text().splitlines()
    for name, value in changes.items():
        rows = [f"{name} = {value}" if row.split("=")[0].strip() == name else row for row in rows]
    return "\n".join(rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (theme_text(name='"a b { color: red; }"'), "a name is letters"),
        (theme_text(name='"\\u001b[2J"'), "a name is letters"),
        (theme_text(background='"hsl(10,20%,30%)"'), "background"),
        (theme_text(axis='"link http://x/\\u001b]0;owned\\u0007"'), "a link"),
        (theme_text() + '\n[variables]\nx = "} * { display: none; "\n', "color x"),
        (theme_text() + "\n[variables]\n\"x;y\" = 'red'\n", "variable"),
        ("a = " + "[" * 5000, "cannot be read"),
    ],
)
def test_a_hostile_theme_is_left_out_and_said(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "evil.toml").write_text(text)
    loaded, problems = load_themes([tmp_path])
    assert loaded == {}
    [problem] = problems
    assert "evil.toml" in problem and said in problem


async def test_settings_that_cannot_be_kept_are_said_once(app_pilot: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    app = FluxApp(
        None, start_screen="runs", runs_folder=tmp_path, sample_machine=False,
        settings_file=tmp_path / "file" / "app.toml",
    )  # fmt: skip
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("t")
        await pilot.press("t")
        await app_pilot.until(pilot, lambda: "Not kept" in str(app_pilot.notes(app)))
        assert len([note for note in app_pilot.notes(app) if "Not kept" in note]) == 1
