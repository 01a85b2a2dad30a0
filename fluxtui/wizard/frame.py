"""The frame of the wizard: its pages, the rail of steps above and the keys below."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.signal import Signal
from textual.widgets import ContentSwitcher

from fluxtrain.events.run_folder.run_dir import RunSummary, runs_root
from fluxtui.actions.action_screen import ActionScreen
from fluxtui.actions.key_map import joined, own_bindings
from fluxtui.actions.table import ACTIONS, KEY_TEXTS, Action
from fluxtui.answers import questions
from fluxtui.answers.answers import Answers, route
from fluxtui.answers.launching import Outcome
from fluxtui.answers.questions import ListOption
from fluxtui.answers.rows import ROWS, StepName, declared
from fluxtui.app_base import AppBase
from fluxtui.state.machine_sample import MachineSample
from fluxtui.wizard.checks.answer_checks import Check
from fluxtui.wizard.checks.known_runs import (
    known_runs,
    recent_models,
    run_option,
    runs_to_resume,
    runs_to_watch,
)
from fluxtui.wizard.engine.background import Background
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.data import data_page
from fluxtui.wizard.pages.found import found_page
from fluxtui.wizard.pages.launch import aside, launch_page
from fluxtui.wizard.pages.wizard_view import WizardView
from fluxtui.wizard.steps.setting_steps import MethodStep, StrategyStep, TrainingStep
from fluxtui.wizard.steps.source_step import SourceStep
from fluxtui.wizard.steps.step import LaunchStep, WizardStep
from fluxtui.wizard.steps.widgets import Drawn

Hint = tuple[tuple[str, ...], str]  # ids of actions, or keys that are Textual's own; and words
NEXT: Hint = (("wizard_next",), "next")
BACK: Hint = (("wizard_back",), "back")
CHOOSE: Hint = (("list_up", "list_down"), "choose")
SCROLL: Hint = (("list_up", "list_down"), "scroll")
COMPLETE: Hint = (("wizard_complete",), "field, path")
HELP: Hint = (("help",), "help")
TRY: Hint = (("wizard_try",), "dry run")
WITH_FIELDS: tuple[StepName, ...] = ("start", "model", "data")  # a letter there is an answer
HINTS: dict[StepName, tuple[Hint, ...]] = {
    "start": (NEXT, CHOOSE, COMPLETE, (("wizard_back",), "leave"), HELP),
    "model": (NEXT, CHOOSE, COMPLETE, BACK, HELP),
    "data": (
        NEXT, (("list_up", "list_down"), "pick"), COMPLETE,
        (("wizard_read_as", "wizard_read_before"), "format"), (("pgdn",), "more"),
        BACK, HELP,
    ),
    "method": (
        NEXT, (("wizard_method_before", "wizard_method_after"), "method"),
        (("wizard_again",), "again"), SCROLL, BACK, HELP,
    ),
    "training": (
        NEXT, CHOOSE, (("wizard_value_before", "wizard_value_after"), "change"),
        (("wizard_edit",), "type"), (("wizard_default",), "auto"), BACK, HELP,
    ),
    "strategy": (
        NEXT,
        (("wizard_faster", "wizard_smaller"), "dial"),
        (("wizard_batch", "wizard_chunk", "wizard_steps", "wizard_offload"), "change"),
        (("wizard_why",), "why"), (("wizard_again",), "again"), BACK, HELP,
    ),
    "launch": (
        (("wizard_next",), "start"), TRY, (("wizard_yaml",), "YAML"),
        (("wizard_command",), "command"), SCROLL, BACK, HELP,
    ),
}  # fmt: skip
TRYING: tuple[Hint, ...] = ((("wizard_back",), "end the dry run"), SCROLL)


def key_hints(
    step: StepName, registry: Sequence[Action], trying: bool = False
) -> list[tuple[str, str]]:
    """Return the keys and what they do, in the order of the footer."""
    by_id = {action.id: action for action in registry}
    hints = TRYING if trying else HINTS[step]
    return [(joined([_key(by_id, name, step) for name in names]), words) for names, words in hints]


def _key(by_id: dict[str, Action], name: str, step: StepName) -> str:
    """Return the key of an action as a person reads it; no letters where letters are typed."""
    action = by_id.get(name)
    if action is None:
        return name
    keys = action.keys.split(",")
    named = [key for key in keys if len(key) > 1 and len(KEY_TEXTS.get(key, key)) > 1]
    key = named[0] if step in WITH_FIELDS and action.id in ("help",) and named else keys[0]
    return KEY_TEXTS.get(key, key.replace("ctrl+", "^"))


class WizardFrame(ActionScreen[Outcome | None]):
    """Holds the answers and what is known about them, and draws their current step."""

    DEFAULT_CSS = """
    WizardFrame { layout: vertical; }
    WizardFrame #stepper { height: 3; margin: 1 2 1 2; }
    WizardFrame.-short #stepper { margin: 0 2 1 2; }
    WizardFrame #middle { height: 1fr; }
    WizardFrame ContentSwitcher { width: 1fr; height: 1fr; max-width: 92; margin: 0 2; }
    WizardFrame #aside-box { display: none; }
    WizardFrame.-wide #aside-box {
        display: block; width: 42; padding: 0 2; margin-right: 1;
    }
    WizardFrame #footer { height: 2; margin: 0 2; }
    WizardFrame.-short SourceStep Input, WizardFrame.-short AskingStep Input {
        height: 1; border: none; border-left: tall $secondary; margin-bottom: 0;
    }
    WizardFrame.-short WizardStep Input:focus { border-left: tall $accent; }
    WizardFrame.-short SourceStep Input.-refused { border-left: tall $error; }
    WizardFrame.-short SourceStep > ChoiceList { margin-bottom: 0; }
    WizardFrame.-short SourceStep > Drawn, WizardFrame.-short AskingStep > Drawn {
        margin-bottom: 0;
    }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (104, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-high"), (38, "-tall")]
    BINDINGS: ClassVar[list[BindingType]] = own_bindings(("wizard_next", "wizard_back"))

    def __init__(self, answers: Answers, root: Path | None, engine: tuple[str, ...]) -> None:
        super().__init__()
        self.answers = answers
        self.root = root or runs_root()
        self.background = Background(self, self.heard, engine)
        self.checks: dict[str, Check | None] = {"start": None, "model": None, "data": None}
        self.runs: tuple[RunSummary, ...] = ()
        self.goes_on = False  # Enter was pressed before the plan was there
        self.launch_error: str | None = None
        self.free_disk_bytes: int | None = None
        self.machine: MachineSample | None = None

    def compose(self) -> ComposeResult:
        yield Drawn(self._draw_stepper, id="stepper")
        with Horizontal(id="middle"):
            with ContentSwitcher(initial=self.answers.step):
                yield SourceStep(questions.START, found_page)
                yield SourceStep(questions.MODEL, found_page)
                yield SourceStep(questions.DATA, data_page)
                yield MethodStep()
                yield TrainingStep()
                yield StrategyStep()
                yield LaunchStep(launch_page)
            with VerticalScroll(id="aside-box", can_focus=False):
                yield Drawn(lambda width: aside(self.view, width), id="aside")
        yield Drawn(self._draw_footer, id="footer")

    def begin(self) -> None:
        """Begin to measure the machine and to look at earlier runs."""
        self.title = "FluxTrain"
        self.background.measure()
        self._read_runs()
        self.set_interval(0.25, self._tick)

    def watch_machine(self, signal: Signal[MachineSample]) -> None:
        """Follow the app's samples of this machine."""
        signal.subscribe(self, self._machine_sampled)

    def _machine_sampled(self, sample: MachineSample) -> None:
        self.machine = sample
        with suppress(NoMatches):
            if self.is_mounted and self.is_current:
                if self.answers.step == "strategy":
                    self.current.show(self.view)
                self.query_one("#aside", Drawn).refresh(layout=True)

    def on_unmount(self) -> None:
        """Remove the scratch folder."""
        self.background.close()

    @property
    def registry(self) -> tuple[Action, ...]:
        """Return the actions, with the user's own keys where the app has them."""
        return self.app.actions if isinstance(self.app, AppBase) else ACTIONS

    @property
    def place(self) -> str:
        """Return the page on screen, by its name in the table of actions."""
        return f"wizard.{self.answers.step}"

    @property
    def holders(self) -> tuple[DOMNode, ...]:
        """Return the owners of actions: the page on screen before the wizard and the app."""
        return (self.current, self, self.app)

    @property
    def current(self) -> WizardStep:
        """Return the step on screen."""
        return self.query_one(f"#{self.answers.step}", WizardStep)

    @property
    def view(self) -> WizardView:
        """Return the state that the pages draw."""
        asked = self.background
        return WizardView(
            answers=self.answers,
            checks=self.checks,
            probe=asked.probe.state,
            inspection=asked.inspection.state,
            plan=asked.plan.state,
            methods=asked.plans_of_methods(self.answers),
            trial=asked.trial.state,
            cards=asked.cards,
            cards_are_older=not asked.cards_are_of(self.answers),
            runs=self.runs,
            goes_on=self.goes_on,
            launch_error=self.launch_error,
            root=self.root,
            free_disk_bytes=self.free_disk_bytes,
            pictures=isinstance(self.app, AppBase) and self.app.view.pictures,
            wide=self.has_class("-wide"),
            short=self.has_class("-short"),
            tall=self.has_class("-tall"),
            machine=self.machine,
            key_texts={action.id: action.key_text for action in self.registry},
        )

    def heard(self) -> None:
        """Take an answer of the engine."""
        if self.is_mounted:
            self.redraw()

    def redraw(self) -> None:
        """Draw what is known now; nothing while the screen is being taken down."""
        with suppress(NoMatches):
            self.current.show(self.view)
            for name in ("stepper", "footer"):
                self.query_one(f"#{name}").refresh()
            self.query_one("#aside", Drawn).refresh(layout=True)

    @work(exclusive=True, group="runs")
    async def _read_runs(self) -> None:
        """Read earlier runs, and the models that they trained."""
        runs = await asyncio.to_thread(known_runs, self.root)
        models = await asyncio.to_thread(recent_models, runs)
        self.runs = tuple(runs)
        with suppress(NoMatches):
            start, model = (self.query_one(f"#{name}", SourceStep) for name in ("start", "model"))
            start.offer("resume", [run_option(run) for run in runs_to_resume(runs)])
            start.offer("attach", [run_option(run) for run in runs_to_watch(runs)])
            model.offer("recent", [ListOption(path, Path(path).name, path) for path in models])
        self.redraw()
        await asyncio.to_thread(declared, ROWS[0])  # loads the schema for the pages to come

    def _tick(self) -> None:
        """Advance the clock on the page while the engine is asked."""
        if self.background.busy:
            with suppress(NoMatches):
                self.current.show(self.view)

    def _draw_stepper(self, width: int) -> Content:
        return drawing.stepper(self.answers.step, width, route(self.answers))

    def _draw_footer(self, width: int) -> Content:
        wide = self.has_class("-wide")  # there the machine has a place of its own
        trying = self.background.trial.state.pending
        keys = key_hints(self.answers.step, self.registry, trying)
        return drawing.footer(keys, () if wide else self.view.machine_lines, width)
