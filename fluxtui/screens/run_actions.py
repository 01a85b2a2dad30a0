"""What keys do with runs: start one in the wizard, ask its trainer, resume it, use its model,
save what is on screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fluxtrain.errors import FluxTrainError
from fluxtrain.events.events import AdviceGiven
from fluxtrain.events.run_folder.run_dir import RunDir, RunSummary
from fluxtrain.events.run_folder.states import RunState
from fluxtrain.units import UNKNOWN
from fluxtui.app_base import AppBase
from fluxtui.panels.panel import key_of
from fluxtui.panels.trials import why_not
from fluxtui.sources.trust import question_of_trust
from fluxtui.state.view import View

if TYPE_CHECKING:
    from fluxtui.answers.launching import Outcome


def open_wizard(app: AppBase) -> None:
    """Show the wizard, and follow what it launches."""
    if app.view.read_only:
        app.notify("this view is read-only", title="Cannot start a run", severity="warning")
        return
    if app.make_wizard is None:
        from fluxtui.wizard.screen import WizardScreen

        app.make_wizard = WizardScreen
    app.push_screen(app.make_wizard(), lambda outcome: take_launch(app, outcome))


def take_launch(app: AppBase, outcome: Outcome | None) -> None:
    """Start and show the run that the wizard ended with; without one leave the app if no screen is
    behind the wizard."""
    if outcome is None:
        if app.followed.source is None:
            app.exit()  # there is nothing behind the wizard to go back to
        return
    from fluxtui.answers.launching import Attach, begin

    app.show_something()
    if isinstance(outcome, Attach):
        app.attach_to(outcome.run_dir)
        return
    try:
        app.trainer = begin(outcome)
    except FluxTrainError as error:
        app.notify(str(error), title="The run was not started", severity="error")
        return
    app.attach_to(app.trainer.run_dir.path)


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
    from fluxtrain.events.run_folder.control import send_command

    try:
        answer = send_command(socket, command, arguments)
    except FluxTrainError as error:
        app.call_from_thread(app.notify, str(error), title=command, severity="error")
        return
    severity: Literal["information", "warning"] = "information" if answer.ok else "warning"
    app.call_from_thread(app.notify, answer.message, title=command, severity=severity)


def open_chat(app: AppBase, run_dir: Path) -> None:
    """Talk with the model of a run, or of its newest checkpoint; say why where there is none."""
    from fluxtui.chat.screen import ChatScreen

    if has_model(app, run_dir, "chat"):
        app.push_screen(ChatScreen(str(run_dir), run_dir.name, app.engine))


def open_evaluation(app: AppBase, run_dir: Path) -> None:
    """Compute the loss of a run's model on the data that it was not trained on."""
    from fluxtui.screens.results import EvaluationDialog

    if has_model(app, run_dir, "evaluate"):
        app.push_screen(EvaluationDialog(str(run_dir), run_dir.name, app.engine))


def open_export(app: AppBase, run_dir: Path) -> None:
    """Export the adapter of a run, or merge it into its base; say where a whole model is."""
    from fluxtui.screens.results import ExportDialog

    run = has_model(app, run_dir, "export")
    if run is None:
        return
    if run.method == "full" and run.saved_model:
        told = f"all weights were trained: {run.saved_model} is the complete model"
        app.notify(told, title="Nothing to merge")
        return
    whole = run.method == "full"
    app.push_screen(ExportDialog(str(run_dir), run_dir.name, app.engine, whole=whole))


USES = {"chat": open_chat, "evaluate": open_evaluation, "export": open_export}


def has_model(app: AppBase, run_dir: Path, what: str) -> RunSummary | None:
    """Return the facts of a run that has saved a model or a checkpoint; otherwise tell the user."""
    try:
        run = RunDir(run_dir).summary()
    except OSError as error:
        app.notify(str(error), title=f"Cannot {what}", severity="warning")
        return None
    if run.saved_model is None and run.checkpoint_step is None:
        told = f"{run.run_id} is {run.state} and has saved no model and no checkpoint yet"
        app.notify(told, title=f"Cannot {what}", severity="warning")
        return None
    return run


RESUME = ("--resume", "auto")
STATE_TOLD: dict[RunState, str] = {
    "stopped": "was stopped", "failed": "failed", "dead": "died", "waiting": "waits",
    "running": "runs", "finished": "finished", "refused": "was refused",
}  # fmt: skip


def way_on(run: RunSummary, code: str = "") -> str:
    """Say what resuming a run does; `code` comes from `trusts_code`."""
    asks = f" {question_of_trust(code)}" if code else ""
    if run.state == "refused":
        return f"It was refused: {run.message}. It is tried again with the same settings.{asks}"
    done = UNKNOWN if run.step is None else f"{run.step:,} of {run.total_steps or UNKNOWN}"
    newest = run.checkpoint_step
    whence = f"from its newest checkpoint, step {newest}" if newest else "from its beginning"
    return (
        f"It {STATE_TOLD[run.state]} at step {done}; it goes on {whence}, in a process of its own."
        f"{asks}"
    )


def cannot_resume(run: RunSummary, view: View) -> str:
    """Say why a run cannot be resumed; "" if it can."""
    if run.state == "running":
        return f"{run.run_id} is running: {key_of(view, 'list_choose')} attaches to it"
    if run.state == "finished":
        clone = key_of(view, "clone_run")
        return f"{run.run_id} has finished: {clone} makes a new run with its settings"
    return ""


def run_name(app: AppBase) -> str:
    """Return the name of the run on screen, as files are named after it."""
    hello = app.view.state.hello
    return Path(hello.run_id).name if hello else "run"


def save(app: AppBase, name: str, text: str, note: str = "") -> None:
    """Write `text` where the app was started, over nothing; tell the file's name and a note."""
    path_of = f"{run_name(app)}-{name}"
    try:
        path = free_path(Path(path_of))
        path.write_text(text, "utf-8")
    except OSError as error:
        told = f"{error.filename or path_of}: {error.strerror}"
        app.notify(told, title="Not saved", severity="error")
    else:
        app.notify(f"{path}: {note}" if note else str(path), title="Saved")


def free_path(wanted: Path) -> Path:
    """Return `wanted`, or the same with -2, -3, ... where that name is taken."""
    path, number = wanted, 1
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
    return path
