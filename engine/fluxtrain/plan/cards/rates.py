"""Measured rates of several cards: of each alone, of all at once, and between them. Pure values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fluxtrain.events.answers.machine import TOGETHER, card_rate_name, peer_name
from fluxtrain.plan.cost.calibration import Calibration, Line
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.cost.updates import BF16_UPDATE_BYTES

NOISE = 1.05  # times as fast: less between two measured rates of arithmetic is none
COPY_READS_AND_WRITES = 2  # bytes of host memory for each that is copied within it
BESIDE_THE_BUS = 1.5  # times the bus: a faster link between two cards is one of its own


@dataclass(frozen=True, kw_only=True)
class CardsRates:
    """What steps on several cards are timed with. The host's rates are those of the first card."""

    cards: tuple[Rates, ...]  # of each card while the others rest
    # Bytes a second of all cards at once, added up; None: as each alone
    up_together_bytes_per_s: float | None = None
    down_together_bytes_per_s: float | None = None
    # Between two cards, by (from, to), where a checked copy was right; others go through the host
    peers: Mapping[tuple[int, int], float] = field(default_factory=dict)
    host_bytes_per_s: float | None = None  # of host memory, whatever uses it; None: no bound

    def of(self, chosen: Sequence[int]) -> CardsRates:
        """Return the rates of some cards, in the order given, each as fast as it is beside the
        others where there are several."""
        several = len(chosen) > 1
        up = _share(self.up_together_bytes_per_s, [card.up for card in self.cards], several)
        down = _share(self.down_together_bytes_per_s, [card.down for card in self.cards], several)
        at = {card: number for number, card in enumerate(chosen)}
        return CardsRates(
            cards=tuple(_slower(self.cards[card], up, down) for card in chosen),
            peers={(at[a], at[b]): r for (a, b), r in self.peers.items() if a in at and b in at},
            host_bytes_per_s=self.host_bytes_per_s,
        )

    def in_order(self, positions: Sequence[int]) -> CardsRates:
        """Return the rates of the same cards in another order, each as fast as it is alone."""
        at = {card: number for number, card in enumerate(positions)}
        return replace(
            self,
            cards=tuple(self.cards[card] for card in positions),
            peers={(at[a], at[b]): rate for (a, b), rate in self.peers.items()},
        )

    def peer_bytes_per_s(self, source: int, target: int) -> float | None:
        """Return the rate of copies between two cards; None: they go through the host."""
        return self.peers.get((source, target))

    def is_own_link(self, source: int, target: int) -> bool:
        """Return whether copies between two cards leave the bus to the host alone."""
        rate = self.peers.get((source, target), 0.0)
        return rate > BESIDE_THE_BUS * max(self.cards[source].down, self.cards[target].up)


def _share(together: float | None, alone: Sequence[float], several: bool) -> float:
    if together is None or not several:
        return 1.0
    return min(1.0, together / sum(alone))


def _slower(rates: Rates, up: float, down: float) -> Rates:
    """Return the rates of a card that gets these shares of its bus."""
    if up == down == 1.0:
        return rates
    return replace(
        rates,
        h2d_bytes_per_s=up * rates.up,
        d2h_bytes_per_s=down * rates.down,
        h2d_both_bytes_per_s=up * rates.up_both,
        d2h_both_bytes_per_s=down * rates.down_both,
    )


def cards_rates_from(
    first: Rates,
    per_s: Mapping[str, float | None],
    cards: Sequence[int],
    timed: Mapping[int, Calibration] | None = None,
    *,
    timed_on: int = 0,
) -> CardsRates:
    """Return the rates of the cards with these of torch's numbers, from those of a probe by name.

    `first` are those of card 0, with the times of one block where it was timed, on card `timed_on`.
    `timed` are the times of a block on other cards; of one that is missing, those of `timed_on` by
    the rates of their arithmetic. What was not measured of a card counts as card 0's.
    """
    known = {name: float(rate) for name, rate in per_s.items() if rate}
    adamw, copies = BF16_UPDATE_BYTES * first.adamw_per_s, known.get("host_copy", 0.0)
    peers = ((a, b, known.get(peer_name(one, other)))
             for a, one in enumerate(cards) for b, other in enumerate(cards) if a != b)  # fmt: skip
    up, down = (known.get(name) for name in TOGETHER[:2])
    return CardsRates(
        cards=tuple(_of_card(card, first, known, timed or {}, timed_on) for card in cards),
        up_together_bytes_per_s=up,
        down_together_bytes_per_s=down,
        peers={(a, b): rate for a, b, rate in peers if rate is not None},
        host_bytes_per_s=max(adamw, COPY_READS_AND_WRITES * copies),
    )


def _of_card(
    card: int,
    first: Rates,
    known: Mapping[str, float],
    timed: Mapping[int, Calibration],
    timed_on: int,
) -> Rates:
    tried = timed.get(card)
    if tried is None and first.calibration is not None:
        longer = _times_as_long_as(timed_on, card, known)
        tried = first.calibration if longer == 1.0 else times_as_long(first.calibration, longer)
    if card == 0:
        return replace(first, calibration=tried)
    factor = _times_as_long_as(0, card, known)

    def bus(name: str, otherwise: float | None) -> float | None:
        return known.get(card_rate_name(card, name), otherwise)

    return replace(
        first,
        matmul_per_s=first.matmul_per_s / factor,
        h2d_bytes_per_s=bus("h2d_pinned", first.h2d_bytes_per_s),
        d2h_bytes_per_s=bus("d2h_pinned", first.d2h_bytes_per_s),
        h2d_both_bytes_per_s=bus("h2d_both_ways", first.h2d_both_bytes_per_s),
        d2h_both_bytes_per_s=bus("d2h_both_ways", first.d2h_both_bytes_per_s),
        calibration=tried,
    )


def _times_as_long_as(one: int, card: int, known: Mapping[str, float]) -> float:
    """Return how many times as long as card `one` a card computes; 1 where that is not known."""
    rates = [
        known.get("gpu_matmul" if at == 0 else card_rate_name(at, "gpu_matmul"))
        for at in (one, card)
    ]
    if rates[0] is None or rates[1] is None:
        return 1.0
    factor = rates[0] / rates[1]
    return factor if max(factor, 1 / factor) > NOISE else 1.0


def times_as_long(calibration: Calibration, factor: float) -> Calibration:
    """Return what blocks take on a card that needs `factor` times as long as the one where they
    were timed; the host is as fast as it is."""

    def slower(line: Line) -> Line:
        return Line(base=factor * line.base, slope=factor * line.slope)

    kept = calibration.kept_backward
    return replace(
        calibration,
        forward=slower(calibration.forward),
        backward=slower(calibration.backward),
        outside_forward=slower(calibration.outside_forward),
        outside_backward=slower(calibration.outside_backward),
        kept_backward=None if kept is None else slower(kept),
        device_update_s=factor * calibration.device_update_s,
    )
