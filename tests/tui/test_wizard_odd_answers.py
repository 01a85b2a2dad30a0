"""The wizard with answers that nobody plans for: long lists, names of no user, long paths."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtui.answers.answers import Answers, is_hub_id
from fluxtui.answers.draft import draft_path
from fluxtui.home import expanded, home_folder
from fluxtui.settings import settings_path
from fluxtui.wizard.checks.answer_checks import checked
from fluxtui.wizard.linear import LinearWizard
from fluxtui.wizard.steps.paths import complete_path

LONG = "x" * 300
NOBODY = "~nobody-of-this-name/models"


@pytest.mark.thinned(1)
@pytest.mark.parametrize("size", [(80, 24), (60, 20)])
async def test_of_a_long_list_every_line_can_be_chosen_in_sight(
    folder: Path, opened: Any, made: ModuleType, size: tuple[int, int]
) -> None:
    names = [f"20261121-0315{i:02d}-a-model-with-a-long-name" for i in range(40)]
    for name in names:
        made.write(folder / "runs" / name / "events.ndjson", made.training(1))
    async with opened(folder, Answers(step="start", start="attach"), size) as wizard:
        await wizard.until(lambda: wizard.screen.runs)
        await wizard.press("tab")

        def chosen() -> list[str]:
            return [row for row in wizard.text().split("\n") if "▸" in row and "-name" in row]

        for _ in range(len(names)):
            await wizard.press("down")
        await wizard.until(lambda: wizard.screen.answers.attach_run.endswith(names[0]))
        await wizard.until(lambda: len(chosen()) == 1)
        listed = [row for row in wizard.text().split("\n") if "-name " in row and "✓" not in row]
        assert all("step" in row for row in listed), "a run has one line"
        await wizard.press("shift+tab", "up", "up")
        await wizard.until(lambda: "What would you like to do?" in wizard.text())


@pytest.mark.thinned(1)
@pytest.mark.parametrize("step", ["model", "data"])
async def test_a_name_that_is_no_users_is_typed_on(folder: Path, opened: Any, step: str) -> None:
    answers = Answers(step=step, model_source="folder", data_source="path")  # type: ignore[arg-type]
    async with opened(folder, answers) as wizard:
        await wizard.press(*NOBODY)
        await wizard.until(lambda: NOBODY in wizard.text())
        await wizard.until(lambda: "✗" in wizard.text())
        kept = wizard.screen.answers
        assert NOBODY in (kept.model_folder, kept.data_path)


def test_a_home_that_is_nobodys_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded(" ~/models/ ") == "/home/me/models" and expanded("  ") == ""
    assert expanded(NOBODY) == NOBODY
    assert complete_path(f"{NOBODY}/x", folders_only=True) is None


def test_a_user_without_a_home_has_settings_and_a_draft_at_the_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # no $HOME, and no such user
    assert home_folder({}) == Path("/")
    assert settings_path({}) == Path("/.config/fluxtrain/app.toml")
    assert draft_path({}) == Path("/.local/state/fluxtrain/draft.json")


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        ("start", {"start": "file", "config_path": f"{LONG}/{LONG}.yaml"}),
        ("start", {"start": "resume", "resume_run": f"/{LONG}"}),
        ("model", {"model_source": "folder", "model_folder": f"/{LONG}"}),
        ("data", {"data_source": "path", "data_path": f"/{LONG}"}),
    ],
)
def test_a_path_that_is_too_long_is_what_is_wrong_with_the_answer(
    step: Any, changes: dict[str, Any]
) -> None:
    found = checked(step, Answers(**changes))
    assert found.error is not None and "too long" in found.error


def test_a_name_that_is_too_long_for_a_folder_is_no_folder() -> None:
    assert is_hub_id(f"{LONG}/{LONG}")


def test_an_answer_of_the_engine_that_is_none_is_told_line_by_line_too(folder: Path) -> None:
    (folder / "inspect.json").write_text('{"sampled_documents": 4}')
    said: list[str] = []
    answers = iter(["1", "1", "1", ""])  # new, the demo's model and data, its rows

    def ask(prompt: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    engine = (sys.executable, str(folder / "engine.py"))
    wizard = LinearWizard(
        None, folder / "runs", ask=ask, say=said.append, draft=folder / "d.json", engine=engine
    )
    assert wizard.run() is None
    assert any("its answer cannot be understood: Object missing" in line for line in said)
