"""The wizard's screen: from one step to the next, and what the user's answers change."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import ContentSwitcher, Input

from fluxtrain.errors import EXIT_BAD_INPUT, FluxTrainError
from fluxtrain.files.atomic import free_bytes
from fluxtui.answers.answers import Answers, neighbour, with_changes
from fluxtui.answers.draft import draft_path, forget_draft, load_draft, save_draft
from fluxtui.answers.launching import Attach, command_text, place_of, prepare
from fluxtui.answers.rows import StepName
from fluxtui.app_base import AppBase
from fluxtui.wizard.checks.answer_checks import checked, reading_settings
from fluxtui.wizard.engine.plan_preview import dial_settings
from fluxtui.wizard.frame import WizardFrame
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.launch import config_text
from fluxtui.wizard.steps.asking_step import AskingStep
from fluxtui.wizard.steps.source_step import SourceStep
from fluxtui.wizard.steps.step import AnswersChanged, Wished
from fluxtui.wizard.steps.widgets import Drawn


class DraftOffer(ModalScreen[bool]):
    """Offers kept answers: True to go on with them, False to start afresh, None to keep them."""

    DEFAULT_CSS = """
    DraftOffer { align: center middle; }
    DraftOffer > Vertical {
        width: 64; max-width: 90%; height: auto; border: round $accent; padding: 1 2;
        background: $surface;
    }
    """
    BINDINGS = [
        Binding("enter", "answer(True)", "go on"),
        Binding("n", "answer(False)", "start afresh"),
        Binding("escape", "answer(None)", "later"),
    ]

    def __init__(self, draft: Answers) -> None:
        super().__init__()
        self._draft = draft

    def compose(self) -> ComposeResult:
        box = Vertical(Drawn(self._draw))
        box.border_title = "Unfinished answers"
        yield box

    def action_answer(self, go_on: bool | None) -> None:
        """Close with the answer."""
        self.dismiss(go_on)

    def _draw(self, width: int) -> Content:
        rows = [
            ("model", self._draft.model_path or "-"),
            ("data", self._draft.data_file or "-"),
            ("stopped at", drawing.TITLES[self._draft.step]),
            *[("--set", setting) for setting in self._draft.overrides],
        ]
        lines = [
            Content.assemble(
                (name.ljust(12), drawing.MUTED), (drawing.shortened(value, width - 12), "bold")
            )
            for name, value in rows
        ]
        keys = drawing.keys_line(
            [("enter", "go on with them"), ("n", "start afresh"), ("esc", "later")]
        )
        return Content("\n").join([*lines, Content(""), keys])


_TYPING_PAUSE_S = 0.2
_PLANNED: tuple[StepName, ...] = ("method", "training", "strategy", "launch")


class WizardScreen(WizardFrame):
    """Asks step by step and ends with what to launch or watch, or None when the user leaves."""

    def __init__(
        self,
        answers: Answers | None = None,
        root: Path | None = None,
        *,
        draft: Path | None = None,
        engine: tuple[str, ...] = (),
    ) -> None:
        """Start with `answers` (from flags, a file or a run), or with the defaults and an offered
        draft. `engine` replaces the program that is asked for the plan and the machine.
        """
        super().__init__(answers or Answers(), root, engine)
        self._begun = self.answers
        self._draft = draft or draft_path()
        self._launching = False
        self._stale = True  # the answer on screen was changed after its last check

    def on_mount(self) -> None:
        """Begin, and offer kept answers."""
        self.begin()
        if isinstance(self.app, AppBase):
            self.watch_machine(self.app.machine_signal)
        draft = load_draft(self._draft, self._begun)
        if draft is not None:
            self.app.push_screen(DraftOffer(draft), lambda go_on: self._offered(draft, go_on))
        self._go_to(self.answers.step)

    def _offered(self, draft: Answers, go_on: bool | None) -> None:
        if go_on:
            self.answers = draft
            late = draft.step == "launch"  # plan it again first
            self._go_to("strategy" if late and draft.start != "resume" else draft.step)
        elif go_on is False:
            forget_draft(self._draft)

    # --- moving -------------------------------------------------------------------------------

    def action_next(self) -> None:
        """Accept this step's answer and go on, if it can be used."""
        step = self.current
        if isinstance(step, AskingStep) and step.take_enter():
            return
        if isinstance(step, SourceStep):
            self._next_from_source(step)
        elif step.name_of_step == "strategy":
            self._next_from_plan()
        elif step.name_of_step == "launch":
            self._next_from_launch()
        else:
            self._move(1)

    def _next_from_source(self, step: SourceStep) -> None:
        box = step.open_input
        if box is not None and not box.value.strip() and not box.has_focus:
            box.focus()
            return
        check = self.checks[step.name_of_step]
        if check is not None and check.error is None and not self._stale:
            self._accepted(step)
        elif check is not None and check.readings and not self._stale:
            step.answer(reading_settings(check.readings[step.readings.chosen]))
        else:
            self._check(step, go_on=True)

    def _accepted(self, step: SourceStep) -> None:
        """Tell whether the answer of a step can be used."""
        if step.name_of_step == "start":
            self._begin()
        elif step.name_of_step == "data" and self._data_refused:
            self.app.bell()
        else:
            self._move(1)

    def _begin(self) -> None:
        """Act on the choice of the start step."""
        answers, check = self.answers, self.checks["start"]
        if answers.start == "attach":
            forget_draft(self._draft)
            self.dismiss(Attach(run_dir=Path(answers.attach_run)))
        elif answers.start == "resume":
            self._go_to("launch")
        elif answers.start == "file":
            if answers.loaded_from != answers.config_path and check and check.loaded:
                self.answers = check.loaded
            self._go_to("strategy")
        else:
            if answers.loaded_from:  # a file's other settings are not part of a new run
                self.answers = dataclasses.replace(answers, base={}, loaded_from="")
            self._go_to("model")

    @property
    def _data_refused(self) -> bool:
        """Return whether the engine refuses this data with this model."""
        asked = self.background.inspection.state
        return asked.refusal is not None and asked.exit_code == EXIT_BAD_INPUT

    def _next_from_plan(self) -> None:
        asked = self.background.plan.state
        if asked.refusal is None and asked.value is None:
            self.goes_on = True
        elif asked.value is not None and asked.value.fits:
            self._move(1)
        else:
            self.app.bell()

    def _next_from_launch(self) -> None:
        if self._launching:
            return
        if self.answers.start != "resume" and self._data_refused:
            self.app.bell()
            return
        self._launching = True
        self._launch()

    def action_back(self) -> None:
        """Go to the step before; at the first, leave with the answers kept as a draft."""
        self.goes_on = False
        if self.current.leave():
            return
        if self.background.trial.state.pending:
            self.background.trial.forget()
        elif neighbour(self.answers, -1) is None:
            self.dismiss(None)
        else:
            self._move(-1)

    def _move(self, offset: int) -> None:
        step = neighbour(self.answers, offset)
        if step is not None:
            self._go_to(step)

    def _go_to(self, step: StepName) -> None:
        self._keep(dataclasses.replace(self.answers, step=step))
        self.query_one(ContentSwitcher).current = step
        self.launch_error, self._stale = None, True
        if step == "launch":
            self.free_disk_bytes = free_bytes(place_of(self.answers, self.root))
        page = self.current
        if isinstance(page, SourceStep):
            page.fill(self.answers)
        self.redraw()
        page.scroll_home(animate=False)
        page.take_focus()
        if isinstance(page, SourceStep):
            self._check(page)
        if step in _PLANNED and self.answers.start != "resume":
            self.background.look_at(self.answers, compare=step == "method")

    # --- answers ------------------------------------------------------------------------------

    @on(AnswersChanged)
    def _answered(self, event: AnswersChanged) -> None:
        answers = with_changes(self.answers, event.changes)
        if event.page not in (None, self.answers.step):  # a key went on before this was heard
            if answers != self.answers and self.is_current and not self._launching:
                self.answers = answers
                self._go_to(event.page)
            return
        self._keep(answers)
        self._stale, self.goes_on = True, False
        self.redraw()
        step = self.current
        if isinstance(step, SourceStep):
            self._check(step, pause_s=_TYPING_PAUSE_S)
        else:
            compare = step.name_of_step == "method"
            self.background.look_at(self.answers, compare=compare)

    @on(Wished)
    def _wished(self, event: Wished) -> None:
        if event.wish == "measure":
            self.background.measure(fresh=True)
        elif event.wish == "plan":
            self.background.plan_again()
        elif event.wish == "try":
            self.background.try_out(self.answers)
        elif event.wish == "copy yaml":
            self._copy(config_text(self.view), "config.yaml")
        else:
            self._copy(command_text(self.answers), "the command")

    def _copy(self, text: str, what: str) -> None:
        self.app.copy_to_clipboard(text)
        self.notify(f"copied {what}")

    @on(Input.Submitted)
    def _submitted(self) -> None:
        self.action_next()

    def _keep(self, answers: Answers) -> None:
        """Take these answers, and save them once the user gave one here: a look loses no older
        ones."""
        self.answers = answers
        if dataclasses.replace(answers, step=self._begun.step) != self._begun:
            save_draft(answers, self._draft)

    @work(exclusive=True, group="check")
    async def _check(self, step: SourceStep, pause_s: float = 0.0, go_on: bool = False) -> None:
        """Look at the answer in a thread; then go on, or stay and show why not."""
        name, answers = step.name_of_step, self.answers
        if not go_on:
            self.checks[name] = None
            self.redraw()
        await asyncio.sleep(pause_s)
        check = await asyncio.to_thread(checked, name, answers)
        self.checks[name] = check
        self._stale = False
        if name == "data" and check.error is None:
            self.background.look_at(self.answers)  # while the first documents are read
        self.redraw()
        if not go_on or not self.is_current:
            return
        if check.error is None:
            self._accepted(step)
        else:
            (step.open_input or step).focus()
            self.app.bell()

    # --- in the background --------------------------------------------------------------------

    @work(exclusive=True, group="launch")
    async def _launch(self) -> None:
        """Make the run directory in a thread and end the wizard with it."""
        try:
            launch = await asyncio.to_thread(prepare, self.answers, self.root, was_shown=True)
        except FluxTrainError as error:
            self.launch_error, self._launching = str(error), False
            self.redraw()
            return
        forget_draft(self._draft)
        self.dismiss(launch)

    def heard(self) -> None:
        """Take an answer of the engine; the user may be waiting for it."""
        if not self.is_mounted:
            return
        super().heard()
        dial, cards = self.answers.dial, self.background.cards
        if dial != "auto" and not self.answers.dial_settings and dial_settings(cards, dial):
            self.post_message(AnswersChanged({"dial_settings": dial_settings(cards, dial)}))
        plan = self.background.plan.state
        on_plan = self.answers.step == "strategy"
        if self.goes_on and on_plan and not plan.pending:
            self.goes_on = False
            self._next_from_plan()
