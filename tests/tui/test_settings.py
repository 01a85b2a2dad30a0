"""Settings that last, are changed in the app, and keys and themes of a user's own."""

from __future__ import annotations

import dataclasses
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from textual.pilot import Pilot

from fluxtui import settings
from fluxtui.actions.table import ACTIONS, PAGES, RUN_SCREENS
from fluxtui.answers.answers import Answers
from fluxtui.app import FluxApp
from fluxtui.screens.run_screen import RunScreen
from fluxtui.screens.settings import SettingsScreen
from fluxtui.settings import CHOICES, Settings, load_settings, save_settings, settings_path
from fluxtui.widgets.lines import Lines
from fluxtui.wizard.screen import WizardScreen


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return settings_path({"XDG_CONFIG_HOME": str(tmp_path / "config")})


def app_on(made: ModuleType, folder: Path, file: Path | None, **options: Any) -> FluxApp:
    run = folder / "demo"
    events = made.training(40)
    made.write(run / "events.ndjson", events)
    last_s = events[-1].wall_s
    return FluxApp(
        made.Alive(run),
        settings_file=file,
        sample_machine=False,
        runs_folder=folder,
        wall_clock=lambda: last_s + 0.5,
        **options,
    )


async def drawn(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, FluxApp)
    await until(pilot, lambda: app.view.state.step is not None)
    shown = app.screen.query_one("#keys", Lines)
    await until(pilot, lambda: "detach" in shown.text)


