"""Asks the engine while the user reads: about the machine, the data, the plan, a dry run.

The machine is measured first and alone, because a plan that is computed meanwhile would take the
processor away from the measurement, and needs its rates.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from textual.screen import Screen

from fluxtrain.events.answers.answers import DryRunAnswer, InspectionAnswer, PairsInspectionAnswer
from fluxtrain.events.answers.machine import ProbeAnswer
from fluxtrain.events.answers.plan import PlanAnswer, PlanOption
from fluxtui.answers.answers import Answers, with_method
from fluxtui.answers.configuring import chosen_settings, configuration, yaml_text
from fluxtui.answers.launching import engine_arguments
from fluxtui.answers.rows import METHODS
from fluxtui.wizard.engine.asked import Asked, Question

Inspected = InspectionAnswer | PairsInspectionAnswer


class Background:
    """Holds the wizard's questions to the engine, and the folder of their configuration files.

    Where methods are compared, the chosen one is planned first, then the others, one at a time.
    Known plans are kept, so a method chosen next has its plan at once.
    """

    def __init__(
        self, screen: Screen[Any], on_change: Callable[[], None], program: tuple[str, ...]
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fluxtrain-wizard-")
        self._files = 0
        self._on_change = on_change
        self._wanted: Answers | None = None
        self.cards: tuple[PlanOption, ...] = ()
        self._cards_for: object = None  # the answers that they were planned for
        self._cards_of: object = None  # model and data alone
        self._tried: object = None
        self._comparing = False
        self._kept: dict[object, Asked[PlanAnswer]] = {}  # plans that are there
        self.probe = Question(screen, ProbeAnswer, self._probed, program)
        self.inspection: Question[Inspected] = Question(
            screen, InspectionAnswer, on_change, program
        )
        self.plan = Question(screen, PlanAnswer, self._planned, program)
        self.beside = Question(screen, PlanAnswer, self._compared, program, group="plan beside")
        self.trial = Question(screen, DryRunAnswer, on_change, program)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()

    @property
    def busy(self) -> bool:
        """Return whether a question is being asked."""
        asked = (self.probe, self.inspection, self.plan, self.beside, self.trial)
        return any(question.state.pending for question in asked)

    def cards_are_of(self, answers: Answers) -> bool:
        """Return whether the ranked plans were made for these answers, at any stop of the dial."""
        return self._cards_for == _key(without_dial(answers))

    def measure(self, fresh: bool = False) -> None:
        """Measure the machine; `fresh` ignores earlier measurements."""
        if fresh:
            self.probe.forget()
            self._forget_plans()
        self.probe.ask("probe", [*(["--fresh"] if fresh else []), "--progress"])

    def look_at(self, answers: Answers, compare: bool = False) -> None:
        """Ask for data and plan of these answers, unless they are known or being asked for.

        `compare` asks for the plans of the other methods too.
        """
        self._wanted, self._comparing = answers, compare
        if self.probe.state.pending:
            return
        data_alone = _about_data(answers)
        self.inspection.answer = PairsInspectionAnswer if answers.of_images else InspectionAnswer
        self.inspection.ask(_key(data_alone), self._arguments(data_alone))
        key = _key(answers)
        if self._cards_of != _key(_about_model(answers)):
            self.cards = ()
        if not self.trial_is_of(answers):
            self.trial.forget()
        if self.beside.state.pending and (key != self.plan.key or not compare):
            self.beside.forget()  # the chosen method comes first, and alone
        if key in self._kept:
            self.plan.take(key, self._kept[key])
        else:
            self.plan.ask(key, [*self._arguments(answers), "--progress"])
        self._compare()

    def plan_again(self) -> None:
        """Plan the same answers once more: the machine may have changed."""
        self._forget_plans()
        if self._wanted is not None:
            self.look_at(self._wanted, self._comparing)

    def plans_of_methods(self, answers: Answers) -> Mapping[str, Asked[PlanAnswer]]:
        """Return the known plan of each method, with these answers otherwise."""
        found: dict[str, Asked[PlanAnswer]] = {}
        for method in METHODS:
            key = _key(with_method(answers, method))
            asked = next((q.state for q in (self.plan, self.beside) if q.key == key), Asked())
            found[method] = self._kept.get(key, asked)
        return {**found, answers.method: self.plan.state}

    def _compare(self) -> None:
        """Ask for the next plan of another method, if one is missing and nothing is being asked."""
        busy = self.probe.state.pending or self.plan.state.pending or self.beside.state.pending
        if self._wanted is None or not self._comparing or busy:
            return
        for method in METHODS:
            other = with_method(self._wanted, method)
            if method != self._wanted.method and (key := _key(other)) not in self._kept:
                self.beside.ask(key, [*self._arguments(other), "--progress"])
                return

    def _compared(self) -> None:
        self._keep(self.beside)
        self._on_change()
        self._compare()

    def _keep(self, question: Question[PlanAnswer]) -> None:
        state = question.state
        if question.key is not None and (state.value is not None or state.refusal is not None):
            self._kept[question.key] = state

    def _forget_plans(self) -> None:
        self._comparing = False
        self.plan.forget()
        self.beside.forget()
        self._kept.clear()

    def try_out(self, answers: Answers) -> None:
        """Train three steps of these answers in a folder that is removed with this object."""
        self.trial.forget()
        self._tried = _key(answers)
        self.trial.ask(self._tried, self._arguments(answers), {"TMPDIR": self._folder.name})

    def trial_is_of(self, answers: Answers) -> bool:
        """Tell whether the trial was of these answers."""
        return self.trial.state.asked_s is None or self._tried == _key(answers)

    def _arguments(self, answers: Answers) -> list[str]:
        """Return the engine's arguments; each question has its own file, kept from later ones."""
        self._files += 1
        config = Path(self._folder.name) / f"{self._files}" / "config.yaml"
        config.parent.mkdir()
        config.write_text(yaml_text(answers), encoding="utf-8")
        return engine_arguments(answers, config)

    def _probed(self) -> None:
        self._on_change()
        if self._wanted is not None and not self.probe.state.pending:
            self.look_at(self._wanted, self._comparing)

    def _planned(self) -> None:
        found = self.plan.state.value
        if found is not None and self._wanted is not None and not self._wanted.dial_settings:
            self.cards = found.plans
            self._cards_for, self._cards_of = _key(self._wanted), _key(_about_model(self._wanted))
        self._keep(self.plan)
        self._on_change()
        self._compare()


def without_dial(answers: Answers) -> Answers:
    """Set the dial to auto, for which the ranked plans are made."""
    return dataclasses.replace(answers, dial="auto", dial_settings={})


_ABOUT_STRATEGY = ("placement.offload", "placement.chunk_rows", "train.batch_rows", "train.steps")


def _about_model(answers: Answers) -> Answers:
    """Return the part of the answers that the ranked plans depend on: model, data and method."""
    kept = {key: value for key, value in answers.settings.items() if key not in _ABOUT_STRATEGY}
    return dataclasses.replace(without_dial(answers), settings=kept)


def _about_data(answers: Answers) -> Answers:
    """Return the part of the answers that the inspection of the data depends on."""
    kept = {key: value for key, value in answers.settings.items() if key.startswith("data.")}
    return dataclasses.replace(without_dial(answers), settings=kept)


def _key(answers: Answers) -> object:
    """Return what two answers share where the engine is asked the same; compared at each drawing,
    for which YAML would take too long."""
    settings = configuration(answers), chosen_settings(answers)
    return (repr(settings), answers.is_demo, answers.overrides)
