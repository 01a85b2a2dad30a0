"""How the curves are seen, and what they are compared with."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on
from textual.message import Message

from fluxtui.shell import Shell
from fluxtui.sources.following import News, follow
from fluxtui.sources.journal import JournalSource
from fluxtui.sources.source import RunSource
from fluxtui.state.view import ChartSettings, Compared

if TYPE_CHECKING:
    from fluxtui.screens.picker import RunPicker

COMPARED_PERIOD_S = 2.0  # the other run is looked at, not lived with


class ChartVerbs(Shell):
    """Actions that change a chart and nothing else."""

    class OtherUpdated(Message):
        """News of the run that is compared with; a newer one replaces one that still waits."""

        def __init__(self, news: News) -> None:
            super().__init__()
            self.news = news

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, ChartVerbs.OtherUpdated)

    _stop_comparing: threading.Event | None = None
    _other: JournalSource | None = None

    def on_unmount(self) -> None:
        self._end_comparing()

    def attach(self, source: RunSource) -> None:
        """Follow another run, compared with none."""
        self._end_comparing()
        super().attach(source)

    def action_smooth(self) -> None:
        """Moving average on or off."""
        self.look_at(smooth=not self.view.chart.smooth)

    def action_log_scale(self) -> None:
        """Logarithmic loss axis on or off."""
        self.look_at(log_scale=not self.view.chart.log_scale)

    def action_by_tokens(self) -> None:
        """Steps or trained tokens on the x axis."""
        self.look_at(by_tokens=not self.view.chart.by_tokens)

    def action_zoom(self, factor: float) -> None:
        """A smaller or larger share of the steps, between all and 1/64."""
        self.look_at(zoom=max(1 / 64, min(1.0, self.view.chart.zoom * factor)))

    def action_look(self, steps: int) -> None:
        """Older or newer ones of the last steps."""
        self.look_at(last_step=self.view.looked_at(steps))

    def action_crosshair(self, by: int) -> None:
        """Move the crosshair by hundredths of the shown curve; 0 hides it."""
        self.look_at(crosshair=self.view.crosshair_moved(by) if by else None)

    def action_block(self, by: int) -> None:
        """Look into another block."""
        self.look_at(block=self.view.block_moved(by))

    def look_at(self, chart: ChartSettings | None = None, **changes: Any) -> None:
        """Draw with other chart settings; smoothing and scale are kept for the next start."""
        chart = replace(chart or self.view.chart, **changes)
        self.view = replace(self.view, chart=chart)
        self._keep(smooth=chart.smooth, log_scale=chart.log_scale, by_tokens=chart.by_tokens)
        self.redraw()

    def action_compare(self) -> None:
        """Ask which run to compare with."""
        from fluxtui.screens.picker import RunPicker

        self.push_screen(RunPicker(self.runs_folder, self.run_dir), self._picked)

    def _picked(self, picked: RunPicker.Picked | None) -> None:
        if picked is not None:
            self.compare_with(picked.run_dir)

    def compare_with(self, run_dir: Path | None) -> None:
        """Draw the curves of another run beside this one's; None draws this one alone."""
        self._end_comparing()
        self.view = replace(self.view, compared=None)
        if run_dir is not None:
            source = self._other = JournalSource(run_dir)
            stop = self._stop_comparing = threading.Event()
            self.run_worker(
                lambda: follow(source, self._say_other, stop, lambda: COMPARED_PERIOD_S),
                thread=True, exclusive=False, group="compare", name="comparer",
            )  # fmt: skip
        self.redraw()

    def _end_comparing(self) -> None:
        if self._stop_comparing is not None:
            self._stop_comparing.set()
        self._other = None

    def _say_other(self, news: News) -> None:
        self.post_message(self.OtherUpdated(news))

    @on(OtherUpdated)
    def take_other_news(self, message: OtherUpdated) -> None:
        """Draw what is new of the other run, unless it was left meanwhile."""
        news = message.news
        if news.source is self._other and self._other is not None:
            name = self._other.run_dir.name if self._other.run_dir else ""
            self.view = replace(self.view, compared=Compared(name, news.state))
            self.redraw()
