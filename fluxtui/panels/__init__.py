"""The panels. To add one: a file with a `PANEL`, and its name in this tuple."""

from __future__ import annotations

from fluxtui.panels import (
    advice,
    bus,
    log,
    loss,
    machine,
    memory,
    moves,
    progress,
    residency,
    step,
)
from fluxtui.panels.panel import Panel

PANELS: dict[str, Panel] = {
    module.PANEL.id: module.PANEL
    for module in (
        progress, memory, residency, loss, bus, machine, moves, step, log, advice,
    )
}  # fmt: skip
