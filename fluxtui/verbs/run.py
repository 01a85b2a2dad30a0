"""Pause, checkpoint, stop, and starting a new run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from fluxtrain.errors import FluxTrainError
from fluxtrain.telemetry.rundir import RunDir
from fluxtui.panels.trials import why_not
from fluxtui.shell import Shell


class RunVerbs(Shell):
    """Actions that ask the trainer for something, or start one."""

    def action_detach(self) -> None:
        """Leave; the trainer is a process of its own and goes on."""
        self.exit()

    def action_pause(self) -> None:
        """Pause, or go on when paused."""
        self.action_command("resume" if self.view.status.kind == "paused" else "pause")

    def action_stop(self) -> None:
        """Ask, then stop the run after a checkpoint."""
        if self._may_command("stop"):
            from fluxtui.screens.dialogs import StopDialog

            self.push_screen(StopDialog(), self._stop_if)

    def _stop_if(self, stop: bool | None) -> None:
        if stop:
            self.action_command("stop")

    def action_command(self, command: str) -> None:
        """Send a command to the trainer without blocking; its answer is shown."""
        self.send(command)

    def send(self, command: str, arguments: dict[str, Any] | None = None) -> None:
        """As `action_command`, with arguments."""
        if not self._may_command(command) or self.run_dir is None:
            return
        socket = RunDir(self.run_dir).socket
        self.run_worker(
            lambda: self._ask(socket, command, arguments),
            thread=True, exclusive=False, group="commands",
        )  # fmt: skip

    def _may_command(self, command: str) -> bool:
        reason = why_not(self.view)
        if self._source is None:
            reason = "no run is attached"
        elif not self._source.controllable and not self.view.read_only:
            reason = "this is a recording"
        if reason:
            self.notify(reason, title=f"Cannot {command}", severity="warning")
        return not reason

    def _ask(self, socket: Path, command: str, arguments: dict[str, Any] | None) -> None:
        from fluxtrain.telemetry.control import send_command

        try:
            answer = send_command(socket, command, arguments)
        except FluxTrainError as error:
            self.call_from_thread(self.notify, str(error), title=command, severity="error")
            return
        severity: Literal["information", "warning"] = "information" if answer.ok else "warning"
        self.call_from_thread(self.notify, answer.message, title=command, severity=severity)

    def action_new_run(self) -> None:
        """The wizard; what it launches is attached."""
        if self.view.read_only:
            self.notify("this view is read-only", title="Cannot start a run", severity="warning")
            return
        if self._make_wizard is None:
            from fluxtui.wizard.screen import WizardScreen

            self._make_wizard = WizardScreen
        self.push_screen(self._make_wizard(), self.take_launch)

    def take_launch(self, launch: Any) -> None:
        """What the wizard ended with: start it and show it; None is nothing."""
        if launch is None:
            if self._source is None:
                self.exit()  # there is nothing behind the wizard to go back to
            return
        from fluxtui.wizard.launching import Attach, begin

        self.show_something()
        if isinstance(launch, Attach):
            self.attach_to(launch.run_dir)
            return
        try:
            self.trainer = begin(launch)
        except FluxTrainError as error:
            self.notify(str(error), title="The run was not started", severity="error")
            return
        self.attach_to(self.trainer.run_dir.path)
