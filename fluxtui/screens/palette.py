"""The command palette: the table of actions by their short names, and each theme by its title."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from fluxtui.actions.action_screen import ActionScreen
from fluxtui.actions.table import GROUPS, Action
from fluxtui.themes import ThemeFile

if TYPE_CHECKING:
    from fluxtui.app_base import AppBase

ALSO = {"detach": "quit exit close", "stop": "kill cancel end", "chat": "talk generate"}  # words
ABOUT_WEIGHS = 0.6  # a word of the sentence counts less than one of the name


@dataclass(frozen=True)
class Command:
    """An entry: its group and short name, a sentence with its key, and what it does."""

    group: str
    name: str
    about: str
    call: Callable[[], None]
    also: str = ""  # other words that people type for it

    @property
    def title(self) -> str:
        """Return group and name as they are shown."""
        return f"{self.group}: {self.name}"


def palette_commands(
    actions: Iterable[Action],
    screen: str,
    themes: Mapping[str, ThemeFile],
    run: Callable[[str], object],
    choose_theme: Callable[[str], None],
) -> Iterator[Command]:
    """List a screen's commands by group; `run` takes an action's string, `choose_theme` a name."""
    for action in sorted(actions, key=lambda one: GROUPS.index(one.group)):
        if action.works_on(screen) and action.id != "palette" and not action.in_lists:
            about = f"{action.key_text}  {action.about}"
            call = _nothing_back(run, action.do)
            yield Command(action.group, action.name, about, call, ALSO.get(action.id, ""))
    for name, theme in themes.items():
        yield Command("Theme", theme.title, "Use these colours", partial(choose_theme, name))


class ActionProvider(Provider):
    """Finds the commands of the screen in front by their names, and by what they do."""

    async def discover(self) -> Hits:
        """Yield all commands, group by group."""
        for command in self._commands:
            yield DiscoveryHit(command.title, command.call, help=command.about)

    async def search(self, query: str) -> Hits:
        """Yield the matching commands; the name counts more than its sentence."""
        matcher = self.matcher(query)
        for command in self._commands:
            by_name = matcher.match(command.title)
            sentence = f"{command.about} {command.also}"
            by_about = matcher.match(sentence) * ABOUT_WEIGHS
            if max(by_name, by_about) > 0:
                shown = matcher.highlight(command.title) if by_name else command.title
                yield Hit(
                    max(by_name, by_about), shown, command.call, text=command.title,
                    help=command.about,
                )  # fmt: skip

    @property
    def _commands(self) -> Iterator[Command]:
        app, screen = cast("AppBase", self.app), self.screen
        if not isinstance(screen, ActionScreen):
            return iter(())  # a dialog: the palette does not open there
        run = partial(app.call_later, screen.do)
        return palette_commands(app.actions, screen.place, app.theme_files, run, app.choose_theme)


def _nothing_back(run: Callable[[str], object], do: str) -> Callable[[], None]:
    def call() -> None:
        run(do)

    return call
