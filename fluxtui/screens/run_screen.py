"""What all screens that show a run share: a header, a footer, and `draw`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.geometry import Size
from textual.screen import Screen

from fluxtui.panels.trials import why_not
from fluxtui.screens.arrangement import too_small
from fluxtui.state.view import View
from fluxtui.themes import Palette
from fluxtui.widgets.chrome import header_line, notice_lines, status_line
from fluxtui.widgets.footer import Footer
from fluxtui.widgets.ground import Ground
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.spans import Line

if TYPE_CHECKING:
    from fluxtui.app import FluxApp


class RunScreen(Ground, Screen[None]):
    """A screen that draws the app's view. `NAME` is its name in the registry of actions."""

    NAME: ClassVar[str] = ""
    DEFAULT_CSS = """
    RunScreen { layout: vertical; overflow: hidden; }
    RunScreen > .chrome { height: 1; width: 1fr; }
    RunScreen > #notice { height: 0; width: 1fr; }
    RunScreen > #body { height: 1fr; width: 1fr; }
    RunScreen.-tiny > #body, RunScreen.-tiny > #keys { display: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._whole = 1  # how many children the screen has while it is whole

    def compose(self) -> ComposeResult:
        yield Lines(id="top", classes="chrome")
        yield Lines(id="notice")
        yield from self.compose_body()
        yield Footer(self.NAME)

    def compose_body(self) -> ComposeResult:
        """The widgets between header and footer; one of them has the id `body`."""
        yield Lines(id="body")

    @property
    def flux(self) -> FluxApp:
        """The app, by its own type."""
        return cast("FluxApp", self.app)

    def draw(self) -> None:
        """Draw the app's present view; cheap when little of it changed."""
        width, height = self.size
        if not self.is_mounted or len(self.children) < self._whole or not width:
            return  # not there yet, or being taken down while news of the run still come
        view, palette = self.flux.view, self.flux.palette
        tiny = too_small(width, height)
        self.set_class(tiny, "-tiny")
        top = status_line(view, width) if tiny else header_line(view, width)
        self.query_one("#top", Lines).show([top], palette)
        notice = self.query_one("#notice", Lines)
        sentences = [] if tiny else self.notices(view, width)
        if notice.styles.height is None or notice.styles.height.value != len(sentences):
            notice.styles.height = len(sentences)
            self.call_after_refresh(self.draw)  # the body has another size now
        notice.show(sentences, palette)
        if tiny:
            return
        paused = view.status.kind == "paused"
        commands = not why_not(view)
        self.query_one(Footer).show_keys(paused, self.flux.actions, palette, commands)
        self.draw_body(view, palette)

    def notices(self, view: View, width: int) -> list[Line]:
        """What stands below the header; nothing when all is well."""
        return notice_lines(view, width)

    def draw_body(self, view: View, palette: Palette) -> None:
        """Draw what is between header and footer."""

    def on_mount(self) -> None:
        self._whole = len(self.children)
        self.call_later(self._appear)

    def on_resize(self) -> None:
        self.call_next(self.draw)

    def on_screen_resume(self) -> None:
        self.call_next(self._appear)

    def _appear(self) -> None:
        """Draw and paint at once: whoever pressed the key waits for it.

        A screen that is not in front yet is only given its places.
        """
        if not self.is_mounted:
            return
        if not self.size:
            self._refresh_layout(self.app.size)
        self.draw()
        if self._layout_required:
            self._layout_required = False
            self._refresh_layout(self.app.size)
            self.draw()
        if self.is_current:
            self._compositor.update_widgets(set(self._compositor.visible_widgets))
            self._compositor_refresh()

    def _refresh_layout(self, size: Size | None = None, scroll: bool = False) -> None:
        """As Textual's, but what has a new place is drawn before it is painted: never empty."""
        with self.app.batch_update():
            super()._refresh_layout(size, scroll)
        self.call_next(self._repaint)  # what was dirty was taken in the batch, and not painted

    def _repaint(self) -> None:
        if self.is_mounted and self.is_current:
            self._compositor.update_widgets(set(self._compositor.visible_widgets))
            self._compositor_refresh()