async def until(pilot: Pilot[None], true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        await pilot.pause(0.05)


# --- the file -------------------------------------------------------------------------------------


def test_settings_lie_where_the_desktop_standard_says() -> None:
    assert settings_path({"XDG_CONFIG_HOME": "/c"}) == Path("/c/fluxtrain/app.toml")
    assert settings_path({"HOME": "/h"}) == Path("/h/.config/fluxtrain/app.toml")


def test_the_examples_that_the_documents_show_are_taken(file: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "extending.md"
    shown = page.read_text("utf-8").split("```toml\n")[1].split("```")[0]
    assert settings.__doc__ is not None
    own = textwrap.dedent(settings.__doc__.split("app.toml`:\n")[1])
    file.parent.mkdir(parents=True)
    for text in (shown, own):
        file.write_text(text)
        chosen, problems = load_settings(file)
        assert problems == [] and chosen.theme == "flux-light" and chosen.keys["stop"] == "ctrl+q"


def test_saving_leaves_comments_and_keys_as_the_user_wrote_them(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text('# mine\ntheme = "flux-dark"\n\n[keys]\n# as in vim\nstop = "ctrl+q"\n')
    assert save_settings(Settings(theme="flux-light"), file)
    text = file.read_text()
    assert text.startswith('# mine\ntheme = "flux-light"\n')
    assert text.endswith('\n[keys]\n# as in vim\nstop = "ctrl+q"\n')
    settings, problems = load_settings(file)
    assert settings.theme == "flux-light" and settings.keys == {"stop": "ctrl+q"}
    assert problems == []


def test_a_file_that_is_no_toml_is_told_and_never_overwritten(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("theme = \n")
    settings, problems = load_settings(file)
    assert settings == Settings() and "cannot be read" in problems[0]
    assert not save_settings(Settings(theme="sixteen"), file)
    assert file.read_text() == "theme = \n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("theme = 3", "theme = 3"),
        ("smooth = 1", "something like True"),
        ('colour = "red"', "no such setting"),
        ("keys = 1", "[keys]"),
        ('[keys]\nfly = "x"', "no such action"),
        ("[keys]\nstop = 3", "keys look like"),
        ('[keys]\nstop = "a b"', "keys look like"),
        ('[keys]\nstop = ""', "keys look like"),
        ('[keys]\nstop = "p"', "pause has this key"),
        ('[keys]\nstop = "r"', "resume_run has this key"),
        ("refresh_hz = 0", "refresh_hz = 0"),
        ("refresh_hz = true", "refresh_hz = True"),
        ("refresh_hz = 1000.0", "refresh_hz = 1000.0"),
        ('[keys]\nstop = "?"', "help has this key"),
        ('[keys]\nlist_down = "k"', "list_up has this key"),
        ('[keys]\nlog_level = "j"', "list_down has this key"),
    ],
)
def test_a_bad_entry_is_told_and_the_others_are_kept(file: Path, text: str, said: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(f"log_scale = true\n{text}\n")
    settings, problems = load_settings(file)
    assert len(problems) == 1 and said in problems[0]
    assert settings == Settings(log_scale=True)


def test_no_two_actions_of_one_screen_share_a_key() -> None:
    for screen in (*RUN_SCREENS, *PAGES):
        keys = [key for one in ACTIONS if one.works_on(screen) for key in one.keys.split(",")]
        assert len(keys) == len(set(keys)), screen


async def test_the_lists_of_the_wizard_take_other_keys(folder: Path) -> None:
    wizard = WizardScreen(Answers(), folder / "runs", draft=folder / "draft.json")
    app = FluxApp(start_screen="wizard", sample_machine=False, make_wizard=lambda: wizard)
    app.settings = dataclasses.replace(app.settings, keys={"list_down": "f6"})
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.screen is wizard and wizard.focused is not None)
        assert wizard.answers.start == "new"
        await pilot.press("down")
        assert wizard.answers.start == "new"
        await pilot.press("f6")
        await until(pilot, lambda: wizard.answers.start != "new")


# --- in the app -----------------------------------------------------------------------------------


async def test_choices_last_until_the_next_start(
    made: ModuleType, tmp_path: Path, file: Path
) -> None:
    app = app_on(made, tmp_path, file)
    async with app.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        assert not file.exists()
        await pilot.press("y", "e", "t")
        chosen = app.theme
    again = app_on(made, tmp_path, file)
    async with again.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        assert again.theme == chosen != "flux-dark"
        assert again.view.chart.log_scale and not again.view.chart.smooth


async def test_a_users_key_acts_and_is_shown_and_the_old_one_is_free(
    made: ModuleType, tmp_path: Path, file: Path
) -> None:
    file.parent.mkdir(parents=True)
    file.write_text('[keys]\nshow_log = "Z"\nfly = "x"\n')
    app = app_on(made, tmp_path, file)
    async with app.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        assert any("keys.fly" in note.message for note in app._notifications)
        assert "Z Log" in app.screen.query_one("#keys", Lines).text
        await pilot.press("5")
        assert isinstance(app.screen, RunScreen) and app.screen.NAME == "dashboard"
        await pilot.press("Z")
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and app.screen.NAME == "log")


async def test_a_setting_is_changed_with_the_arrows_at_once_and_kept(
    made: ModuleType, tmp_path: Path, file: Path
) -> None:
    app = app_on(made, tmp_path, file)
    async with app.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        await pilot.press("S")
        await until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        await until(pilot, lambda: "refresh" in app.screen.query_one("#body", Lines).text)
        names = list(CHOICES)
        await pilot.press(*["j"] * names.index("refresh_hz"), "right")
        assert app.period_s() == 1 / 8
        await pilot.press("h", "left")
        assert app.period_s() == 1 / 2
        await pilot.press(*["j"] * 5, "l")
        assert app.view.chart.by_tokens
        text = app.screen.query_one("#body", Lines).text
        assert "‹ 2 ›" in text and "by tokens       ‹ on ›" in text
        assert str(file) in app.screen.query_one("#keys-in-use", Lines).text
    settings, problems = load_settings(file)
    assert (settings.refresh_hz, settings.by_tokens, problems) == (2.0, True, [])


async def test_low_bandwidth_draws_rarely_and_plainly_until_it_is_turned_off(
    made: ModuleType, tmp_path: Path, file: Path
) -> None:
    app = app_on(made, tmp_path, file, low_bandwidth=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        assert (app.period_s(), app.theme, app.animation_level) == (1.0, "sixteen", "none")
        await pilot.press("S")
        await until(pilot, lambda: isinstance(app.screen, SettingsScreen))
        app.turn_setting("low_bandwidth", 1)
        app.turn_setting("low_bandwidth", 1)
        assert (app.period_s(), app.theme) == (0.25, "flux-dark")


async def test_a_users_themes_are_found_and_a_bad_one_is_told_and_skipped(
    made: ModuleType, tmp_path: Path, file: Path
) -> None:
    own = file.parent / "themes"
    own.mkdir(parents=True)
    shipped = (Path(__file__).parents[2] / "themes" / "flux-dark.toml").read_text()
    (own / "mine.toml").write_text(shipped.replace('"flux-dark"', '"mine"'))
    (own / "broken.toml").write_text("[colors]\n")
    app = app_on(made, tmp_path, file, theme_name="mine")
    async with app.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        assert app.theme == "mine"
        assert any("broken.toml" in note.message for note in app._notifications)


async def test_a_theme_of_the_users_own_replaces_one_that_comes_along(
    made: ModuleType, tmp_path: Path, file: Path
) -> None:
    own = file.parent / "themes"
    own.mkdir(parents=True)
    shipped = (Path(__file__).parents[2] / "themes" / "flux-dark.toml").read_text()
    (own / "any.toml").write_text(shipped.replace("#0d1117", "#000000"))
    app = app_on(made, tmp_path, file)
    async with app.run_test(size=(120, 40)) as pilot:
        await drawn(pilot)
        assert app.current_theme.background == "#000000"
