"""Set up a new run in the wizard, and follow what it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluxtrain.errors import FluxTrainError
from fluxtui.app_base import AppBase

if TYPE_CHECKING:
    from fluxtui.wizard.answers.launching import Outcome


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
    from fluxtui.wizard.answers.launching import Attach, begin

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
