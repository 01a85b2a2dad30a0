"""The command palette's entries: the registry of actions, and each theme by its title."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from textual.app import SystemCommand

from fluxtui.actions.table import Action
from fluxtui.themes import ThemeFile


def palette_commands(
    actions: Iterable[Action],
    screen: str,
    themes: Mapping[str, ThemeFile],
    run: Callable[[str], object],
    choose_theme: Callable[[str], None],
) -> Iterator[SystemCommand]:
    """List a screen's commands; `run` takes an action's string, `choose_theme` a name."""
    for action in actions:
        if action.works_on(screen) and action.id != "palette" and not action.in_lists:
            about = f"{action.group}, key {action.key_text}"
            yield SystemCommand(action.about, about, _nothing_back(run, action.do))
    for name, theme in themes.items():
        yield SystemCommand(
            f"Theme: {theme.title}", "Use these colours", partial(choose_theme, name)
        )


def _nothing_back(run: Callable[[str], object], do: str) -> Callable[[], None]:
    def call() -> None:
        run(do)

    return call
