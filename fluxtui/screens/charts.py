"""The screens that are made of panels alone: dashboard, memory, transfer, loss."""

from __future__ import annotations

from fluxtui.panels.trials import headline
from fluxtui.screens import arrangement
from fluxtui.screens.arrangement import Arrangement
from fluxtui.screens.panel_screen import PanelScreen
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line


class Dashboard(PanelScreen):
    """Screen 1: the whole run at a glance."""

    NAME = "dashboard"
    MAIN = "loss"
    SHOWN = (
        "progress", "memory", "residency", "loss", "bus", "machine", "moves", "log", "advice",
        "step", "lanes",
    )  # fmt: skip

    def places(self, width: int, height: int) -> Arrangement:
        return arrangement.dashboard(width, height)

    def notices(self, view: View, width: int) -> list[Line]:
        line = headline(view, width)
        return [*super().notices(view, width), *([line] if line else [])]


class MemoryScreen(PanelScreen):
    """Screen 2: memory of device and host over time, by category, by block, and one block."""

    NAME = "memory"
    MAIN = "memory_history"
    SHOWN = ("memory", "memory_history", "categories", "residency", "block")

    def places(self, width: int, height: int) -> Arrangement:
        return arrangement.memory(width, height)


class TransferScreen(PanelScreen):
    """Screen 3: both directions over time, stalls by cause, the lanes of a step, the last steps."""

    NAME = "transfer"
    MAIN = "lanes"
    SHOWN = ("rates", "stalls", "lanes", "recent_steps", "moves")

    def places(self, width: int, height: int) -> Arrangement:
        return arrangement.transfer(width, height)


class LossScreen(PanelScreen):
    """Screen 4: the loss, what is under the crosshair, gradient norm and learning rate."""

    NAME = "loss"
    MAIN = "loss"
    SHOWN = ("loss", "readout", "grad_norm", "learning_rate")

    def places(self, width: int, height: int) -> Arrangement:
        return arrangement.loss(width, height)
