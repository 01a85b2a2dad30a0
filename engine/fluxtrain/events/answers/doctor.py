"""The answer of `fluxtrain doctor --json`: the probe, what to change, the self-tests, versions."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from fluxtrain.events.answers.answer import Answer
from fluxtrain.events.answers.probe import ProbeAnswer

Level = Literal["broken", "slow", "small", "note"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Names a thing that holds this machine back, in numbers, and what to change.

    `level`: something does not work; it works slowly; less fits than could; worth knowing.
    `factor` is how many times more the machine would give without it; 1 where nobody can say.
    """

    name: str
    level: Level
    numbers: str
    cure: str
    factor: float = 1.0


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the engine must get right on this machine."""

    name: str
    passed: bool | None  # None: there is nothing here to test it on, or nowhere
    detail: str


class DoctorAnswer(Answer, frozen=True, kw_only=True):
    """The probe, what follows from it, the self-tests and the versions."""

    COMMAND: ClassVar[str] = "doctor"

    probe: ProbeAnswer
    findings: tuple[Finding, ...]  # the most useful first
    self_tests: tuple[SelfTest, ...]
    versions: dict[str, str]

    @property
    def failed(self) -> tuple[SelfTest, ...]:
        """The self-tests that ran and did not pass."""
        return tuple(test for test in self.self_tests if test.passed is False)
