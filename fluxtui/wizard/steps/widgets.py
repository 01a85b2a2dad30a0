"""The wizard's two small widgets: text that knows its width, and a list to choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from textual import events
from textual.app import RenderResult
from textual.binding import BindingType
from textual.content import Content
from textual.geometry import Region, Size, Spacing
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from fluxtrain.events.printable import printable_lines
from fluxtui.actions.key_map import own_bindings
from fluxtui.answers.questions import ListOption
from fluxtui.widgets.spans import cut, cut_in_front
from fluxtui.wizard.pages.drawing import MUTED

Draw = Callable[[int], Content]
MARK_CELLS, GAP_CELLS = 2, 3
AROUND = Spacing(2, 0, 1, 0)  # lines beside the chosen one: the question, and that the list goes on


def shown(content: Content) -> Content:
    """Make text printable: a model's name or a document must not send codes to the terminal."""
    plain = printable_lines(content.plain)
    return content if plain == content.plain else Content(plain, list(content.spans))


class Drawn(Widget):
    """Text drawn for the width it gets, and as high as its lines."""

    DEFAULT_CSS = "Drawn { height: auto; width: 1fr; }"

    def __init__(self, draw: Draw | None = None, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._draw: Draw = draw or (lambda width: Content(""))

    def show(self, draw: Draw) -> None:
        """Draw with this function from now on."""
        self._draw = draw
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the number of lines at this width."""
        content = self._draw(width)
        return content.plain.count("\n") + 1 if content.plain else 0

    def render(self) -> RenderResult:
        """Draw at the present width."""
        return shown(self._draw(self.content_size.width))


class ChoiceList(Widget, can_focus=True):
    """A short list with one choice; the arrow keys and the mouse change it."""

    DEFAULT_CSS = "ChoiceList { height: auto; width: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = own_bindings(("list_up", "list_down"))
    chosen: reactive[int] = reactive(0)

    class Chosen(Message):
        """Posted when the user chose another line of this list."""

        def __init__(self, choices: ChoiceList, option: ListOption) -> None:
            super().__init__()
            self.choices = choices
            self.option = option

    def __init__(
        self, options: Sequence[ListOption], *, empty: str = "", id: str | None = None
    ) -> None:
        """Show `empty` while there is nothing to choose from."""
        super().__init__(id=id)
        self.options = tuple(options)
        self._empty = empty

    def show(self, option_id: str) -> None:
        """Choose the line with this id without posting it; the first one if it is gone."""
        ids = [option.id for option in self.options]
        self.chosen = ids.index(option_id) if option_id in ids else 0

    def offer(self, options: Sequence[ListOption]) -> None:
        """Offer other lines to choose from."""
        self.options = tuple(options)
        self.chosen = min(self.chosen, max(0, len(self.options) - 1))
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return one line for each option."""
        return max(1, len(self.options))

    def render(self) -> RenderResult:
        """Draw at the present width, one line each; a longer line is cut."""
        if not self.options:
            return Content.styled(f"  {self._empty}", MUTED)
        room = max(MARK_CELLS, self.content_size.width - MARK_CELLS)
        widest = max(cell_len(option.title) for option in self.options)
        titles = min(widest, room * 3 // 5)
        texts = max(0, room - titles - GAP_CELLS)
        lines = []
        for index, option in enumerate(self.options):
            here = index == self.chosen
            mark = "▸ " if here else "  "
            style = ("bold $accent" if self.has_focus else "bold") if here else ""
            lines.append(
                Content.assemble(
                    (mark, "bold $accent"),
                    (set_cell_size(cut_in_front(option.title, titles), titles), style),
                    " " * GAP_CELLS,
                    (cut(option.text, texts), "" if here else MUTED),
                )
            )
        return shown(Content("\n").join(lines))

    def action_move(self, offset: int) -> None:
        """Choose the line `offset` further; the ends hold."""
        self._choose(self.chosen + offset)

    def on_click(self, event: events.Click) -> None:
        """Choose the line under the pointer."""
        self._choose(event.y)

    def _choose(self, index: int) -> None:
        index = max(0, min(len(self.options) - 1, index))
        if index != self.chosen:
            self.chosen = index
            self.post_message(self.Chosen(self, self.options[index]))
            self.call_after_refresh(self._keep_in_sight)

    def _keep_in_sight(self) -> None:
        """Scroll so that the chosen line of a long list is on screen."""
        place = self.virtual_region
        line = Region(place.x, place.y + self.chosen, 1, 1)
        if isinstance(self.parent, Widget):
            self.parent.scroll_to_region(line, spacing=AROUND, animate=False)
