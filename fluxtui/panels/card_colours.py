"""The colour of each card; its number always stands beside it."""

from __future__ import annotations

ROLES = (
    "info", "gradients", "optimizer", "good", "workspace", "packed", "warn", "unpacked",
)  # fmt: skip


def role_of(card: int) -> str:
    """Return the role that a card is drawn with."""
    return ROLES[card % len(ROLES)]
