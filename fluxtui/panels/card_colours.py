"""The number and the colour of each card; the number always stands beside the colour."""

from __future__ import annotations

ROLES = (
    "info", "gradients", "optimizer", "good", "workspace", "packed", "warn", "unpacked",
)  # fmt: skip
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
UNKNOWN_CARD = -1  # of a journal that somebody else wrote


def role_of(card: int) -> str:
    """Return the role that a card is drawn with."""
    return ROLES[card % len(ROLES)] if card >= 0 else "dim"


def card_of(letter: str) -> int:
    """Return the card that a letter of `ResidencySampled.cards` names."""
    return LETTERS.find(letter) if letter else UNKNOWN_CARD


def letter_of(card: int) -> str:
    """Return the letter of a card."""
    return LETTERS[min(card, len(LETTERS) - 1)] if card >= 0 else "?"
