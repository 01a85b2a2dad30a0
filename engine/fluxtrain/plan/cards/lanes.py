"""Copies while a step is simulated: two lanes of each card's bus, and links between cards."""

from __future__ import annotations

from typing import Literal

from fluxtrain.plan.cards.rates import CardsRates

Lane = Literal["up", "down"]


class Lanes:
    """When each lane is free, and for how long it was busy."""

    def __init__(self, cards: int, rates: CardsRates) -> None:
        self._rates = rates
        self._free_s: dict[Lane, list[float]] = {"up": [0.0] * cards, "down": [0.0] * cards}
        self._links_s: dict[tuple[int, int], float] = {}
        self.busy_s: dict[Lane, list[float]] = {"up": [0.0] * cards, "down": [0.0] * cards}
        self.through_host_bytes = 0.0  # written there and read there

    def copy(self, lane: Lane, card: int, ready_s: float, seconds: float) -> float:
        """Copy after all that was queued before; return when it ends."""
        self._free_s[lane][card] = max(self._free_s[lane][card], ready_s) + seconds
        self.busy_s[lane][card] += seconds
        return self._free_s[lane][card]

    def hop(self, source: int, target: int, ready_s: float, size_bytes: int) -> float:
        """Bring a chunk from one card to another; return when it is there."""
        if source == target or not size_bytes:
            return ready_s
        rate = self._rates.peer_bytes_per_s(source, target)
        cards = self._rates.cards
        if rate is None:
            self.through_host_bytes += 2 * size_bytes
            down_s = self._beside("down", source, ready_s, size_bytes / cards[source].down_both)
            return self._beside("up", target, down_s, size_bytes / cards[target].up_both)
        if self._rates.is_own_link(source, target):
            free_s = self._links_s.get((source, target), 0.0)
            self._links_s[source, target] = max(free_s, ready_s) + size_bytes / rate
            return self._links_s[source, target]
        down_s = self._beside("down", source, ready_s, size_bytes / rate)
        return max(down_s, self._beside("up", target, ready_s, size_bytes / rate))

    def _beside(self, lane: Lane, card: int, ready_s: float, seconds: float) -> float:
        """Copy on a stream of its own, which shares the lane with what is queued there."""
        free_s = self._free_s[lane][card]
        shared = 2 if ready_s < free_s else 1
        self._free_s[lane][card] = max(free_s, ready_s) + seconds
        self.busy_s[lane][card] += seconds
        return ready_s + shared * seconds
