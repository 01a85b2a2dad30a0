"""The wizard line by line: the same questions, checks and answers, without a screen.

For screen readers (`ACCESSIBLE=1`) and terminals that cannot draw. Nothing is redrawn; each line is
said once. `b` goes back, `q` leaves, Enter takes what stands in brackets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fluxtrain.errors import BadInput, FluxTrainError
from fluxtrain.events.answers.answers import (
    Answer,
    DryRunAnswer,
    InspectionAnswer,
    PairsInspectionAnswer,
)
from fluxtrain.events.answers.asking import EngineRefused, ask_engine
from fluxtrain.events.answers.machine import ProbeAnswer
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.events.printable import printable_lines
from fluxtrain.events.run_folder.run_dir import runs_root
from fluxtrain.files.atomic import free_bytes
from fluxtui.answers import questions
from fluxtui.answers.answers import DIAL, Answers, neighbour, with_changes, with_method
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
from fluxtui.answers.questions import ListOption, SourceField, SourceQuestion
from fluxtui.answers.rows import METHODS, SettingRow, StepName, default_text, read, rows_of
from fluxtui.wizard import linear_lines
from fluxtui.wizard.checks.answer_checks import checked, reading_options, reading_settings
from fluxtui.wizard.checks.known_runs import (
    known_runs,
    recent_models,
    run_option,
    runs_to_resume,
    runs_to_watch,
)
from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.engine.plan_preview import dial_settings
from fluxtui.wizard.pages.launch import config_text
from fluxtui.wizard.pages.training import value_and_reason
from fluxtui.wizard.pages.wizard_view import WizardView
from fluxtui.wizard.steps.paths import completions

Ask = Callable[[str], str]
Say = Callable[[str], None]


class GoBack(Exception):
    """Raised when the user wants the step before."""


class Leave(Exception):
    """Raised when the user wants no run."""


@contextmanager
def completing(kind: str) -> Iterator[None]:
    """Let Tab complete the path of a folder or a file, where this Python can."""
    try:
        import readline
    except ImportError:
        kind = "text"
    if kind not in ("folder", "file"):
        yield
        return

    def offer(text: str, state: int) -> str | None:
        found = completions(text, kind == "folder") if text.strip() else ()
        return found[state] if state < len(found) else None

    before, ends = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer(offer)
    readline.set_completer_delims("")
    readline.parse_and_bind("set enable-bracketed-paste off")  # it would write codes
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before)
        readline.set_completer_delims(ends)


class Dialogue:
    """Asks with `ask` (like `input`), prints with `say` (like `print`)."""

    def __init__(self, ask: Ask, say: Say) -> None:
        self._ask: Ask = lambda prompt: ask(printable_lines(prompt))
        self._say: Say = lambda text: say(printable_lines(text))

    def _read(self, prompt: str) -> str:
        """Read one answer; `b` goes back and `q` leaves."""
        text = self._ask(prompt).strip()
        if text == "b":
            raise GoBack
        if text == "q":
            raise Leave
        return text

    def _choose(self, options: Sequence[ListOption], present: str) -> str:
        """Let the user choose one of a numbered list."""
        ids = [option.id for option in options]
        default = ids.index(present) + 1 if present in ids else 1
        for number, option in enumerate(options, start=1):
            self._say(f"{number} {option.title}{f': {option.text}' if option.text else ''}")
        while True:
            text = self._read(f"1 to {len(ids)} [{default}]: ") or str(default)
            if text.isdecimal() and 1 <= int(text) <= len(ids):
                return ids[int(text) - 1]
            self._say(f"error: {text!r} is no number from 1 to {len(ids)}")

    def _tell(self, told: Sequence[str]) -> None:
        for line in told:
            self._say(line)


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
        self._engine = engine
        self._draft = draft or draft_path()
        self._planned_for: object = None
        self._scratch = tempfile.TemporaryDirectory(prefix="fluxtrain-wizard-")
        self._steps: Mapping[StepName, Callable[[], None]] = {
            "start": lambda: self._source(questions.START),
            "model": lambda: self._source(questions.MODEL),
            "data": self._data,
            "method": self._method,
            "training": lambda: self._settings("training", "Training settings"),
            "strategy": self._strategy,
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
                self._answer(step=neighbour(self.view.answers, 1) or step)
            except GoBack:
                self._answer(step=neighbour(self.view.answers, -1) or step)
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
            if chosen in question.fields:
                self._fill(question.fields[chosen])
            check = checked(question.step, self.view.answers)
            if check.readings:
                self._say("How are the columns read?")
                reading = self._choose(reading_options(check), "0")
                self._answer(**reading_settings(check.readings[int(reading)]))
                check = checked(question.step, self.view.answers)
            self._tell(linear_lines.check_lines(check))
            if check.error is None:
                break
            if not check.open:
                self._settings(question.step, "How it is read")
        if check.loaded is not None:  # all answers of a file; its plan comes next
            self._know(answers=dataclasses.replace(check.loaded, step="training"))

    def _data(self) -> None:
        of_images = self.view.answers.of_images
        self._source(questions.data_question(of_images))
        self._say(f"the engine reads the {'pairs' if of_images else 'first documents'}")
        answer: Any = PairsInspectionAnswer if of_images else InspectionAnswer
        found: Asked[Any] = self._engine_says(answer, *self._arguments())
        self._know(inspection=found)
        if found.value is None:
            self._say(f"error: {found.refusal}")
            raise GoBack
        self._tell(linear_lines.inspection_lines(found.value))

    def _method(self) -> None:
        self._plan()
        self._know(methods={method: self._planned_with(method) for method in METHODS})
        self._tell(linear_lines.methods_lines(self.view))
        self._say("Choose a method")
        chosen = self._choose(questions.method_options(), self.view.answers.method)
        self._know(answers=with_method(self.view.answers, chosen))
        self._settings("method", "Settings of the adapters")
        self._plan()
        self._tell(linear_lines.fit_lines(self.view))

    def _planned_with(self, method: str) -> Asked[PlanAnswer]:
        """Plan with another method, for comparison."""
        answers = self.view.answers
        if method == answers.method:
            return self.view.plan
        self._say(f"the engine plans the run with {questions.METHOD_TITLES[method]}")
        return self._engine_says(PlanAnswer, *self._arguments(with_method(answers, method)))

    def _settings(self, page: StepName, title: str) -> None:
        """Print the settings of a page with their reasons; change those whose numbers are typed."""
        answers = self.view.answers
        rows = rows_of(page, answers.method, answers.of_images)
        while rows:
            if page != "data":
                self._plan()
            self._say(title)
            self._tell(linear_lines.setting_lines(self.view, rows))
            text = self._read(f"1 to {len(rows)} changes one, Enter goes on: ")
            if not text:
                return
            if text.isdecimal() and 1 <= int(text) <= len(rows):
                self._setting(rows[int(text) - 1])
            else:
                self._say(f"error: {text!r} is no number from 1 to {len(rows)}")

    def _setting(self, row: SettingRow) -> None:
        """Ask for one setting."""
        value, _ = value_and_reason(self.view, row)
        with completing("folder" if row.is_folder else "text"):
            text = self._read(f"{row.name}, auto for {default_text(row)} [{value}]: ")
        if not text:
            return
        try:
            found = read(row, text)
            problem = run_folder_problem(str(found)) if row.is_folder and found else ""
        except (BadInput, OSError) as error:
            problem = str(error)
        if problem:
            self._say(f"error: {problem}")
        else:
            self._answer(**{row.key: found})

    def _strategy(self) -> None:
        self._machine()
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
            dial = self._choose([ListOption(n, n, "") for n in names], self.view.answers.dial)
            self._answer(dial=dial, dial_settings=dial_settings(cards, dial))
        self._settings("strategy", "Where the bytes live")
        self._plan()
        if self.view.plan.value is None or not self.view.plan.value.fits:
            self._tell(linear_lines.fit_lines(self.view))
            raise GoBack
        if self._read("Enter to go on, w for why: ") == "w":
            self._tell(linear_lines.choice_lines(self.view.plan.value))

    def _machine(self) -> None:
        fresh: list[str] = []
        while True:
            if self.view.probe.value is None or fresh:
                self._say("measuring this machine: about 20 seconds the first time")
                self._know(probe=self._engine_says(ProbeAnswer, *fresh, "--progress"))
            self._tell(linear_lines.machine_rows(self.view.probe))
            if self._read("Enter to go on, r to measure again: ") != "r":
                return
            fresh, self._planned_for = ["--fresh"], None

    def _launch(self) -> None:
        going_on = self.view.answers.start == "resume"
        if not going_on:
            self._plan()
            self._know(free_disk_bytes=free_bytes(place_of(self.view.answers, self.view.root)))
        self._tell([*linear_lines.launch_lines(self.view), command_text(self.view.answers)])
        more = "" if going_on else ", d for a dry run of three steps, y for the YAML"
        while wish := self._read(f"Enter starts it{more}: "):
            if wish == "y":
                self._tell(config_text(self.view).splitlines())
            elif wish == "d":
                self._try()

    def _try(self) -> None:
        self._say("training three steps; Ctrl-C ends them, nothing is kept")
        try:
            asked = self._engine_says(DryRunAnswer, *self._arguments())
        except KeyboardInterrupt:
            self._say("the dry run was ended")
            return
        self._know(trial=asked)
        self._tell(linear_lines.trial_lines(asked))

    # --- asking and telling -------------------------------------------------------------------

    def _fill(self, field: SourceField) -> None:
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

    def _listed(self, name: str) -> list[ListOption]:
        runs = list(self.view.runs)
        if name == "model_recent":
            return [ListOption(path, Path(path).name, path) for path in recent_models(runs)]
        offered = runs_to_resume(runs) if name == "resume_run" else runs_to_watch(runs)
        return [run_option(run) for run in offered]

    def _offer_draft(self) -> None:
        draft = load_draft(self._draft, self.view.answers)
        if draft is None:
            return
        self._tell(["There are unfinished answers.", *linear_lines.draft_lines(draft)])
        if self._ask("Go on with them? y or n [y]: ").strip() in ("", "y"):
            late = draft.step == "launch" and draft.start != "resume"
            step: StepName = "strategy" if late else draft.step
            self._know(answers=dataclasses.replace(draft, step=step))
        else:
            forget_draft(self._draft)

    # --- what is known ------------------------------------------------------------------------

    def _know(self, **changes: Any) -> None:
        self.view = dataclasses.replace(self.view, **changes)

    def _answer(self, **changes: Any) -> None:
        self._know(answers=with_changes(self.view.answers, changes))
        save_draft(self.view.answers, self._draft)

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
        """Return configuration and settings for the engine's command."""
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
