"""Screens made of panels: placed by size, and any of them can be given the whole screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.events import Blur, Click, Focus
from textual.geometry import Offset, Region, Size, Spacing
from textual.layout import ArrangeResult, Layout, WidgetPlacement
from textual.widget import Widget

from fluxtui.panels import PANELS
from fluxtui.panels.panel import Panel
from fluxtui.screens.arrangement import Arrangement, Frame, PanelPlace, Rect
from fluxtui.screens.run_actions import run_name, save
from fluxtui.screens.run_screen import RunScreen
from fluxtui.state.view import View
from fluxtui.themes import Palette
from fluxtui.widgets.lines import Ground, Lines
from fluxtui.widgets.spans import BLANK, Line, fitted, width_of

SHAPE = 4  # width, height, frame and focus are compared by value; the shown objects by identity


class PanelLines(Lines, can_focus=True):
    """A panel on the screen."""

    def __init__(self, panel: Panel) -> None:
        super().__init__(id=panel.id)
        self.panel = panel
        self._frame: Frame = "box"
        self._drawn_from: tuple[object, ...] = ()
        self._drawn: list[Line] = []

    def draw(self, view: View, palette: Palette, places: Arrangement) -> None:
        """Draw the panel in its place; nothing when it has none at this size."""
        place = places.get(self.panel.id)
        width, height = self.size
        if place is not None and width and height:
            self._frame = place.frame
            self.show(self._framed(view, width, height, place.frame), palette)

    def _framed(self, view: View, width: int, height: int, frame: Frame) -> list[Line]:
        """Return the lines of the panel; the previous lines while nothing that it shows has
        changed."""
        focused = self.has_focus
        if self.panel.shows is None:
            return framed(self.panel, view, width, height, frame, focused)
        seen = (width, height, frame, focused, *self.panel.shows(view))
        same = len(seen) == len(self._drawn_from) and all(
            new is old or (i < SHAPE and new == old)
            for i, (new, old) in enumerate(zip(seen, self._drawn_from, strict=True))
        )
        if not same:
            self._drawn = framed(self.panel, view, width, height, frame, focused)
            self._drawn_from = seen
        return self._drawn

    def on_focus(self, event: Focus) -> None:
        self._redraw()

    def on_blur(self, event: Blur) -> None:
        self._redraw()

    def on_click(self, event: Click) -> None:
        if event.chain == 2:
            self.app.run_worker(self.app.run_action("maximise", self.screen), exclusive=False)
        elif self.panel.pick is not None and isinstance(self.screen, RunScreen):
            inset = 0 if self._frame == "bare" else 1
            sides = 2 if self._frame == "box" else 0
            chart = self.panel.pick(
                self.screen.flux.view,
                self.size.width - 2 * sides, self.size.height - (2 if sides else inset),
                event.x - sides, event.y - inset,
            )  # fmt: skip
            if chart is not None:
                self.screen.flux.look_at(chart)

    def _redraw(self) -> None:
        if isinstance(self.screen, RunScreen):
            self.screen.draw()


class _Places(Layout):
    """Puts each panel where the arrangement says."""

    name = "places"

    def arrange(
        self, parent: Widget, children: list[Widget], size: Size, greedy: bool = True
    ) -> ArrangeResult:
        assert isinstance(parent, PanelGrid)
        places = parent.places(size)
        return [
            WidgetPlacement(Region(*place.rect), Offset(), Spacing(), child)
            for child in children
            if (place := places.get(child.id or "")) is not None
        ]


class PanelGrid(Ground):
    """The area between header and footer, with the panels that `arrange` has a place for."""

    def __init__(self, arrange: Callable[[int, int], Arrangement], panels: Sequence[str]) -> None:
        super().__init__(id="body")
        self.maximised: str | None = None
        self._arrange = arrange
        self._panels = panels
        self._layout_of_places = _Places()

    @property
    def layout(self) -> Layout:
        return self._layout_of_places

    def places(self, size: Size) -> Arrangement:
        """Return the places of the panels at this size."""
        if self.maximised is not None:
            return {self.maximised: PanelPlace(Rect(0, 0, size.width, size.height), "box")}
        return self._arrange(size.width, size.height)

    @property
    def panels(self) -> list[PanelLines]:
        """Return all panels, also panels without a place."""
        return [panel for panel in self.children if isinstance(panel, PanelLines)]

    def compose(self) -> ComposeResult:
        for name in self._panels:
            yield PanelLines(PANELS[name])


class PanelScreen(RunScreen):
    """A screen of panels; subclasses say which and where."""

    MAIN: ClassVar[str] = ""  # what is maximised when nothing has the focus
    SHOWN: ClassVar[tuple[str, ...]] = ()
    AUTO_FOCUS = ""

    def places(self, width: int, height: int) -> Arrangement:
        """Return the places of the panels; pure."""
        raise NotImplementedError

    def compose_body(self) -> ComposeResult:
        yield PanelGrid(self.places, self.SHOWN)

    cards, ranks, on_gpu, samples = 1, 1, True, False  # of the run: others make other places

    def place_anew(self) -> None:
        """Place the panels anew, and draw them there."""
        for panel in self.query_one(PanelGrid).children[:1]:  # a child's: the grid follows
            panel.refresh(layout=True)
        self.call_after_refresh(self.draw)

    def draw_body(self, view: View, palette: Palette) -> None:
        seen = (view.cards, view.ranks, view.on_gpu, bool(view.state.samples))
        if seen != (self.cards, self.ranks, self.on_gpu, self.samples):
            self.cards, self.ranks, self.on_gpu, self.samples = seen
            self.place_anew()
        grid = self.query_one(PanelGrid)
        places = grid.places(grid.size)
        for panel in grid.panels:
            has_place = panel.id in places
            if panel.display != has_place:
                panel.display = has_place  # a panel without a place takes no focus
            panel.draw(view, palette, places)

    @property
    def panel_in_focus(self) -> str | None:
        """Return the panel that has the whole screen or the focus; None for all panels."""
        maximised = self.query_one(PanelGrid).maximised
        focused = self.focused
        return maximised or (focused.panel.id if isinstance(focused, PanelLines) else None)

    def action_maximise(self) -> None:
        """Give the focused panel the whole screen, or take it back."""
        grid = self.query_one(PanelGrid)
        if grid.maximised is not None:
            grid.maximised = None
        else:
            focused = self.focused
            grid.maximised = focused.panel.id if isinstance(focused, PanelLines) else self.MAIN
        self.place_anew()

    def action_export(self) -> None:
        """Save the panel in focus as SVG, else the whole screen."""
        name = self.panel_in_focus
        if name is None:
            super().action_export()
            return
        from fluxtui.widgets.picture import svg_of

        app, panel = self.flux, PANELS[name]
        size = self.query_one(f"#{name}").size
        lines = framed(panel, app.view, size.width, size.height, "box")
        title = f"{run_name(app)} {panel.title}"
        save(app, f"{name}.svg", svg_of(lines, app.palette, size.width, title))


def framed(
    panel: Panel, view: View, width: int, height: int, frame: Frame, focused: bool = False
) -> list[Line]:
    """Draw the panel in exactly `width` x `height` cells."""
    edge = "accent" if focused else "faint"
    if frame == "bare":
        return _filled(panel.body(view, width, height), width, height)
    if frame == "rule":
        top = _title_line(panel, view, width, ("─ ", "─"), edge)
        return [top, *_filled(panel.body(view, width, height - 1), width, height - 1)]
    top = _title_line(panel, view, width, ("╭─ ", "╮"), edge)
    inner = _filled(panel.body(view, width - 4, height - 2), width - 4, height - 2)
    sides = [(("│ ", edge), *spans, (" │", edge)) for spans in inner]
    return [top, *sides, (("╰" + "─" * (width - 2) + "╯", edge),)]


def _title_line(panel: Panel, view: View, width: int, ends: tuple[str, str], edge: str) -> Line:
    start, end = ends
    title: Line = ((start, edge), (panel.title_in(view), "accent" if edge == "accent" else "title"))
    room = width - width_of(title) - len(end) - 4
    heading = panel.heading(view, room)
    if heading:
        title = (*title, ("  ", "text"), *heading)
    title = (*title, (" ", "text"))
    rest = width - width_of(title) - len(end)
    return fitted((*title, ("─" * max(0, rest) + end, edge)), width)


def _filled(lines: list[Line], width: int, height: int) -> list[Line]:
    rows = [fitted(spans, width) for spans in lines[:height]]
    return rows + [fitted(BLANK, width)] * (height - len(rows))
