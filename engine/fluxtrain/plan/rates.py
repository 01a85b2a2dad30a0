"""Measured rates of a machine's cards and of their host, from which seconds are computed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fluxtrain.events.answers.machine import PEER, TOGETHER, card_rate_name, peer_name
from fluxtrain.plan.calibration import Calibration, Line
from fluxtrain.plan.facts import GroupFacts

FP16_CONVERSION = 0.5  # of an update's time, once more, goes into widening and rounding of fp16
BF16_UPDATE_BYTES = 26  # for each parameter with fp32 moments: what the measured rate counts
BF16_PASS_BYTES = 18  # the same of its weights' pass, and of its moments' pass
NOISE = 1.05  # times as fast: less between two measured rates of arithmetic is none
COPY_READS_AND_WRITES = 2  # bytes of host memory for each that is copied within it
BESIDE_THE_BUS = 1.5  # times the bus: a faster link between two cards is one of its own
NOTHING = Line(base=0.0, slope=0.0)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Constants of a class of machines, for quantities that are not measured on each machine."""

    matmul_fraction: float  # of the measured matmul rate, within a block
    block_chunk_s: float  # besides products, for each block and chunk: launches, norms


# Fitted to the resident rows of docs/benchmarks.md: 0.245, 0.459 and 1.698 s.
GPU = Efficiency(matmul_fraction=0.615, block_chunk_s=1.0e-3)
# Fitted to the demo on two shared cores (docs/planner.md).
CPU = Efficiency(matmul_fraction=0.5, block_chunk_s=5.0e-3)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured rates of one card and its host; the bus rates are None without a GPU."""

    has_gpu: bool
    matmul_per_s: float  # operations
    adamw_per_s: float  # parameters in bf16 with fp32 masters, all threads
    adamw_8bit_per_s: float | None = None  # the same with 8-bit states; None: by their bytes
    adamw_weights_per_s: float | None = None  # the weights' pass alone; None: by its bytes
    adamw_moments_per_s: float | None = None  # the moments' pass alone; None: by its bytes
    adamw_beside_per_s: float | None = None  # during a backward pass; None: as alone
    adamw_8bit_beside_per_s: float | None = None  # the same with 8-bit states
    copy_bytes_per_s: float = float("inf")  # within host memory; the bus of a machine without GPU
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    h2d_both_bytes_per_s: float | None = None  # while the other direction is busy; None: as alone
    d2h_both_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None  # of reading; None: not measured, taken as no wait
    disk_write_bytes_per_s: float | None = None
    peer_bytes_per_s: float | None = None  # between the two cards that are slowest at it
    calibration: Calibration | None = None  # of the model that is planned

    @property
    def up(self) -> float:
        """Return the bytes a second to the device; without a GPU those of a copy within host
        memory."""
        return self.h2d_bytes_per_s or self.copy_bytes_per_s

    @property
    def down(self) -> float:
        """Return the bytes a second from the device; without a GPU those of a copy within host
        memory."""
        return self.d2h_bytes_per_s or self.copy_bytes_per_s

    @property
    def up_both(self) -> float:
        """Return the bytes a second to the device while it sends."""
        return self.h2d_both_bytes_per_s or self.up

    @property
    def down_both(self) -> float:
        """Return the bytes a second from the device while it receives."""
        return self.d2h_both_bytes_per_s or self.down

    def beside_backward(self) -> Rates:
        """Return the rates with the speed of updates during a backward pass, which leaves them
        fewer threads and less of the host's memory bandwidth."""
        return replace(
            self,
            adamw_per_s=self.adamw_beside_per_s or self.adamw_per_s,
            adamw_8bit_per_s=self.adamw_8bit_beside_per_s or self.adamw_8bit_per_s,
        )

    def slower(self, factor: float) -> Rates:
        """Return the rates of a card that needs `factor` times as long to compute."""
        timed = self.calibration
        return replace(
            self,
            matmul_per_s=self.matmul_per_s / factor,
            calibration=None if timed is None else times_as_long(timed, factor),
        )

    @property
    def efficiency(self) -> Efficiency:
        """Return the constants of this class of machines."""
        return GPU if self.has_gpu else CPU


