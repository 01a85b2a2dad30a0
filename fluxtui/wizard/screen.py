"""The wizard's screen: it owns the answers, asks the engine in the background, and moves on."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Input

from fluxtrain.errors import FluxTrainError
from fluxtrain.telemetry.rundir import runs_root
from fluxtui.wizard import drawing, pages
from fluxtui.wizard.answers import Answers, StepName, neighbour
from fluxtui.wizard.checks import Check, check_data, check_model
from fluxtui.wizard.configuring import yaml_text
from fluxtui.wizard.draft import draft_path, forget_draft, load_draft, save_draft
from fluxtui.wizard.engine import EngineRefused, ask_engine
from fluxtui.wizard.launching import Launch, engine_arguments, prepare
from fluxtui.wizard.machine import machine_lines
from fluxtui.wizard.offer import DraftOffer
from fluxtui.wizard.plan_preview import PlanPreview, read_plan
from fluxtui.wizard.steps import (
    Answered,
    DataStep,
    LaunchStep,
    MethodStep,
    ModelStep,
    PlanStep,
    SourceStep,
    Step,
)
from fluxtui.wizard.widgets import Drawn

_CHECKS = {"model": check_model, "data": check_data}
_TYPING_PAUSE_S = 0.2
_KEYS: dict[StepName, list[tuple[str, str]]] = {
    "model": [("enter", "next"), ("↑↓", "choose"), ("tab", "field"), ("esc", "leave")],
    "data": [("enter", "next"), ("↑↓", "choose"), ("tab", "field"), ("esc", "back")],
    "method": [("enter", "next"), ("esc", "back")],
    "plan": [
        ("enter", "next"),
        ("← →", "offload"),
        ("s", "steps"),
        ("r", "again"),
        ("esc", "back"),
    ],
    "launch": [("enter", "start the training"), ("↑↓", "scroll"), ("esc", "back")],
}


class WizardScreen(Screen[Launch | None]):
    """Asks in five steps and ends with a `Launch`, or None when the user leaves at the first."""

    DEFAULT_CSS = """
    WizardScreen { layout: vertical; }
    WizardScreen #stepper { height: 3; margin: 1 2 1 2; }
    WizardScreen #middle { height: 1fr; }
    WizardScreen ContentSwitcher { width: 1fr; height: 1fr; max-width: 92; margin: 0 2; }
    WizardScreen #aside-box { display: none; }
    WizardScreen.-wide #aside-box {
        display: block; width: 42; padding: 0 2; margin-right: 1;
    }
    WizardScreen #footer { height: 2; margin: 0 2; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (104, "-wide")]
    BINDINGS = [
        Binding("enter", "next", "next"),
        Binding("escape", "back", "back"),
    ]

    def __init__(
        self,
        answers: Answers | None = None,
        root: Path | None = None,
        *,
        draft: Path | None = None,
        engine: tuple[str, ...] = (),
    ) -> None:
        """Start with `answers` (from flags or a file), or with the defaults and an offered draft.

        `engine` replaces the program that is asked for the plan and the machine.
        """
        super().__init__()
        self.answers = answers or Answers()
        self.root = root or runs_root()
        self._fresh = answers is None
        self._draft = draft or draft_path()
        self._engine = engine
        self._scratch = tempfile.TemporaryDirectory(prefix="fluxtrain-wizard-")
        self.checks: dict[str, Check | None] = {"model": None, "data": None}
        self.plan: PlanPreview | None = None
        self.refusal: str | None = None
        self._planned_for: Answers | None = None
        self._plan_asked_s = 0.0
        self._go_on_when_planned = False
        self._launch_error: str | None = None
        self._launching = False
        self._stale = True  # the answer on screen was changed after its last check
        self.machine: list[str] = ["measuring ..."]

    def compose(self) -> ComposeResult:
        yield Drawn(lambda width: drawing.stepper(self.answers.step, width), id="stepper")
        with Horizontal(id="middle"):
            with ContentSwitcher(initial=self.answers.step):
                for step in (ModelStep(), DataStep(), MethodStep(), PlanStep(), LaunchStep()):
                    step.id = step.name_of_step
                    yield step
            with VerticalScroll(id="aside-box", can_focus=False):
                yield Drawn(self._draw_aside, id="aside")
        yield Drawn(self._draw_footer, id="footer")

    def on_mount(self) -> None:
        """Begin to measure the machine and offer kept answers."""
        self.title = "FluxTrain"
        self._probe()
        self.set_interval(0.25, self._tick)
        draft = load_draft(self._draft) if self._fresh else None
        if draft is not None:
            self.app.push_screen(DraftOffer(draft), lambda go_on: self._offered(draft, go_on))
        self._go_to(self.answers.step)

    def on_unmount(self) -> None:
        """Remove the scratch folder."""
        self._scratch.cleanup()

    def _offered(self, draft: Answers, go_on: bool | None) -> None:
        if go_on:
            self.answers = draft
            self._go_to("plan" if draft.step == "launch" else draft.step)  # plan it again first
        else:
            forget_draft(self._draft)

    # --- moving -------------------------------------------------------------------------------

    @property
    def current(self) -> Step:
        """The step on screen."""
        return self.query_one(f"#{self.answers.step}", Step)

    def action_next(self) -> None:
        """Accept this step's answer and go on, if it can be used."""
        step = self.current
        if isinstance(step, SourceStep):
            box = step.open_input
            if box is not None and not box.value.strip() and not box.has_focus:
                box.focus()
                return
            checked = self.checks[step.name_of_step]
            if checked is not None and checked.error is None and not self._stale:
                self._move(1)
            else:
                self._check(step, go_on=True)
        elif isinstance(step, PlanStep):
            self._next_from_plan()
        elif isinstance(step, LaunchStep):
            if not self._launching:
                self._launching = True
                self._launch()
        else:
            self._move(1)

    def action_back(self) -> None:
        """Go to the step before; at the first, leave with the answers kept as a draft."""
        step = self.current
        self._go_on_when_planned = False
        if isinstance(step, PlanStep) and step.asks_for_steps:
            step.close_field()
        elif neighbour(self.answers.step, -1) is None:
            self.dismiss(None)
        else:
            self._move(-1)

    def _move(self, offset: int) -> None:
        step = neighbour(self.answers.step, offset)
        if step is not None:
            self._go_to(step)

    def _go_to(self, step: StepName) -> None:
        self._keep(dataclasses.replace(self.answers, step=step))
        self.query_one(ContentSwitcher).current = step
        self._launch_error, self._stale = None, True
        page = self.current
        if isinstance(page, SourceStep):
            page.fill(self.answers)
        self._redraw()
        page.take_focus()
        if isinstance(page, SourceStep):
            self._check(page)
        if step in ("method", "plan", "launch"):
            self._ask_for_plan()

    def _next_from_plan(self) -> None:
        if self.refusal is None and self.plan is None:
            self._go_on_when_planned = True
        elif self.plan is not None and self.plan.fits:
            self._move(1)
        else:
            self.app.bell()

    # --- answers ------------------------------------------------------------------------------

    @on(Answered)
    def _answered(self, event: Answered) -> None:
        self._keep(dataclasses.replace(self.answers, **event.changes))
        self._stale = True
        self._go_on_when_planned = False
        self._redraw()
        step = self.current
        if isinstance(step, SourceStep):
            self._check(step, pause_s=_TYPING_PAUSE_S)
        else:
            self._ask_for_plan()

    @on(PlanStep.AskedAgain)
    def _plan_again(self) -> None:
        self._planned_for = None
        self._ask_for_plan()

    @on(Input.Submitted)
    def _submitted(self) -> None:
        self.action_next()

    def _keep(self, answers: Answers) -> None:
        self.answers = answers
        save_draft(answers, self._draft)

    @work(exclusive=True, group="check")
    async def _check(self, step: SourceStep, pause_s: float = 0.0, go_on: bool = False) -> None:
        """Look at the answer in a thread; then go on, or stay and show why not."""
        name, answers = step.name_of_step, self.answers
        if not go_on:
            self.checks[name] = None
            step.show_check(None)
        await asyncio.sleep(pause_s)
        check = await asyncio.to_thread(_CHECKS[name], answers)
        self.checks[name] = check
        self._stale = False
        step.show_check(check)
        self.query_one("#aside").refresh()
        if name == "data" and check.error is None:
            self._ask_for_plan()  # while the samples are read
        if go_on and check.error is None:
            self._move(1)
        elif go_on:
            box = step.open_input
            (box or step).focus()
            self.app.bell()

    # --- the engine ---------------------------------------------------------------------------

    @work(exclusive=True, group="probe")
    async def _probe(self) -> None:
        """Measure the machine while the user reads the first question."""
        try:
            self.machine = machine_lines(await ask_engine("probe", "--json", program=self._engine))
        except EngineRefused as error:
            self.machine = ["not measured", str(error)]
        self.query_one("#footer").refresh()
        self.query_one("#aside", Drawn).refresh(layout=True)

    def _ask_for_plan(self) -> None:
        """Have the present answers planned, unless they are already."""
        wanted = dataclasses.replace(self.answers, step="plan")
        if wanted == self._planned_for:
            self._draw_plan()
            return
        self._planned_for = wanted
        self.plan, self.refusal = None, None
        self._plan_asked_s = time.monotonic()
        self._draw_plan()
        self._plan(wanted)

    @work(exclusive=True, group="plan")
    async def _plan(self, answers: Answers) -> None:
        config = Path(self._scratch.name) / "config.yaml"
        config.write_text(yaml_text(answers), encoding="utf-8")
        arguments = ["plan", *engine_arguments(answers, config), "--json"]
        try:
            self.plan = read_plan(await ask_engine(*arguments, program=self._engine))
        except EngineRefused as error:
            self.refusal = str(error).replace(str(config), "config.yaml")
        self._redraw()
        if self._go_on_when_planned and self.answers.step == "plan":
            self._go_on_when_planned = False
            self._next_from_plan()

    @work(exclusive=True, group="launch")
    async def _launch(self) -> None:
        """Make the run directory in a thread and end the wizard with it."""
        try:
            launch = await asyncio.to_thread(prepare, self.answers, self.root)
        except FluxTrainError as error:
            self._launch_error, self._launching = str(error), False
            self._redraw()
            return
        forget_draft(self._draft)
        self.dismiss(launch)

    # --- drawing ------------------------------------------------------------------------------

    def _redraw(self) -> None:
        page = self.current
        if isinstance(page, SourceStep | PlanStep):
            page.show(self.answers)
        self._draw_plan()
        for name in ("stepper", "footer"):
            self.query_one(f"#{name}").refresh()
        self.query_one("#aside", Drawn).refresh(layout=True)

    def _tick(self) -> None:
        if self.answers.step == "plan" and self.plan is None and self.refusal is None:
            self._draw_plan()

    def _draw_plan(self) -> None:
        self.query_one(PlanStep).show_plan(self._plan_content)
        self.query_one(LaunchStep).show_launch(
            lambda width: pages.launch_page(
                self.answers,
                self.plan,
                self.root,
                width,
                error=self._launch_error,
                with_yaml=not self.has_class("-wide"),
            )
        )

    def _plan_content(self, width: int) -> Content:
        if self.refusal is not None:
            return pages.plan_refused(self.refusal, width)
        if self.plan is not None:
            return pages.plan_page(self.plan, width)
        elapsed_s = time.monotonic() - self._plan_asked_s
        return pages.plan_pending(elapsed_s, width, self._go_on_when_planned)

    def _draw_aside(self, width: int) -> Content:
        return pages.aside(self.answers, self.checks, self.plan, self.machine, width)

    def _draw_footer(self, width: int) -> Content:
        wide = self.has_class("-wide")  # there the machine has a place of its own
        return drawing.footer(_KEYS[self.answers.step], [] if wide else self.machine, width)
