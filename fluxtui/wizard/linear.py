"""The wizard line by line: the same questions, checks and answers, without a screen.

For screen readers (`ACCESSIBLE=1`) and terminals that cannot draw. Nothing is redrawn; each line is
said once. `b` goes back, `q` leaves, Enter takes what stands in brackets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fluxtrain.errors import FluxTrainError
from fluxtrain.events.answers.answers import Answer, DryRunAnswer, InspectionAnswer
from fluxtrain.events.answers.asking import EngineRefused, ask_engine
from fluxtrain.events.answers.machine import ProbeAnswer
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.events.run_folder.run_dir import runs_root
from fluxtrain.files.atomic import free_bytes
from fluxtui.answers import questions
from fluxtui.answers.answers import (
    DIAL,
    METHODS,
    OFFLOADS,
    Answers,
    Method,
    StepName,
    neighbour,
)
from fluxtui.answers.configuring import yaml_text
from fluxtui.answers.draft import draft_path, forget_draft, load_draft, save_draft
from fluxtui.answers.launching import (
    Attach,
    Outcome,
    command_text,
    engine_arguments,
    place_of,
    prepare,
    run_folder_problem,
)
from fluxtui.answers.question import AdapterQuestion, Field, Option, SourceQuestion
from fluxtui.answers.training import (
    TRAINING_QUESTIONS,
    TrainingQuestion,
    changes_of,
    read_answer,
)
from fluxtui.wizard import linear_lines
from fluxtui.wizard.checks.answer_checks import Check, checked
from fluxtui.wizard.checks.known_runs import (
    known_runs,
    recent_models,
    run_option,
    runs_to_resume,
    runs_to_watch,
)
from fluxtui.wizard.dialogue import Ask, Dialogue, GoBack, Leave, Say, completing
from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.engine.background import with_method
from fluxtui.wizard.engine.ranked import dial_settings
from fluxtui.wizard.pages.preview import config_text
from fluxtui.wizard.pages.training import value_and_reason
from fluxtui.wizard.pages.wizard_view import WizardView

T = TypeVar("T", bound=Answer)
GREETING = "FluxTrain. Enter takes the answer in brackets, b goes back, q leaves."


class LinearWizard(Dialogue):
    """Walks through the steps."""

    def __init__(
        self,
        answers: Answers | None = None,
        root: Path | None = None,
        *,
        ask: Ask = input,
        say: Say = print,
        draft: Path | None = None,
        engine: tuple[str, ...] = (),
    ) -> None:
        """Start with `answers`, or with the defaults and an offered draft."""
        super().__init__(ask, say)
        self.view = WizardView(answers=answers or Answers(), root=root or runs_root())
        self._fresh = answers is None
        self._engine = engine
        self._draft = draft or draft_path()
        self._planned_for: object = None
        self._scratch = tempfile.TemporaryDirectory(prefix="fluxtrain-wizard-")
        self._steps: Mapping[StepName, Callable[[], None]] = {
            "start": lambda: self._source(questions.START),
            "model": lambda: self._source(questions.MODEL),
            "data": self._data,
            "method": self._method,
            "training": self._training,
            "hardware": self._hardware,
            "strategy": self._strategy,
            "preview": self._preview,
            "launch": self._launch,
        }

    def run(self) -> Outcome | None:
        """Ask everything; None when the user leaves, with the answers kept as a draft."""
        with self._scratch:
            return self._walk()

    def _walk(self) -> Outcome | None:
        self._say(GREETING)
        self._offer_draft()
        self._know(runs=tuple(known_runs(self.view.root)))
        while True:
            step = self.view.answers.step
            try:
                self._steps[step]()
                outcome = self._outcome()
                if outcome is not None:
                    return outcome
                self._go(neighbour(self.view.answers, 1) or step)
            except GoBack:
                self._go(neighbour(self.view.answers, -1) or step)
            except (Leave, EOFError, KeyboardInterrupt):
                self._say("left; the answers are kept")
                return None

    def _outcome(self) -> Outcome | None:
        answers = self.view.answers
        if answers.step == "start" and answers.start == "attach":
            forget_draft(self._draft)
            return Attach(run_dir=Path(answers.attach_run))
        if answers.step != "launch":
            return None
        try:
            launch = prepare(answers, self.view.root, was_shown=True)
        except FluxTrainError as error:
            self._say(f"error: {error}")
            raise GoBack from None
        forget_draft(self._draft)
        return launch

    # --- the steps ----------------------------------------------------------------------------

    def _source(self, question: SourceQuestion) -> None:
        """Ask until the answer can be used."""
        while True:
            self._say(question.text)
            chosen = self._choose(question.options, getattr(self.view.answers, question.source))
            self._answer(**{question.source: chosen})
            field = question.fields.get(chosen)
            if field is not None:
                self._fill(field)
            if question.number is not None:
                self._number(question.number.name, question.number.title, at_least=2)
            check = checked(question.step, self.view.answers)
            self._tell(linear_lines.check_lines(check))
            if check.error is None:
                self._loaded(check)
                return

    def _loaded(self, check: Check) -> None:
        """Take all answers from a configuration file; its plan comes next."""
        if check.loaded is not None:
            self._know(answers=dataclasses.replace(check.loaded, step="hardware"))

    def _data(self) -> None:
        self._source(questions.DATA)
        self._say("the engine reads the first documents")
        found = self._engine_says(InspectionAnswer, *self._arguments())
        self._know(inspection=found)
        if found.value is not None:
            self._tell(linear_lines.inspection_lines(found.value))
        else:
            self._say(f"error: {found.refusal}")
            raise GoBack

    def _method(self) -> None:
        self._plan()
        self._know(methods={method: self._planned_with(method) for method in METHODS})
        self._tell(linear_lines.methods_lines(self.view))
        self._say("Choose a method")
        method = self._choose(questions.method_options(), self.view.answers.method)
        changed = method != self.view.answers.method
        self._answer(method=method, **({"dial_settings": {}} if changed else {}))
        for question in questions.adapter_questions(self.view.answers.method):
            self._adapter(question)
        self._plan()
        self._tell(linear_lines.fit_lines(self.view))

    def _planned_with(self, method: Method) -> Asked[PlanAnswer]:
        """Plan with another method, for comparison."""
        answers = self.view.answers
        if method == answers.method:
            return self.view.plan
        self._say(f"the engine plans the run with {questions.METHOD_TITLES[method]}")
        return self._engine_says(PlanAnswer, *self._arguments(with_method(answers, method)))

    def _adapter(self, question: AdapterQuestion) -> None:
        """Ask a question about adapters, with the reason of its default."""
        field = question.field
        self._say(f"{question.title}: {question.default} is {question.reason}")
        if question.options:
            options = [Option(name, name, "") for name in question.options]
            self._answer(**{field: self._choose(options, getattr(self.view.answers, field))})
        elif field == "targets":
            present = questions.adapter_answer(self.view.answers, question)
            said = self._read(f"{question.name}, auto for all linear layers [{present}]: ")
            if said:
                self._answer(targets="" if said == "auto" else said)
        else:
            self._number(field, question.name)

    def _training(self) -> None:
        """Print every setting with its reason; change the ones whose numbers are typed."""
        while True:
            self._plan()
            self._say("Training settings")
            self._tell(linear_lines.training_lines(self.view))
            last = len(TRAINING_QUESTIONS)
            text = self._read(f"1 to {last} changes one, Enter goes on: ")
            if not text:
                return
            if text.isdecimal() and 1 <= int(text) <= last:
                self._setting(TRAINING_QUESTIONS[int(text) - 1])
            else:
                self._say(f"error: {text!r} is no number from 1 to {last}")

    def _setting(self, question: TrainingQuestion) -> None:
        """Ask for one setting of the training."""
        value, _ = value_and_reason(self.view, question)
        kind = "folder" if question.kind == "folder" else "text"
        with completing(kind):
            text = self._read(f"{question.name}, auto for {question.default} [{value}]: ")
        if not text:
            return
        try:
            read = read_answer(question, text)
            problem = run_folder_problem(text) if kind == "folder" and read else ""
        except (ValueError, OSError) as error:
            problem = str(error)
        if problem:
            self._say(f"error: {problem}")
            return
        self._answer(**changes_of(question, read))

    def _hardware(self) -> None:
        fresh: list[str] = []
        while True:
            if self.view.probe.value is None or fresh:
                self._say("measuring this machine: about 20 seconds the first time")
                self._know(probe=self._engine_says(ProbeAnswer, *fresh, "--progress"))
            probe = self.view.probe
            self._tell(
                [f"error: {probe.refusal}"]
                if probe.value is None
                else linear_lines.machine_rows(probe.value)
            )
            if self._read("Enter to go on, r to measure again: ") != "r":
                return
            fresh, self._planned_for = ["--fresh"], None

    def _strategy(self) -> None:
        self._plan()
        plan = self.view.plan.value
        if plan is None:
            self._say(f"error: {self.view.plan.refusal}")
            raise GoBack
        if not self.view.answers.dial_settings:
            self._know(cards=plan.plans)
        cards = self.view.cards
        self._tell([linear_lines.card_line(card, plan) for card in cards])
        if cards:
            self._say("Which strategy, from fast to fit?")
            names = [stop for stop in DIAL if stop == "auto" or stop in {c.name for c in cards}]
            dial = self._choose([Option(n, n, "") for n in names], self.view.answers.dial)
            self._answer(dial=dial, dial_settings=dial_settings(cards, dial))
        for name, title in (
            ("batch_rows", "rows of one batch"),
            ("chunk_rows", "rows computed at once"),
        ):
            self._number(name, title)
        self._say("What lives in host memory?")
        offload = self._choose([Option(n, n, "") for n in OFFLOADS], self.view.answers.offload)
        self._answer(offload=offload)
        self._plan()
        if self.view.plan.value is None or not self.view.plan.value.fits:
            self._tell(linear_lines.fit_lines(self.view))
            raise GoBack
        if self._read("Enter to go on, w for why: ") == "w":
            self._tell(linear_lines.choice_lines(self.view.plan.value))

    def _preview(self) -> None:
        self._plan()
        plan = self.view.plan.value
        if plan is None:
            self._say(f"error: {self.view.plan.refusal}")
            raise GoBack
        self._know(free_disk_bytes=free_bytes(place_of(self.view.answers, self.view.root)))
        self._tell(linear_lines.preview_lines(self.view, plan))
        while True:
            wish = self._read("Enter to go on, d for a dry run of three steps, y for the YAML: ")
            if wish == "y":
                self._tell([command_text(self.view.answers), *config_text(self.view).splitlines()])
            elif wish == "d":
                self._try()
            else:
                return

    def _try(self) -> None:
        self._say("training three steps; Ctrl-C ends them, nothing is kept")
        try:
            asked = self._engine_says(DryRunAnswer, *self._arguments())
        except KeyboardInterrupt:
            self._say("the dry run was ended")
            return
        self._know(trial=asked)
        found = asked.value
        self._tell(
            [f"error: {asked.refusal}"] if found is None else linear_lines.trial_lines(found)
        )

    def _launch(self) -> None:
        self._tell([*linear_lines.launch_lines(self.view), command_text(self.view.answers)])
        self._read("Enter starts it: ")

    # --- asking and telling -------------------------------------------------------------------

    def _fill(self, field: Field) -> None:
        """Ask for the further input of a choice."""
        present = getattr(self.view.answers, field.name)
        if field.kind != "list":
            hint = present or f"such as {field.hint}"
            with completing(field.kind):
                said = self._read(f"{field.title} [{hint}]: ")
            self._answer(**{field.name: said or present})
            return
        options = self._listed(field.name)
        if not options:
            self._say(field.hint)
            return
        self._answer(**{field.name: self._choose(options, present)})

    def _listed(self, name: str) -> list[Option]:
        runs = list(self.view.runs)
        if name == "model_recent":
            return [Option(path, Path(path).name, path) for path in recent_models(runs)]
        offered = runs_to_resume(runs) if name == "resume_run" else runs_to_watch(runs)
        return [run_option(run) for run in offered]

    def _number(self, name: str, title: str, at_least: int = 1) -> None:
        """Ask for a whole number, or `auto` to let the trainer choose."""
        present = getattr(self.view.answers, name)
        while True:
            default = "auto" if present is None else str(present)
            text = self._read(f"{title} [{default}]: ") or default
            if text == "auto":
                self._answer(**{name: None})
                return
            if text.isdecimal() and int(text) >= at_least:
                self._answer(**{name: int(text)})
                return
            self._say(f"error: {text!r} is no whole number from {at_least} up, and not auto")

    def _offer_draft(self) -> None:
        draft = load_draft(self._draft) if self._fresh else None
        if draft is None:
            return
        self._tell(["There are unfinished answers.", *linear_lines.draft_lines(draft)])
        if self._ask("Go on with them? y or n [y]: ").strip() in ("", "y"):
            late = draft.step in ("preview", "launch") and draft.start != "resume"
            step: StepName = "strategy" if late else draft.step
            self._know(answers=dataclasses.replace(draft, step=step))
        else:
            forget_draft(self._draft)

    # --- what is known ------------------------------------------------------------------------

    def _know(self, **changes: Any) -> None:
        self.view = dataclasses.replace(self.view, **changes)

    def _answer(self, **changes: Any) -> None:
        self._know(answers=dataclasses.replace(self.view.answers, **changes))
        save_draft(self.view.answers, self._draft)

    def _go(self, step: StepName) -> None:
        self._answer(step=step)

    def _plan(self) -> None:
        """Plan the present answers, once."""
        wanted = dataclasses.replace(self.view.answers, step="strategy")
        if wanted == self._planned_for:
            return
        self._say("the engine plans the run")
        asked = self._engine_says(PlanAnswer, *self._arguments())
        self._know(plan=asked, trial=Asked())
        self._planned_for = wanted

    def _arguments(self, answers: Answers | None = None) -> list[str]:
        """Configuration and settings, for the engine's command."""
        answers = answers or self.view.answers
        config = Path(self._scratch.name) / "config.yaml"
        config.write_text(yaml_text(answers), encoding="utf-8")
        return engine_arguments(answers, config)

    def _engine_says(self, answer: type[T], *arguments: str) -> Asked[T]:
        """Ask the engine and wait."""
        asking = ask_engine(
            answer, *arguments, program=self._engine, environment={"TMPDIR": self._scratch.name}
        )
        try:
            return Asked(value=asyncio.run(asking))
        except EngineRefused as error:
            return Asked(refusal=str(error), exit_code=error.exit_code)
