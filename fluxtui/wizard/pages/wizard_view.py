"""Everything that the wizard's pages draw, as one value."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from fluxtrain.events.answers.answers import DryRunAnswer, InspectionAnswer, PairsInspectionAnswer
from fluxtrain.events.answers.machine import ProbeAnswer
from fluxtrain.events.answers.plan import PlanAnswer, PlanOption
from fluxtrain.events.run_folder.run_dir import RunSummary
from fluxtui.actions.key_map import joined
from fluxtui.actions.table import find
from fluxtui.answers.answers import Answers
from fluxtui.panels.machine import machine_line
from fluxtui.state.machine_sample import MachineSample
from fluxtui.state.view import View as RunView
from fluxtui.widgets.spans import Line
from fluxtui.wizard.checks.answer_checks import Check
from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.engine.machine import machine_lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class WizardView:
    """The answers, and what the engine said about them.

    Attributes:
        checks: by step; None while the answer is being looked at.
        methods: what is known of the plan of each method, the chosen one's among them.
        cards: the ranked plans of the newest plan in which none of them was chosen.
        goes_on: Enter was pressed before the plan was there.
        root: the folder of the runs.
    """

    answers: Answers = dataclasses.field(default_factory=Answers)
    checks: Mapping[str, Check | None] = dataclasses.field(default_factory=dict)
    probe: Asked[ProbeAnswer] = dataclasses.field(default_factory=Asked)
    inspection: Asked[InspectionAnswer | PairsInspectionAnswer] = dataclasses.field(
        default_factory=Asked
    )
    plan: Asked[PlanAnswer] = dataclasses.field(default_factory=Asked)
    methods: Mapping[str, Asked[PlanAnswer]] = dataclasses.field(default_factory=dict)
    trial: Asked[DryRunAnswer] = dataclasses.field(default_factory=Asked)
    cards: tuple[PlanOption, ...] = ()
    cards_are_older: bool = False  # than the numbers that the user has set since
    runs: tuple[RunSummary, ...] = ()
    goes_on: bool = False
    launch_error: str | None = None
    root: Path = Path("runs")
    free_disk_bytes: int | None = None
    wide: bool = False
    pictures: bool = False  # may be drawn: there are colours for them
    short: bool = False  # as many lines as a plain terminal has
    tall: bool = False  # room for explanations
    machine: MachineSample | None = None  # as it is now
    key_texts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the user's, by action

    def key(self, *actions: str) -> str:
        """Name the keys of actions as a person reads them, the user's own where set."""
        keys = [self.key_texts.get(action) or find(action).key_text for action in actions]
        return joined(keys)

    def plan_of(self, method: str) -> Asked[PlanAnswer]:
        """Return the known plan with another method."""
        return self.plan if method == self.answers.method else self.methods.get(method, Asked())

    def machine_now(self, width: int) -> Line:
        """Describe the load of this machine in one line; "" while it is not known."""
        if self.machine is None:
            return ()
        return machine_line(
            RunView(machine_sample=self.machine, monotonic_s=time.monotonic()), width
        )

    @property
    def machine_lines(self) -> tuple[str, ...]:
        """Describe this machine in a few words, or say that it is being measured."""
        if self.probe.value is not None:
            return tuple(machine_lines(self.probe.value))
        if self.probe.refusal is not None:
            return ("not measured", self.probe.refusal)
        return (self.probe.said or "measuring ...",)
