"""The footer: the keys of a screen in one line, and what a click on one of them does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from textual.events import Click

from fluxtui.actions.action_screen import ActionScreen
from fluxtui.actions.table import ACTIONS, Action, footer_actions
from fluxtui.themes import Palette
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.spans import Line, Span, width_of

OWN_RANK = 70  # from this rank on a key is the purpose of its screen
GAP = "  "


class Footer(Lines):
    """Shows the keys; a click on one is the key."""

    def __init__(self, screen: str) -> None:
        super().__init__(id="keys", classes="chrome")
        self._of = screen
        self._shown: list[Action] = []
        self._paused = False
        self._drawn_from: tuple[object, ...] = ()

    def show_keys(
        self, paused: bool, registry: Sequence[Action], palette: Palette, commands: bool = True
    ) -> None:
        """Draw the keys that fit; without `commands` those that ask the trainer are left out."""
        drawn_from = (self.size, paused, commands, palette, registry)
        if drawn_from == self._drawn_from:
            return
        self._drawn_from = drawn_from
        self._shown = shown_actions(self._of, self.size.width, paused, registry, commands)
        self._paused = paused
        self.show([_keys(self._shown, self._of, paused)], palette)

    def on_click(self, event: Click) -> None:
        action = action_at(self._shown, self._of, self._paused, event.x)
        if action is not None and action.do and isinstance(self.screen, ActionScreen):
            self.app.run_worker(self.screen.do(action.do), exclusive=False)


def footer_line(
    screen: str, width: int, paused: bool = False, registry: Sequence[Action] = ACTIONS
) -> Line:
    """Draw the keys of this screen; the least important are left out when room is short."""
    return _keys(shown_actions(screen, width, paused, registry), screen, paused)


def shown_actions(
    screen: str, width: int, paused: bool, registry: Sequence[Action], commands: bool = True
) -> list[Action]:
    """Return the actions that fit; keys of this screen alone come before the screens' names."""
    actions = footer_actions(screen, registry, commands)
    shown = _fitting(actions, screen, paused, width)
    missed = [action for action in actions if action not in shown]
    if any(action.screens and action.rank >= OWN_RANK for action in missed):
        shown = _fitting(_without_names(actions), screen, paused, width)
    return shown


def action_at(shown: Sequence[Action], screen: str, paused: bool, x: int) -> Action | None:
    """Return the action whose key or label is drawn in column `x`."""
    start = 1
    for action in shown:
        end = start + width_of(_entry(action, screen, paused))
        if start <= x < end:
            return action
        start = end + len(GAP)
    return None


def _fitting(actions: Sequence[Action], screen: str, paused: bool, width: int) -> list[Action]:
    shown = list(actions)
    while shown and width_of(_keys(shown, screen, paused)) > width:
        shown.remove(min(shown, key=lambda action: action.rank))
    return shown


def _without_names(actions: Sequence[Action]) -> list[Action]:
    """Draw one entry, such as "1-7 screens", for all keys of screens; a click does nothing."""
    shows = [action for action in actions if action.id.startswith("show_")]
    rest = [action for action in actions if action not in shows]
    if not shows:
        return rest
    keys = f"{shows[0].key_text}-{shows[-1].key_text}"
    return [replace(shows[0], id="screens", keys=keys, label="screens", do=""), *rest]


def _entry(action: Action, screen: str, paused: bool) -> Line:
    here = action.id == f"show_{screen}"
    label = "resume" if action.id == "pause" and paused else action.label
    return ((action.key_text, "key"), (f" {label}", "strong" if here else "dim"))


def _keys(actions: Sequence[Action], screen: str, paused: bool) -> Line:
    spans: list[Span] = [(" ", "text")]
    for action in actions:
        spans += [*_entry(action, screen, paused), (GAP, "text")]
    return tuple(spans[:-1])
