"""Use what a finished run leaves behind: chat with its model, or evaluate it."""

from __future__ import annotations

from pathlib import Path

from fluxtrain.rundir.run_dir import RunDir
from fluxtui.app_base import AppBase


def open_chat(app: AppBase, run_dir: Path) -> None:
    """Talk with the model of a run; say why where it has saved none."""
    from fluxtui.chat.screen import ChatScreen

    if has_model(app, run_dir, "chat"):
        app.push_screen(ChatScreen(str(run_dir), run_dir.name, app.engine))


def open_evaluation(app: AppBase, run_dir: Path) -> None:
    """Compute the loss of a run's model on the data that it was not trained on."""
    from fluxtui.screens.evaluation import EvaluationDialog

    if has_model(app, run_dir, "evaluate"):
        app.push_screen(EvaluationDialog(str(run_dir), run_dir.name, app.engine))


def has_model(app: AppBase, run_dir: Path, what: str) -> bool:
    """Return whether a run has saved its model; tell the user where it has not."""
    run = RunDir(run_dir)
    try:
        there, state = run.model.is_dir(), run.liveness()
    except OSError as error:
        app.notify(str(error), title=f"Cannot {what}", severity="warning")
        return False
    if not there:
        told = f"{run.run_id} is {state} and has saved no model: it does after its last step"
        app.notify(told, title=f"Cannot {what}", severity="warning")
    return there
