"""What `fluxtrain doctor` found, for people and for programs. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fluxtrain.doctor.card_findings import card_findings
from fluxtrain.doctor.finding import Finding, ranked
from fluxtrain.doctor.host_findings import host_findings
from fluxtrain.hardware.probe import Probe


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """One thing that the engine must get right on this machine."""

    name: str
    passed: bool | None  # None: there is nothing here to test it on, or nowhere
    detail: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The probe, what follows from it, the self-tests and the versions."""

    probe: Probe
    findings: tuple[Finding, ...]
    self_tests: tuple[SelfTest, ...]
    versions: dict[str, str]

    @property
    def failed(self) -> tuple[SelfTest, ...]:
        """The self-tests that ran and did not pass."""
        return tuple(test for test in self.self_tests if test.passed is False)

    def to_json(self) -> str:
        """All of it; `Report` decodes it again."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def findings(probe: Probe) -> tuple[Finding, ...]:
    """What is slow for a machine of this class and what to change, the most useful first."""
    return ranked([*card_findings(probe), *host_findings(probe)])
