"""Ask the trainer of the run on screen for something: pause, checkpoint, stop, apply, undo."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from fluxtrain.errors import FluxTrainError
from fluxtrain.rundir.run_dir import RunDir
from fluxtrain.telemetry.events import AdviceGiven
from fluxtui.app_base import AppBase
from fluxtui.panels.trials import why_not


def may_command(app: AppBase, command: str) -> bool:
    """Return whether the trainer can be asked; if not, tell the user why."""
    source, reason = app.followed.source, why_not(app.view)
    if source is None:
        reason = "no run is attached"
    elif not source.controllable and not app.view.read_only:
        reason = "this is a recording"
    if reason:
        app.notify(reason, title=f"Cannot {command}", severity="warning")
    return not reason


def send(app: AppBase, command: str, arguments: dict[str, Any] | None = None) -> None:
    """Send a command to the trainer without blocking, and show its answer."""
    if not may_command(app, command) or app.run_dir is None:
        return
    socket = RunDir(app.run_dir).socket
    app.run_worker(
        lambda: _ask(app, socket, command, arguments),
        thread=True, exclusive=False, group="commands",
    )  # fmt: skip


def apply_advice(app: AppBase, advice: AdviceGiven | None) -> None:
    """Ask the trainer to apply a piece of advice between two steps; None says there is none."""
    if not may_command(app, "apply"):
        return
    if advice is None:
        app.notify("there is no advice now", title="Cannot apply", severity="warning")
    elif not advice.apply:
        text = f"not while it trains; for the next run: {advice.how}"
        app.notify(text, title="Cannot apply", severity="warning")
    else:
        send(app, "apply", {"advice": advice.id})


def _ask(app: AppBase, socket: Path, command: str, arguments: dict[str, Any] | None) -> None:
    from fluxtrain.rundir.control import send_command

    try:
        answer = send_command(socket, command, arguments)
    except FluxTrainError as error:
        app.call_from_thread(app.notify, str(error), title=command, severity="error")
        return
    severity: Literal["information", "warning"] = "information" if answer.ok else "warning"
    app.call_from_thread(app.notify, answer.message, title=command, severity=severity)
