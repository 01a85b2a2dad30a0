"""A field for a path, which Tab completes as in a shell."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual.binding import BindingType

from fluxtui.actions.key_map import own_bindings
from fluxtui.widgets.entry import PrintableInput
from fluxtui.wizard.steps.paths import PathSuggester, completions, stem_of


class PathEntry(PrintableInput):
    """A field in which Tab completes a path as far as names agree; pressed again it goes through
    the matches.

    Where nothing matches, Tab goes to the next field.
    """

    BINDINGS: ClassVar[list[BindingType]] = own_bindings(("wizard_complete",))

    def __init__(self, *, folders_only: bool, placeholder: str = "", id: str | None = None) -> None:
        super().__init__(placeholder=placeholder, id=id)
        self._folders_only = folders_only
        self._suggester_of_paths = PathSuggester(folders_only)
        self._offered: tuple[str, ...] = ()  # what Tab goes through
        self.completes = True

    @property
    def completes(self) -> bool:
        """Return whether the text is a path to complete."""
        return self.suggester is not None

    @completes.setter
    def completes(self, on: bool) -> None:
        self.suggester = self._suggester_of_paths if on else None

    async def action_complete(self) -> None:
        """Complete the path, or take the next matching name."""
        value = self.value
        if value in self._offered:
            at = self._offered.index(value) + 1
            self._put(self._offered[at % len(self._offered)])
            return
        found: tuple[str, ...] = ()
        if self.completes and value.strip():
            found = await asyncio.to_thread(completions, value, self._folders_only)
        if self.value != value:  # typed on meanwhile
            return
        if not found or found == (value,):
            self.screen.focus_next()
            return
        stem = stem_of(found)
        if len(stem) > len(value):
            self._put(stem)
        else:
            self._offered = found
            self._put(found[0])

    def _put(self, text: str) -> None:
        self.value = text
        self.cursor_position = len(text)
