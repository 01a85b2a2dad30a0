"""What can be done with the runs of a folder: go on, compare, clone, delete."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fluxtrain.errors import FluxTrainError
from fluxtrain.telemetry.rundir import RunDir, RunSummary
from fluxtrain.telemetry.storage import read_json
from fluxtrain.units import bytes_text
from fluxtui.panels.panel import key_of
from fluxtui.sources.removal import check_removable, contents, remove_run
from fluxtui.state.view import View
from fluxtui.verbs.charts import ChartVerbs
from fluxtui.verbs.run import RunVerbs

if TYPE_CHECKING:
    from fluxtui.screens.runs import RunsScreen

RESUME = ("--resume", "auto")


class RunsVerbs(RunVerbs, ChartVerbs):
    """Actions on the run under the cursor of screen 7."""

    def _list(self) -> RunsScreen | None:
        return cast("RunsScreen", self.screen) if self.screen_name == "runs" else None

    def _selected(self) -> RunSummary | None:
        shown = self._list()
        return shown.selected if shown is not None else None

    def _refused(self, what: str, reason: str) -> None:
        self.notify(reason, title=f"Cannot {what}", severity="warning")

    def action_resume_run(self) -> None:
        """Start the trainer on a run that stopped or died, from its newest checkpoint."""
        run = self._selected()
        if run is None:
            return
        reason = cannot_resume(run, self.view)
        if self.view.read_only:
            reason = "this view is read-only"
        if reason:
            self._refused("resume", reason)
            return
        from fluxtrain.telemetry.launch import start_trainer

        try:
            self.trainer = start_trainer(RESUME, run.path)
        except FluxTrainError as error:
            self.notify(str(error), title="Not resumed", severity="error")
            return
        self.attach_to(Path(run.path))
        told = "is tried again" if run.state == "refused" else "goes on from its newest checkpoint"
        self.notify(f"{run.run_id} {told}", title="Resumed")

    def action_compare_run(self) -> None:
        """Draw the selected run's curves beside those of the run on screen."""
        run = self._selected()
        if run is None:
            return
        if self.run_dir is None:
            self._refused(
                "compare",
                f"no run is on screen: press {key_of(self.view, 'list_choose')} on one first",
            )
        elif Path(run.path) == self.run_dir:
            self._refused("compare", "this is the run on screen: choose another one")
        else:
            self.compare_with(Path(run.path))
            self.action_show("loss")

    def action_clone_run(self) -> None:
        """The wizard, filled with the selected run's configuration."""
        from fluxtui.wizard.draft import answers_from_run
        from fluxtui.wizard.screen import WizardScreen

        run = self._selected()
        if run is None:
            return
        config = (read_json(RunDir(run.path).run) or {}).get("config")
        if self.view.read_only:
            self._refused("clone", "this view is read-only")
        elif not isinstance(config, dict):
            self._refused("clone", f"{run.run_id} has no readable run.json")
        else:
            try:
                answers = answers_from_run(config)
            except FluxTrainError as error:
                self._refused("clone", f"{run.run_id}: {error}")
                return
            self.push_screen(WizardScreen(answers, self.runs_folder), self._cloned)

    def _cloned(self, launch: Any) -> None:
        if launch is not None:  # without one the list is still behind the wizard
            self.take_launch(launch)

    def action_delete_run(self) -> None:
        """Ask with the size, then delete the selected run."""
        run = self._selected()
        if run is None:
            return
        if self.view.read_only:
            self._refused("delete", "this view is read-only")
        elif Path(run.path) == self.run_dir:
            self._refused("delete", "this is the run on screen: attach to another one first")
        else:
            self.run_worker(partial(self._weigh, run), thread=True, group="delete", exclusive=True)

    def _weigh(self, run: RunSummary) -> None:
        """Large runs take a moment to add up, so this happens in a thread."""
        from fluxtui.screens.dialogs import DeleteDialog

        try:
            check_removable(Path(run.path), self.runs_folder)
        except FluxTrainError as error:
            self.call_from_thread(self._refused, "delete", str(error))
            return
        found = contents(Path(run.path))
        dialog = DeleteDialog(run.run_id, found.own_bytes, run.step, found.kept_text)
        self.call_from_thread(self.push_screen, dialog, partial(self._delete_if, run))

    def _delete_if(self, run: RunSummary, delete: bool | None) -> None:
        if delete:
            self.run_worker(partial(self._delete, run), thread=True, group="delete")

    def _delete(self, run: RunSummary) -> None:
        kept = contents(Path(run.path)).kept_text
        try:
            freed = bytes_text(remove_run(Path(run.path), self.runs_folder))
        except FluxTrainError as error:
            self.call_from_thread(self._refused, "delete", str(error))
        else:
            said = f"{run.run_id}, {freed}" + (f"; {kept}" if kept else "")
            self.call_from_thread(self.notify, said, title="Deleted")
        self.call_from_thread(self._look_at_the_folder)

    def _look_at_the_folder(self) -> None:
        if (shown := self._list()) is not None:
            shown.look_again()


def cannot_resume(run: RunSummary, view: View) -> str:
    """Why a run cannot be gone on with; "" when it can."""
    if run.state == "running":
        return f"{run.run_id} is running: {key_of(view, 'list_choose')} attaches to it"
    if run.state == "finished":
        clone = key_of(view, "clone_run")
        return f"{run.run_id} has finished: {clone} makes a new run with its settings"
    return ""
