"""Numbers with the noun that they count."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Write a count with its noun: `1 row`, `2 rows`, `1,024 rows`; for nouns with a plural s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
