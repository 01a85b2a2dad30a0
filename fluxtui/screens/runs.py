"""Screen 7: the runs of this machine: attach to one, resume, compare, clone or delete it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType

from fluxtrain.errors import FluxTrainError
from fluxtrain.rundir.run_dir import RunDir, RunSummary, list_runs
from fluxtrain.telemetry.storage import read_json
from fluxtrain.units import bytes_text
from fluxtui.actions.key_map import screen_bindings
from fluxtui.actions.new_run import take_launch
from fluxtui.panels.machine import machine_line
from fluxtui.panels.panel import key_of
from fluxtui.screens.run_screen import RunScreen
from fluxtui.sources.removal import check_removable, contents, remove_run
from fluxtui.state.link import Link
from fluxtui.state.view import View
from fluxtui.themes import Palette
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.run_rows import columns, run_detail, run_row
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import BLANK, Line

if TYPE_CHECKING:
    from fluxtui.wizard.answers.launching import Outcome

RESUME = ("--resume", "auto")
REFRESH_PERIOD_S = 3.0
NO_RUNS = "no runs here yet"
LOOKING = "looking ..."


class RunsScreen(RunScreen):
    """All runs below the runs folder, newest first."""

    NAME = "runs"
    AUTO_FOCUS = "#body"
    BINDINGS: ClassVar[list[BindingType]] = screen_bindings("runs")
    DEFAULT_CSS = "RunsScreen > #detail { height: 4; }"

    def __init__(self) -> None:
        super().__init__()
        self.runs: Sequence[RunSummary] = ()
        self._problem = LOOKING

    def compose_body(self) -> ComposeResult:
        yield Lines(id="columns", classes="chrome")
        yield ScrollingLines(id="body", cursor=True)
        yield Lines(id="detail")
        yield Lines(id="machine", classes="chrome")

    def on_mount(self) -> None:
        self.look_again()
        self.set_interval(REFRESH_PERIOD_S, self.look_again)

    def on_screen_resume(self) -> None:
        self.look_again()

    def look_again(self) -> None:
        """Read the folder in a thread, if this screen is in front."""
        if self.is_current:
            self.run_worker(self._read, thread=True, exclusive=True, group="runs")

    def _read(self) -> None:
        runs: Sequence[RunSummary] = ()
        problem = ""
        try:
            runs = list_runs(self.flux.runs_folder)
        except OSError as error:
            problem = f"{self.flux.runs_folder} cannot be read: {error.strerror}"
        self.app.call_from_thread(self._show, runs, problem)

    def _show(self, runs: Sequence[RunSummary], problem: str = "") -> None:
        chosen = self.selected
        self.runs, self._problem = runs, problem
        if chosen is not None:  # the cursor stays on its run when others come or go
            paths = [run.path for run in runs]
            body = self.query_one("#body", ScrollingLines)
            body.cursor = paths.index(chosen.path) if chosen.path in paths else body.cursor
        self.draw()

    @property
    def selected(self) -> RunSummary | None:
        """The run under the cursor."""
        at = self.query_one("#body", ScrollingLines).cursor or 0
        return self.runs[at] if at < len(self.runs) else None

    def draw_body(self, view: View, palette: Palette) -> None:
        body = self.query_one("#body", ScrollingLines)
        width = body.size.width
        self.query_one("#columns", Lines).show([columns(width)], palette)
        attached = view.link.run_dir
        lines = [run_row(run, attached, view.wall_s or time.time(), width) for run in self.runs]
        why = self._problem or f"{NO_RUNS}: {key_of(view, 'new_run')} makes one"
        empty: list[Line] = [BLANK, ((f"  {why}", "dim"),)]
        body.show_all(lines or empty, palette)
        detail = [] if self.selected is None else run_detail(self.selected, width)
        self.query_one("#detail", Lines).show(detail, palette)
        here = replace(view, link=Link())  # this machine's load is live also during a replay
        line = machine_line(here, width - 3) if view.machine_sample is not None else ()
        self.query_one("#machine", Lines).show([(("   ", "text"), *line)], palette)

    def on_scrolling_lines_scrolled(self, event: ScrollingLines.Scrolled) -> None:
        self.draw()

    def on_scrolling_lines_chosen(self, event: ScrollingLines.Chosen) -> None:
        if event.index < len(self.runs):
            self.flux.attach_to(Path(self.runs[event.index].path))

    # --- actions on the run under the cursor --------------------------------------------------

    def _refused(self, what: str, reason: str) -> None:
        self.flux.notify(reason, title=f"Cannot {what}", severity="warning")

    def action_resume_run(self) -> None:
        """Start the trainer on a run that stopped or died, from its newest checkpoint."""
        run = self.selected
        if run is None:
            return
        reason = cannot_resume(run, self.flux.view)
        if self.flux.view.read_only:
            reason = "this view is read-only"
        if reason:
            self._refused("resume", reason)
            return
        from fluxtrain.rundir.launch import start_trainer

        try:
            self.flux.trainer = start_trainer(RESUME, run.path)
        except FluxTrainError as error:
            self.flux.notify(str(error), title="Not resumed", severity="error")
            return
        self.flux.attach_to(Path(run.path))
        told = "is tried again" if run.state == "refused" else "goes on from its newest checkpoint"
        self.flux.notify(f"{run.run_id} {told}", title="Resumed")

    def action_compare_run(self) -> None:
        """Draw the selected run's curves beside those of the run on screen."""
        run = self.selected
        if run is None:
            return
        if self.flux.run_dir is None:
            self._refused(
                "compare",
                f"no run is on screen: press {key_of(self.flux.view, 'list_choose')} on one first",
            )
        elif Path(run.path) == self.flux.run_dir:
            self._refused("compare", "this is the run on screen: choose another one")
        else:
            self.flux.compare_with(Path(run.path))
            self.flux.show_screen("loss")

    def action_clone_run(self) -> None:
        """Open the wizard, filled with the selected run's configuration."""
        from fluxtui.wizard.answers.draft import answers_from_run
        from fluxtui.wizard.screen import WizardScreen

        run = self.selected
        if run is None:
            return
        config = (read_json(RunDir(run.path).run) or {}).get("config")
        if self.flux.view.read_only:
            self._refused("clone", "this view is read-only")
        elif not isinstance(config, dict):
            self._refused("clone", f"{run.run_id} has no readable run.json")
        else:
            try:
                answers = answers_from_run(config)
            except FluxTrainError as error:
                self._refused("clone", f"{run.run_id}: {error}")
                return
            self.app.push_screen(WizardScreen(answers, self.flux.runs_folder), self._cloned)

    def _cloned(self, launch: Outcome | None) -> None:
        if launch is not None:  # without a launch the list is still behind the wizard
            take_launch(self.flux, launch)

    def action_delete_run(self) -> None:
        """Ask with the size, then delete the selected run."""
        run = self.selected
        if run is None:
            return
        if self.flux.view.read_only:
            self._refused("delete", "this view is read-only")
        elif Path(run.path) == self.flux.run_dir:
            self._refused("delete", "this is the run on screen: attach to another one first")
        else:
            self.app.run_worker(
                partial(self._weigh, run), thread=True, group="delete", exclusive=True
            )

    def _weigh(self, run: RunSummary) -> None:
        """Add up a run's size in a thread, because a large run takes a moment."""
        from fluxtui.screens.dialogs import DeleteDialog

        try:
            check_removable(Path(run.path), self.flux.runs_folder)
        except FluxTrainError as error:
            self.app.call_from_thread(self._refused, "delete", str(error))
            return
        found = contents(Path(run.path))
        dialog = DeleteDialog(run.run_id, found.own_bytes, run.step, found.kept_text)
        self.app.call_from_thread(self.app.push_screen, dialog, partial(self._delete_if, run))

    def _delete_if(self, run: RunSummary, delete: bool | None) -> None:
        if delete:
            self.app.run_worker(partial(self._delete, run), thread=True, group="delete")

    def _delete(self, run: RunSummary) -> None:
        kept = contents(Path(run.path)).kept_text
        try:
            freed = bytes_text(remove_run(Path(run.path), self.flux.runs_folder))
        except FluxTrainError as error:
            self.app.call_from_thread(self._refused, "delete", str(error))
        else:
            said = f"{run.run_id}, {freed}" + (f"; {kept}" if kept else "")
            self.app.call_from_thread(self.flux.notify, said, title="Deleted")
        self.app.call_from_thread(self.look_again)


def cannot_resume(run: RunSummary, view: View) -> str:
    """Say why a run cannot be resumed; "" if it can."""
    if run.state == "running":
        return f"{run.run_id} is running: {key_of(view, 'list_choose')} attaches to it"
    if run.state == "finished":
        clone = key_of(view, "clone_run")
        return f"{run.run_id} has finished: {clone} makes a new run with its settings"
    return ""