def rates_from(
    per_s: Mapping[str, float | None], *, has_gpu: bool, calibration: Calibration | None = None
) -> Rates | str:
    """Return the rates from those of a probe by name, or say which are missing for a prediction.

    With a `calibration` no matmul rate is needed, and its own rates of AdamW count.
    """
    known = {name: float(rate) for name, rate in per_s.items() if rate}
    if calibration is not None and calibration.adamw_per_s:
        known["adamw"] = calibration.adamw_per_s
    if calibration is not None and calibration.adamw_8bit_per_s:
        known["adamw_8bit"] = calibration.adamw_8bit_per_s
    matmul = "gpu_matmul" if has_gpu else "cpu_matmul"
    needed = ["adamw", "h2d_pinned", "d2h_pinned"] if has_gpu else ["adamw", "host_copy"]
    needed += [] if calibration is not None else [matmul]
    missing = [name for name in needed if name not in known]
    if missing:
        return f"not measured on this machine: {', '.join(missing)}"
    names = ("weights", "moments", "beside", "8bit_beside")
    timed = {f"adamw_{name}_per_s": getattr(calibration, f"adamw_{name}_per_s", None)
             for name in names}  # fmt: skip
    return Rates(
        has_gpu=has_gpu,
        matmul_per_s=known.get(matmul, float("inf")),
        adamw_per_s=known["adamw"],
        adamw_8bit_per_s=known.get("adamw_8bit"),
        **timed,
        copy_bytes_per_s=known.get("host_copy", float("inf")),
        h2d_bytes_per_s=known.get("h2d_pinned"),
        d2h_bytes_per_s=known.get("d2h_pinned"),
        h2d_both_bytes_per_s=known.get("h2d_both_ways"),
        d2h_both_bytes_per_s=known.get("d2h_both_ways"),
        disk_bytes_per_s=known.get("disk_read"),
        disk_write_bytes_per_s=known.get("disk_write"),
        peer_bytes_per_s=min((known[n] for n in known if n.startswith(PEER)), default=None),
        calibration=calibration,
    )


def host_update(group: GroupFacts, rates: Rates, *, deferred: bool = False) -> tuple[float, float]:
    """Return the seconds of AdamW on the host for one group, and of its moments if these come
    later.

    Computed from the bytes that it moves (26 a parameter, 18 in one of two passes), but never
    faster than measured for 8-bit states, whose codes cost arithmetic.
    """
    bytes_per_s = BF16_UPDATE_BYTES * rates.adamw_per_s
    if deferred and group.pass_bytes:
        weights_bytes_per_s = BF16_PASS_BYTES * (rates.adamw_weights_per_s or 0.0) or bytes_per_s
        moments_bytes_per_s = BF16_PASS_BYTES * (rates.adamw_moments_per_s or 0.0) or bytes_per_s
        return group.pass_bytes / weights_bytes_per_s, group.pass_bytes / moments_bytes_per_s
    by_bytes_s = group.update_bytes / BF16_UPDATE_BYTES / rates.adamw_per_s
    by_bytes_s *= _fp16_factor(group)
    coded = group.narrow if group.states == "8bit" and rates.adamw_8bit_per_s else 0
    return max(by_bytes_s, coded / (rates.adamw_8bit_per_s or 1.0)), 0.0


def rate_of_update(group: GroupFacts, seconds: float, *, one_pass: bool = False) -> float:
    """Return the rate for which `host_update` gives `seconds` for this group: the rate of 8-bit
    states where it has them, or of one of two passes (`one_pass`)."""
    if one_pass:
        return group.pass_bytes / BF16_PASS_BYTES / seconds
    if group.states == "8bit" and group.narrow:
        return group.narrow / seconds
    return group.update_bytes / BF16_UPDATE_BYTES / seconds * _fp16_factor(group)


