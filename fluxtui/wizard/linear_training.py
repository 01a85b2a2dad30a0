"""The settings of the training line by line: told with their reasons, changed by their numbers."""

from __future__ import annotations

from typing import Any

from fluxtui.answers.launching import run_folder_problem
from fluxtui.answers.training import (
    TRAINING_QUESTIONS,
    TrainingQuestion,
    changes_of,
    read_answer,
)
from fluxtui.wizard import linear_lines
from fluxtui.wizard.dialogue import Dialogue, completing
from fluxtui.wizard.pages.training import value_and_reason
from fluxtui.wizard.pages.wizard_view import WizardView


class TrainingDialogue(Dialogue):
    """Asks how to train. A subclass keeps the answers and asks for plans."""

    view: WizardView

    def _plan(self) -> None:
        raise NotImplementedError

    def _answer(self, **changes: Any) -> None:
        raise NotImplementedError

    def training(self) -> None:
        """Tell every setting with its reason, and change those that are named by their number."""
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
