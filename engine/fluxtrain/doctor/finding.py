"""A finding: what holds this machine back, in numbers, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["broken", "slow", "small", "note"]
# Something does not work; it works slowly; less fits than could; worth knowing.
LEVELS: tuple[Level, ...] = ("broken", "slow", "small", "note")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`factor` is how many times more the machine would give without it; 1 where nobody can say."""

    name: str
    level: Level
    numbers: str
    cure: str
    factor: float = 1.0


def ranked(findings: list[Finding]) -> tuple[Finding, ...]:
    """What does not work first, then by what there is to gain."""
    return tuple(sorted(findings, key=lambda one: (LEVELS.index(one.level), -one.factor)))
