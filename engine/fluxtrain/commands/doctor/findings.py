"""List what a probe found on this machine, the most useful first. No torch."""

from __future__ import annotations

from typing import get_args

from fluxtrain.commands.doctor.card_findings import card_findings
from fluxtrain.commands.doctor.host_findings import host_findings
from fluxtrain.commands.doctor.several_cards import several_cards_findings
from fluxtrain.events.answers.doctor import Finding, Level
from fluxtrain.events.answers.probe import ProbeAnswer

LEVELS: tuple[Level, ...] = get_args(Level)


def findings(probe: ProbeAnswer) -> tuple[Finding, ...]:
    """Return what is slow for a machine of this class and what to change, the most useful first."""
    return ranked([*card_findings(probe), *several_cards_findings(probe), *host_findings(probe)])


def ranked(found: list[Finding]) -> tuple[Finding, ...]:
    """Sort by level, what does not work first, then by how much there is to gain."""
    return tuple(sorted(found, key=lambda one: (LEVELS.index(one.level), -one.factor)))
