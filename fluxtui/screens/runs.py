"""Screen 7: the runs of this machine: attach to one, resume, compare, clone or delete it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Input

from fluxtrain.errors import FluxTrainError
from fluxtrain.events.run_folder.removal import check_removable, contents, remove_run
from fluxtrain.events.run_folder.run_dir import RunDir, RunSummary, list_runs
from fluxtrain.files.atomic import read_json
from fluxtrain.units import bytes_text
from fluxtui.actions.key_map import screen_bindings
from fluxtui.panels.machine import machine_line
from fluxtui.panels.panel import key_of
from fluxtui.screens.chrome import uses_of_model
from fluxtui.screens.run_actions import (
    RESUME,
    cannot_resume,
    take_launch,
    way_on,
)
from fluxtui.screens.run_rows import Column, RunOrder, columns, run_detail, run_row
from fluxtui.screens.run_screen import RunScreen
from fluxtui.sources.trust import TRUST, trusts_code
from fluxtui.state.status import Link
from fluxtui.state.view import View
from fluxtui.themes import Palette
from fluxtui.widgets.entry import PrintableInput
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import BLANK, Line
from fluxtui.words import counted

if TYPE_CHECKING:
    from fluxtui.answers.launching import Outcome

GONE = "the run that was under the cursor is gone: choose another one"
REFRESH_PERIOD_S = 3.0
NO_RUNS = "no runs here yet"
LOOKING = "looking ..."


class RunsScreen(RunScreen):
    """All runs below the runs folder and the one on screen, newest first or as they are sorted.

    The cursor is on a run, not on a line: it goes with its run, and where that is gone, actions
    wait until the user has chosen another one.
    """

    NAME = "runs"
    AUTO_FOCUS = "#body"
    BINDINGS: ClassVar[list[BindingType]] = screen_bindings("runs")
    DEFAULT_CSS = """
    RunsScreen > #detail { height: 4; }
    RunsScreen > Input, RunsScreen > Input:focus {
        display: none; height: 1; border: none; padding: 0 1;
    }
    RunsScreen > Input.-open, RunsScreen > Input.-open:focus { display: block; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs: Sequence[RunSummary] = ()  # as they are shown
        self.order = RunOrder()
        self._all: Sequence[RunSummary] = ()
        self._lost = ""  # the path of the run that the cursor was on before it was gone
        self._goes_to_attached = True
        self._deleted = ""  # by the user: the cursor may go on to the next one
        self._problem = LOOKING

    def compose_body(self) -> ComposeResult:
        yield Lines(id="columns", classes="chrome")
        yield ScrollingLines(id="body", cursor=True)
        yield Lines(id="detail")
        yield Lines(id="machine", classes="chrome")
        yield PrintableInput(
            placeholder="words of the state, name, model or path; !word: not", id="wanted"
        )

    def on_mount(self) -> None:
        self.look_again()
        self.set_interval(REFRESH_PERIOD_S, self.look_again)

    def on_screen_resume(self) -> None:
        if self._goes_to_attached and self._all:
            self._arrange()
        self.look_again()

    def come_from(self) -> None:
        """Put the cursor on the run that was on screen, once the list is ready."""
        self._goes_to_attached = True

    def look_again(self) -> None:
        """Read the folder in a thread, if this screen is in front."""
        if self.is_current:
            self.run_worker(self._read, thread=True, exclusive=True, group="runs")

    def _read(self) -> None:
        runs: Sequence[RunSummary] = ()
        problem = ""
        try:
            runs = with_attached(list_runs(self.flux.runs_folder), self.flux.run_dir)
        except OSError as error:
            problem = f"{self.flux.runs_folder} cannot be read: {error.strerror}"
        self.app.call_from_thread(self._show, runs, problem)

    def _show(self, runs: Sequence[RunSummary], problem: str = "") -> None:
        self._all, self._problem = runs, problem
        if self.is_whole:
            self._arrange()

    def _arrange(self, *, by_user: bool = False) -> None:
        """Filter and sort; the cursor stays on its run when others come or go.

        by_user: the user's key changed the list, so the first line gets the cursor.
        """
        chosen = self.selected.path if self.selected is not None else self._lost
        self.runs = self.order.of(self._all, self.flux.view.wall_s or time.time())
        body, paths = self.query_one("#body", ScrollingLines), [run.path for run in self.runs]
        attached = str(self.flux.run_dir) if self.flux.run_dir is not None else ""
        if self._goes_to_attached and attached in paths:
            self._goes_to_attached, chosen = False, attached
        if chosen in paths:
            body.cursor, body.marks_cursor = paths.index(chosen), True
        elif chosen in ("", self._deleted):
            body.marks_cursor = True
        elif by_user:
            body.cursor, body.marks_cursor, self._lost = 0, True, chosen
        else:
            body.marks_cursor, self._lost = False, chosen
        self.draw()

    @property
    def selected(self) -> RunSummary | None:
        """Return the run under the cursor; None while that run is gone.

        The list and the cursor change together, so this is always the marked line.
        """
        body = self.query_one("#body", ScrollingLines)
        at = body.cursor or 0
        return self.runs[at] if body.marks_cursor and at < len(self.runs) else None

    @property
    def run_in_use(self) -> Path | None:
        """Return the run whose model the keys use: the one under the cursor."""
        return Path(self.selected.path) if self.selected is not None else None

    def notices(self, view: View, width: int) -> list[Line]:
        """Leave out the keys for the run on screen: on this screen they act on the one under the
        cursor."""
        return [] if view.status.kind == "finished" else super().notices(view, width)

    def draw_body(self, view: View, palette: Palette) -> None:
        body = self.query_one("#body", ScrollingLines)
        width = body.size.width
        names = columns(width, self.order.column, self.order.down)
        self.query_one("#columns", Lines).show([names], palette)
        attached = view.link.run_dir
        lines = [run_row(run, attached, view.wall_s or time.time(), width) for run in self.runs]
        why = self._problem or f"{NO_RUNS}: {key_of(view, 'new_run')} makes one"
        if self._all and not self._problem:
            why = (
                f"none of {counted(len(self._all), 'run')} has {self.order.words!r}: esc shows all"
            )
        empty: list[Line] = [BLANK, ((f"  {why}", "dim"),)]
        body.show_all(lines or empty, palette)
        gone: Line = ((f"   {GONE}", "warn"),)
        detail = [] if not self.runs else [gone]
        if self.selected is not None:
            detail = run_detail(self.selected, width, uses_of_model(view))
        self.query_one("#detail", Lines).show(detail, palette)
        here = replace(view, link=Link())  # this machine's load is live also during a replay
        line = machine_line(here, width - 3) if view.machine_sample is not None else ()
        self.query_one("#machine", Lines).show([(("   ", "text"), *line)], palette)

    def on_scrolling_lines_scrolled(self, event: ScrollingLines.Scrolled) -> None:
        self._goes_to_attached = False
        self.draw()

    def on_scrolling_lines_chosen(self, event: ScrollingLines.Chosen) -> None:
        if self.selected is not None:  # not by its line: the list may have changed since
            self.flux.attach_to(Path(self.selected.path))

    # --- which runs, and in what order --------------------------------------------------------

    def action_filter_runs(self) -> None:
        """Let the user type words; Enter keeps them, Escape shows all runs."""
        field = self.query_one("#wanted", PrintableInput)
        field.add_class("-open")
        field.focus()

    def action_sort(self, column: Column | Literal[""]) -> None:
        """Sort by a column; again: the other way round."""
        if column:
            by, down = self.order.by(column)
            self.order = replace(self.order, column=by, down=down)
        else:
            self.order = replace(self.order, column=None, down=False)
        self._arrange()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.order = replace(self.order, words=event.value)
        self._arrange(by_user=True)

    def on_input_submitted(self) -> None:
        self._close_filter()

    def key_escape(self) -> None:
        """Show all runs."""
        self.query_one("#wanted", PrintableInput).value = ""
        self._close_filter()

    def _close_filter(self) -> None:
        if not self.order.words:
            self.query_one("#wanted", PrintableInput).remove_class("-open")
        self.query_one("#body").focus()
        self.call_after_refresh(self.draw)

    # --- actions on the run under the cursor --------------------------------------------------

    def _refused(self, what: str, reason: str) -> None:
        self.flux.notify(reason, title=f"Cannot {what}", severity="warning")

    def action_resume_run(self) -> None:
        """Ask, then start the trainer on a run that stopped or died, from its checkpoint."""
        from fluxtui.screens.dialogs import QuestionDialog

        run = self.selected
        if run is None:
            return
        reason = cannot_resume(run, self.flux.view)
        if self.flux.view.read_only:
            reason = "this view is read-only"
        if reason:
            self._refused("resume", reason)
            return
        code = trusts_code(run.path)
        told = way_on(run, code)
        dialog = QuestionDialog(f"Resume {run.run_id}?", told, "resume", "leave it")
        self.app.push_screen(dialog, partial(self._resume_if, run, TRUST if code else ()))

    def _resume_if(self, run: RunSummary, trust: tuple[str, ...], resume: bool | None) -> None:
        if not resume:
            return
        from fluxtrain.events.run_folder.launch import start_trainer

        try:
            reason = cannot_resume(RunDir(run.path).summary(), self.flux.view)  # as it is by now
            if reason:
                self._refused("resume", reason)
                return
            self.flux.trainer = start_trainer((*RESUME, *trust), run.path)
        except (FluxTrainError, OSError) as error:
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
        from fluxtui.answers.draft import answers_from_run
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
        from fluxtui.screens.dialogs import QuestionDialog

        try:
            check_removable(Path(run.path), self.flux.runs_folder)
        except FluxTrainError as error:
            self.app.call_from_thread(self._refused, "delete", str(error))
            return
        found = contents(Path(run.path))
        done = "" if run.step is None else f" of {counted(run.step, 'step')}"
        told = f"{bytes_text(found.own_bytes)}: checkpoints, model and log{done}.\n"
        told += "They cannot be brought back."
        told += f"\n{found.kept_text}." if found.kept_text else ""
        dialog = QuestionDialog(f"Delete {run.run_id}?", told, "delete", "keep")
        self.app.call_from_thread(self.app.push_screen, dialog, partial(self._delete_if, run))

    def _delete_if(self, run: RunSummary, delete: bool | None) -> None:
        if delete:
            self.app.run_worker(partial(self._delete, run), thread=True, group="delete")

    def _delete(self, run: RunSummary) -> None:
        try:
            found = remove_run(Path(run.path), self.flux.runs_folder)
            freed, kept = bytes_text(found.own_bytes), found.kept_text
            self._deleted = run.path
        except FluxTrainError as error:
            self.app.call_from_thread(self._refused, "delete", str(error))
        else:
            said = f"{run.run_id}, {freed}" + (f"; {kept}" if kept else "")
            self.app.call_from_thread(self.flux.notify, said, title="Deleted")
        self.app.call_from_thread(self.look_again)


def with_attached(runs: list[RunSummary], run_dir: Path | None) -> list[RunSummary]:
    """Add the run on screen, where it lies in another folder than the others."""
    if run_dir is None or any(Path(run.path) == run_dir for run in runs):
        return runs
    with suppress(OSError):
        return [RunDir(run_dir).summary(), *runs]
    return runs
