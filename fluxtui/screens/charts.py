"""The screens that are made of panels alone: dashboard, memory, transfer, loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import BindingType

from fluxtui.actions.key_map import screen_bindings
from fluxtui.panels.trials import headline
from fluxtui.screens import arrangement
from fluxtui.screens.arrangement import Arrangement
from fluxtui.screens.panel_screen import PanelScreen
from fluxtui.screens.run_actions import apply_advice, send
from fluxtui.state.changes import ranked
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line

if TYPE_CHECKING:
    from fluxtui.screens.picker import RunPicker


class CurveScreen(PanelScreen):
    """A screen with the loss chart and the actions that set how its curve is drawn."""

    def action_smooth(self) -> None:
        """Turn the moving average on or off."""
        self.flux.look_at(smooth=not self.flux.view.chart.smooth)

    def action_log_scale(self) -> None:
        """Turn the logarithmic loss axis on or off."""
        self.flux.look_at(log_scale=not self.flux.view.chart.log_scale)

    def action_zoom(self, factor: float) -> None:
        """Show a smaller or larger share of the steps, between all and 1/64."""
        self.flux.look_at(zoom=max(1 / 64, min(1.0, self.flux.view.chart.zoom * factor)))


class Dashboard(CurveScreen):
    """Screen 1: the whole run at a glance."""

    NAME = "dashboard"
    BINDINGS: ClassVar[list[BindingType]] = screen_bindings("dashboard")
    MAIN = "loss"
    SHOWN = (
        "progress", "memory", "cards", "residency", "loss", "bus", "machine", "moves", "log",
        "news", "advice", "step", "lanes", "samples",
    )  # fmt: skip

    def places(self, width: int, height: int) -> Arrangement:
        return arrangement.dashboard(
            width,
            height,
            cards=max(self.cards, self.ranks),
            on_gpu=self.on_gpu,
            samples=self.samples,
        )

    def notices(self, view: View, width: int) -> list[Line]:
        line = headline(view, width)
        return [*super().notices(view, width), *([line] if line else [])]

    def action_apply_advice(self) -> None:
        """Apply the best advice that can be applied while it trains."""
        held = ranked(self.flux.view.state.advice)
        best = [given for given in held if given.apply][:1] or held[:1]
        apply_advice(self.flux, best[0] if best else None)

    def action_undo_change(self) -> None:
        """Take back the newest change."""
        send(self.flux, "undo")


class MemoryScreen(PanelScreen):
    """Screen 2: memory of device and host over time, by category, by block, and one block."""

    NAME = "memory"
    BINDINGS: ClassVar[list[BindingType]] = screen_bindings("memory")
    MAIN = "memory_history"
    SHOWN = (
        "memory", "card_memory", "memory_history", "categories", "residency", "block",
    )  # fmt: skip

    def places(self, width: int, height: int) -> Arrangement:
        return arrangement.memory(width, height, cards=self.cards)

    def action_block(self, by: int) -> None:
        """Look into another block."""
        self.flux.look_at(block=self.flux.view.block_moved(by))


class TransferScreen(PanelScreen):
    """Screen 3: both directions over time, stalls by cause, the lanes of a step, the last steps."""

    NAME = "transfer"
    BINDINGS: ClassVar[list[BindingType]] = screen_bindings("transfer")
    MAIN = "lanes"
    SHOWN = ("rates", "stalls", "lanes", "recent_steps", "moves")

    def places(self, width: int, height: int) -> Arrangement:
        return arrangement.transfer(width, height, cards=self.cards)

    def action_look(self, steps: int) -> None:
        """Look at an older or a newer one of the last steps."""
        self.flux.look_at(last_step=self.flux.view.looked_at(steps))


class LossScreen(CurveScreen):
    """Screen 4: the loss, what is under the crosshair, samples, gradient norm, learning rate."""

    NAME = "loss"
    BINDINGS: ClassVar[list[BindingType]] = screen_bindings("loss")
    MAIN = "loss"
    SHOWN = ("loss", "samples", "readout", "grad_norm", "learning_rate")

    def places(self, width: int, height: int) -> Arrangement:
        return arrangement.loss(width, height, samples=self.samples)

    def action_crosshair(self, by: int) -> None:
        """Move the crosshair by hundredths of the shown curve, with the samples in focus from one
        step with samples to the next; 0 hides it."""
        view = self.flux.view
        moved = view.sample_moved if self.panel_in_focus == "samples" else view.crosshair_moved
        self.flux.look_at(crosshair=moved(by) if by else None)

    def action_by_tokens(self) -> None:
        """Draw over steps or over trained tokens."""
        self.flux.look_at(by_tokens=not self.flux.view.chart.by_tokens)

    def action_compare(self) -> None:
        """Ask which run to compare with."""
        from fluxtui.screens.picker import RunPicker

        self.app.push_screen(RunPicker(self.flux.runs_folder, self.flux.run_dir), self._picked)

    def _picked(self, picked: RunPicker.Picked | None) -> None:
        if picked is not None:
            self.flux.compare_with(picked.run_dir)
