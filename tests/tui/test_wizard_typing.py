"""Typing into the wizard faster than it draws: every key arrives, once, where it was typed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from textual.events import Key
from textual.widgets import Input

from fluxtui.answers.answers import Answers
from fluxtui.wizard.steps.source_step import SourceStep
from fluxtui.wizard.steps.step import AnswersChanged
from fluxtui.wizard.steps.widgets import ChoiceList

Opened = Callable[..., AbstractAsyncContextManager[Any]]
FOLDER = Answers(model_source="folder", step="model")


def field(wizard: Any) -> Input:
    return wizard.screen.query_one("#model_folder-input", Input)


def typed(widget: Any, text: str) -> None:
    """Keys on their way to a widget, none of them handled yet."""
    for character in text:
        widget.post_message(Key(character, character))


async def test_an_answer_that_arrives_late_does_not_undo_what_was_typed_since(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, FOLDER) as wizard:
        await wizard.press("slash", "m")
        await wizard.until(lambda: wizard.screen.answers.model_folder == "/m")
        wizard.screen.query_one("#model", SourceStep).post_message(
            AnswersChanged({"model_folder": "/"})
        )
        await wizard.until(lambda: wizard.screen.answers.model_folder == "/")
        assert (field(wizard).value, field(wizard).cursor_position) == ("/m", 2)
        await wizard.press("o")
        await wizard.until(lambda: wizard.screen.answers.model_folder == "/mo")


async def test_keys_that_were_on_their_way_to_the_list_stay_in_front(
    folder: Path, opened: Opened
) -> None:
    async with opened(folder, FOLDER) as wizard:
        choices = wizard.screen.query_one("#model", SourceStep).query_one(ChoiceList)
        typed(choices, "/")
        await wizard.until(lambda: field(wizard).value == "/")
        typed(field(wizard), "dels")
        await wizard.until(lambda: field(wizard).value == "/dels")
        typed(choices, "mo")
        await wizard.until(lambda: field(wizard).value == "/models")
        assert field(wizard).cursor_position == len("/models")


async def test_a_path_typed_at_once_on_the_list_arrives_whole(folder: Path, opened: Opened) -> None:
    async with opened(folder, FOLDER) as wizard:
        typed(wizard.app, "/models/mine")
        await wizard.until(lambda: wizard.screen.answers.model_folder == "/models/mine")
        assert field(wizard).value == "/models/mine"
