"""The panels. To add one: a file with a `PANEL`, and its name in this table."""

from __future__ import annotations

from fluxtui.panels import (
    advice,
    block,
    bus,
    cards,
    categories,
    lanes,
    log,
    loss,
    machine,
    memory,
    memory_history,
    moves,
    progress,
    rates,
    readout,
    recent_steps,
    residency,
    samples,
    stalls,
    step,
)
from fluxtui.panels.curves import GRAD_NORM, LEARNING_RATE
from fluxtui.panels.panel import Panel

PANELS: dict[str, Panel] = {
    panel.id: panel
    for panel in (
        progress.PANEL, memory.PANEL, residency.PANEL, loss.PANEL, bus.PANEL, machine.PANEL,
        moves.PANEL, step.PANEL, log.PANEL, log.NEWS, advice.PANEL, memory_history.PANEL,
        categories.PANEL, block.PANEL, rates.PANEL, readout.PANEL, stalls.PANEL,
        recent_steps.PANEL, lanes.PANEL, samples.PANEL, cards.PANEL, cards.MEMORY, GRAD_NORM,
        LEARNING_RATE,
    )
}  # fmt: skip
