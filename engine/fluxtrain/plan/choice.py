"""A decision and the reason for it: zero configuration must not mean opaque."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """What was chosen, and why, in words with numbers."""

    value: T
    because: str