def _fp16_factor(group: GroupFacts) -> float:
    return 1 + FP16_CONVERSION * group.trained_fp16 / max(1, group.trained)


@dataclass(frozen=True, kw_only=True)
class CardsRates:
    """Rates by which steps on one or several cards are timed. The host's are the first card's."""

    cards: tuple[Rates, ...]  # of each card while the others rest
    # Bytes a second of all cards at once, added up; None: as each alone
    up_together_bytes_per_s: float | None = None
    down_together_bytes_per_s: float | None = None
    # Between two cards, by (from, to), where a checked copy was right; others go through the host
    peers: Mapping[tuple[int, int], float] = field(default_factory=dict)
    host_bytes_per_s: float | None = None  # of host memory, whatever uses it; None: no bound

    def of(self, chosen: Sequence[int]) -> CardsRates:
        """Return the rates of some cards, in the order given, each as fast as it is while the
        others copy too."""
        several = len(chosen) > 1
        up = _share(self.up_together_bytes_per_s, [card.up for card in self.cards], several)
        down = _share(self.down_together_bytes_per_s, [card.down for card in self.cards], several)
        at = {card: number for number, card in enumerate(chosen)}
        return CardsRates(
            cards=tuple(_on_shared_bus(self.cards[card], up, down) for card in chosen),
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
        """Return whether copies between two cards do not use their bus to the host."""
        rate = self.peers.get((source, target), 0.0)
        return rate > BESIDE_THE_BUS * max(self.cards[source].down, self.cards[target].up)

    def for_share(self, card: int) -> Rates:
        """Return the rates by which a card computes its share as if it were alone. The host serves
        all cards, so each gets a part of AdamW and of the thread that queues; the first card also
        computes the modules outside the blocks."""
        rates, number = self.cards[card], len(self.cards)
        if number == 1:
            return rates
        names = [name for name in vars(rates) if name.startswith("adamw")]
        divided = {name: value / number for name in names if (value := getattr(rates, name))}
        tried = rates.calibration
        return replace(
            rates,
            **divided,
            calibration=None if tried is None else _for_share(tried, card, number),
        )


def _for_share(tried: Calibration, card: int, number: int) -> Calibration:
    outside: dict[str, Any] = (
        {} if card == 0 else {"outside_forward": NOTHING, "outside_backward": NOTHING}
    )
    host = tried.host
    if host is not None:
        names = ("forward", "backward", "forward_beside", "backward_beside")
        slower: dict[str, Any] = {name: getattr(host, name).times(number) for name in names}
        host = replace(host, **slower)
    return replace(
        tried,
        **outside,
        host_block_s=number * tried.host_block_s,
        host_forward_s=number * tried.host_forward_s,
        host=host,
    )


def _share(together: float | None, alone: Sequence[float], several: bool) -> float:
    if together is None or not several:
        return 1.0
    return min(1.0, together / sum(alone))


def _on_shared_bus(rates: Rates, up: float, down: float) -> Rates:
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
    """Return the rates of the cards with these torch numbers, from the rates of a probe by name.

    `first` are the rates of card 0, with the times of one block on card `timed_on` where it was
    timed. `timed` are the times of a block on other cards; a missing one is scaled from `timed_on`
    by the rates of arithmetic. Rates that were not measured on a card are those of card 0.
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
    """Return the times of blocks on a card that needs `factor` times as long as the card where
    they were timed; the host's stay."""
    kept = calibration.kept_backward
    return replace(
        calibration,
        forward=calibration.forward.times(factor),
        backward=calibration.backward.times(factor),
        outside_forward=calibration.outside_forward.times(factor),
        outside_backward=calibration.outside_backward.times(factor),
        kept_backward=None if kept is None else kept.times(factor),
        device_update_s=factor * calibration.device_update_s,
    )
