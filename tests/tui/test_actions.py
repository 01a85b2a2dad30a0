"""The registry of actions: keys, footer and help are made from it."""

from __future__ import annotations

import pytest

from fluxtui.actions.key_map import app_bindings, own_bindings, screen_bindings
from fluxtui.actions.table import ACTIONS, PAGES, RUN_SCREENS, find, footer_actions
from fluxtui.chat.screen import ChatScreen
from fluxtui.panels import PANELS
from fluxtui.screens.dialogs import help_lines
from fluxtui.screens.settings import SettingsScreen
from fluxtui.widgets.footer import action_at, footer_line, shown_actions
from fluxtui.widgets.spans import Line
from fluxtui.wizard.frame import WizardFrame
from fluxtui.wizard.screen import WizardScreen
from fluxtui.wizard.steps.path_entry import PathEntry
from fluxtui.wizard.steps.setting_steps import MethodStep, StrategyStep, TrainingStep
from fluxtui.wizard.steps.source_step import SourceStep
from fluxtui.wizard.steps.step import LaunchStep


def text_of(spans: Line) -> str:
    return "".join(text for text, _ in spans)


def whole(lines: list[Line]) -> str:
    return "\n".join(text_of(spans) for spans in lines)


def test_ids_and_keys_are_unique_on_every_screen() -> None:
    assert len({action.id for action in ACTIONS}) == len(ACTIONS)
    for screen in (*RUN_SCREENS, *PAGES, "chat"):
        keys = [k for a in ACTIONS if a.works_on(screen) for k in a.keys.split(",")]
        assert len(keys) == len(set(keys)), screen


def test_keymap_footer_and_help_come_from_the_registry() -> None:
    pages = (LaunchStep, MethodStep, SourceStep, TrainingStep, PathEntry, StrategyStep)
    of_wizard = (
        *WizardScreen.BINDINGS,
        *(one for page in pages for one in page.BINDINGS),
        *ChatScreen.BINDINGS,
    )
    made = (*app_bindings(), *SettingsScreen.BINDINGS, *own_bindings(), *WizardFrame.BINDINGS)
    on_screens = [binding for name in ("", *RUN_SCREENS) for binding in screen_bindings(name)]
    bound = [binding.id for binding in (*made, *of_wizard, *on_screens)]
    assert set(bound) == {action.id for action in ACTIONS}
    text = whole(help_lines())
    assert all(action.about in text for action in ACTIONS)
    assert all(panel.about in text for panel in PANELS.values())
    assert find("stop").changes_run


def test_the_footer_keeps_the_important_keys_when_short() -> None:
    short, wide = text_of(footer_line("dashboard", 40)), text_of(footer_line("dashboard", 200))
    assert "d detach" in short and "picture" not in short and "picture" in wide
    assert "resume" in text_of(footer_line("dashboard", 200, paused=True))
    assert [action.label for action in footer_actions("log")].count("filter") == 1


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_click_on_the_footer_finds_the_action_that_is_drawn_there(width: int) -> None:
    shown = shown_actions("loss", width, False, ACTIONS)
    text = text_of(footer_line("loss", width))
    for action in shown:
        at = text.index(f"{action.key_text} {action.label}")
        assert action_at(shown, "loss", False, at) == action
        assert action_at(shown, "loss", False, at + len(action.key_text) + 1) == action
    assert action_at(shown, "loss", False, 0) is None
    assert action_at(shown, "loss", False, width + 5) is None


def test_the_names_of_screens_give_way_to_the_keys_of_this_one() -> None:
    wide, narrow = text_of(footer_line("runs", 200)), text_of(footer_line("runs", 80))
    assert "7 Runs" in wide and "D delete" in wide
    assert "1-7 screens" in narrow and "7 Runs" not in narrow
    assert all(key in narrow for key in ("r resume", "v compare", "e clone", "D delete"))
