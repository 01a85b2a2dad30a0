"""How the curves are seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fluxtui.shell import Shell


class ChartVerbs(Shell):
    """Actions that change a chart and nothing else."""

    def action_smooth(self) -> None:
        """Moving average on or off."""
        self._change_chart(smooth=not self.view.chart.smooth)

    def action_log_scale(self) -> None:
        """Logarithmic loss axis on or off."""
        self._change_chart(log_scale=not self.view.chart.log_scale)

    def action_zoom(self, factor: float) -> None:
        """A smaller or larger share of the steps, between all and 1/64."""
        self._change_chart(zoom=max(1 / 64, min(1.0, self.view.chart.zoom * factor)))

    def action_look(self, steps: int) -> None:
        """Older or newer ones of the last steps."""
        self._change_chart(last_step=self.view.looked_at(steps))

    def _change_chart(self, **changes: Any) -> None:
        self.view = replace(self.view, chart=replace(self.view.chart, **changes))
        chart = self.view.chart
        self._keep(smooth=chart.smooth, log_scale=chart.log_scale)
        self.redraw()
