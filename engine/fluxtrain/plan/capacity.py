"""Which cards there are, and which of them compute. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluxtrain.errors import BadInput
from fluxtrain.plan.request import ParallelRequest
from fluxtrain.units import MIB

ALIKE = 1.05  # times as long: cards that differ by less are equally fast
MEMORY_STEP_BYTES = 256 * MIB  # a difference below it does not change which card comes first


@dataclass(frozen=True, kw_only=True)
class CardCapacity:
    """One card and its memory now."""

    index: int  # torch's: of the cards that CUDA_VISIBLE_DEVICES leaves
    name: str = ""
    free_bytes: int | None = None  # None: no GPU, its memory is a buffer on the host
    gpu: int | None = None  # nvidia-smi's number of it, where that is known
    unusable: str = ""  # why it cannot compute this model, in words with the cure

    @property
    def text(self) -> str:
        """Name it for people."""
        return f"card {self.index} ({self.name})" if self.name else f"card {self.index}"


@dataclass(frozen=True, kw_only=True)
class DiskHome:
    """The folder of files that frozen weights, or optimizer states, may live in where the host
    cannot hold them."""

    folder: str
    read_bytes_per_s: float | None = None  # None: not measured
    write_bytes_per_s: float | None = None
    total_bytes: int | None = None  # of its file system
    unusable: str = ""  # why it cannot be used, in words with the cure
    on_network: bool = False


@dataclass(frozen=True, kw_only=True)
class CardsCapacity:
    """All cards of a machine, and the memory of their host."""

    cards: tuple[CardCapacity, ...]
    host_available_bytes: int | None  # None: unknown, taken as enough
    # torch's number of the card where the code around the model computes, which gets what the model
    # returns there; None: that code goes where the model is
    current: int | None = None

    @property
    def has_gpu(self) -> bool:
        """Return whether cards have memory of their own."""
        return all(card.free_bytes is not None for card in self.cards)


def usable_cards(
    capacity: CardsCapacity, parallel: ParallelRequest, block_s: Sequence[float | None]
) -> tuple[int, ...]:
    """Return the positions in `capacity` of the cards that may compute, first the one for
    embedding and head.

    That is the card on which the model's other code runs, if it is known. The fastest come next;
    of equally fast ones the one with the most memory. A list of cards, and cards with given
    numbers of blocks, keep their order. Raises BadInput where a card does not exist or cannot be
    used, and where no card can.
    """
    if isinstance(parallel.cards, tuple):
        return tuple(_position(capacity, index) for index in parallel.cards)
    usable = [at for at, card in enumerate(capacity.cards) if not card.unusable]
    if not usable:
        raise BadInput("; ".join(f"{card.text}: {card.unusable}" for card in capacity.cards))
    asked = parallel.cards
    if isinstance(parallel.dealing, tuple) and asked == "auto":
        asked = len(parallel.dealing)
    if asked != "auto" and asked > len(usable):
        raise BadInput(_too_many(capacity, asked, len(usable), parallel))
    if isinstance(parallel.dealing, tuple):
        return tuple(usable[: None if asked == "auto" else asked])
    ordered = _fastest_first(capacity, usable, block_s)
    ordered = sorted(ordered, key=lambda at: capacity.cards[at].index != capacity.current)
    return tuple(ordered[: None if asked == "auto" else asked])


def _too_many(capacity: CardsCapacity, asked: int, usable: int, parallel: ParallelRequest) -> str:
    there = ", ".join(card.text for card in capacity.cards)
    which = f"parallel.cards = {asked}"
    if parallel.cards == "auto":
        which = f"parallel.dealing has numbers for {asked} cards"
    left_out = "".join(f"; {c.text}: {c.unusable}" for c in capacity.cards if c.unusable)
    return (
        f"{which}, and {usable} can be used ({there}{left_out}): use at most {usable}, or check "
        "CUDA_VISIBLE_DEVICES"
    )


def _position(capacity: CardsCapacity, index: int) -> int:
    at = next((at for at, card in enumerate(capacity.cards) if card.index == index), None)
    if at is None:
        there = ", ".join(card.text for card in capacity.cards) or "none"
        raise BadInput(
            f"parallel.cards names card {index}, and there are {there}: use their numbers, which "
            "are torch's, or check CUDA_VISIBLE_DEVICES"
        )
    card = capacity.cards[at]
    if card.unusable:
        raise BadInput(f"parallel.cards names {card.text}: {card.unusable}")
    return at


def _fastest_first(
    capacity: CardsCapacity, usable: Sequence[int], block_s: Sequence[float | None]
) -> list[int]:
    known = [(block_s[at] or 0.0, at) for at in usable]
    classes: dict[int, int] = {}
    number, first_s = 0, None
    for seconds, at in sorted(known):
        if first_s is not None and seconds > ALIKE * first_s:
            number += 1
            first_s = seconds
        first_s = seconds if first_s is None else first_s
        classes[at] = number

    def key(at: int) -> tuple[int, int, int]:
        free = capacity.cards[at].free_bytes or 0
        return classes[at], -(free // MEMORY_STEP_BYTES), capacity.cards[at].index

    return sorted(usable, key=key)
