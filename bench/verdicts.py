"""What a row of the GPU benchmarks was to reach, and whether it did: numbers in, words out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SAME_LOSSES = 1e-3  # relative
COMPARED_STEPS = 20
SLOWER = 1.05  # a machine whose reference takes longer by more is not the one that was meant
# Bytes of host memory a trained parameter, block inputs apart, by what the row keeps there.
HOST_BYTES = {"exact": 14.5, "in_backward": 12.5, "8bit": 8.5}

Row = dict[str, Any]
Outcome = Literal["met", "missed", "void", "open"]
OTHER_OUTCOMES: dict[Outcome, str] = {
    "missed": "Missed", "void": "Void", "open": "Not judged",
}  # fmt: skip


@dataclass(frozen=True)
class Told:
    """One thing that is said of a row, and how it came out where it was a target."""

    words: str
    outcome: Outcome | None = None


def judged(row: Row, rows: Mapping[str, Row], slow: Mapping[str, Slow] | None = None) -> str:
    """What was wanted of a row, each with its verdict; `slow` is of `slow_references`."""
    return "; ".join(told.words for told in verdicts(row, rows, slow))


def verdicts(
    row: Row, rows: Mapping[str, Row], slow: Mapping[str, Slow] | None = None
) -> list[Told]:
    """The same one by one, for a row that has a result."""
    mine = rows[row["name"]]
    slow = slow or {}
    told = [Told(f"VOID, for {slow[row['against']]}")] if row.get("against") in slow else []
    told += _reference(row, mine)
    told += _speeds(row, mine, rows, slow)
    if "losses" in row:
        told.append(_losses(row["losses"], mine, rows))
    if "budget" in row:
        told.append(_device(row["budget"] * row.get("cards", 1), mine))
        told += _host(mine)
    return told


def counted(told: Mapping[str, Sequence[Told]]) -> str:
    """How many targets were met, and which were not, by what they are targets of."""
    targets = [
        (name, one) for name, found in told.items() for one in found if one.outcome is not None
    ]
    met = sum(one.outcome == "met" for _, one in targets)
    if not targets:
        return "No target was judged."
    if met == len(targets):
        return f"All {met} targets are met."
    parts = [f"Of {len(targets)} targets {met} are met."]
    for outcome, title in OTHER_OUTCOMES.items():
        which = [f"`{name}` ({one.words})" for name, one in targets if one.outcome == outcome]
        parts += [f"{title}: {', '.join(which)}."] if which else []
    return " ".join(parts)


@dataclass(frozen=True)
class Slow:
    """A row that took longer than it is known to on this kind of machine. A share of its throughput
    is void; a multiple is of the throughput that is known, which is more than it had here."""

    name: str
    step_s: float
    known_s: float

    def __str__(self) -> str:
        return f"{self.name} took {self.step_s:.3f} s here"

    @property
    def words(self) -> str:
        """What a multiple is of."""
        return f"{self.name} with its known {self.known_s:.2f} s"

    def known(self, row: Row) -> Row:
        """The row as it is known to be."""
        return row | {"tokens_per_s": row["tokens_per_s"] * self.step_s / self.known_s}


def slow_references(wanted: Sequence[Row], rows: Mapping[str, Row]) -> dict[str, Slow]:
    """The rows whose `reference_s` says so, by their names."""
    return {
        row["name"]: Slow(row["name"], rows[row["name"]]["step_s"], row["reference_s"])
        for row in wanted
        if "reference_s" in row
        and "step_s" in rows.get(row["name"], {})
        and rows[row["name"]]["step_s"] > SLOWER * row["reference_s"]
    }


def beside(row: Row, rows: Mapping[str, Row], slow: Mapping[str, Slow] | None = None) -> str:
    """Its throughput as a share of the loop it is compared with, and as a multiple of others: of
    what is known of them where they are `slow` here."""
    mine = rows[row["name"]]["tokens_per_s"]
    told = []
    if "tokens_per_s" in rows.get(row.get("against", ""), {}):
        told.append(f"{mine / rows[row['against']]['tokens_per_s']:.1%} of {row['against']}")
    for name in row.get("times", {}):
        words, other = _as_known(name, rows, slow or {})
        if "tokens_per_s" in other:
            told.append(f"{mine / other['tokens_per_s']:.2f}x {words}")
    return ", ".join(told)


def furthest(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference within the first steps; NaN where any is none."""
    pairs = list(zip(losses, reference, strict=False))[:COMPARED_STEPS]
    found = [abs(mine - other) / abs(other) for mine, other in pairs]
    return math.nan if any(map(math.isnan, found)) else max(found)


def verdict(good: bool) -> str:
    """Whether a target was met, in the table's word."""
    return "met" if good else "MISSED"


def outcome_of(good: bool, *, void: bool = False) -> Outcome:
    """Of a target that could be judged."""
    return "void" if void else "met" if good else "missed"


def _reference(row: Row, mine: Row) -> list[Told]:
    if "reference_s" not in row:
        return []
    known_s = row["reference_s"]
    if mine["step_s"] > SLOWER * known_s:
        cure = "so shares of it are void, and multiples are of what is known"
        return [Told(f"{known_s:.2f} s are known: SLOWER, {cure}")]
    return [Told(f"{known_s:.2f} s are known: as fast")]


def _speeds(row: Row, mine: Row, rows: Mapping[str, Row], slow: Mapping[str, Slow]) -> list[Told]:
    """The targets in seconds and in other rows' throughput."""
    told = []
    void = row.get("against") in slow
    if "most_s" in row:
        told.append(_target(f"{row['most_s']:.2f} s", mine["step_s"] <= row["most_s"], void))
    if "least" in row:
        words = f"{row['least']:.0%} of {row['against']}"
        told.append(_beside(words, row["least"], mine, rows.get(row["against"], {}), void=void))
    for name, factor in row.get("times", {}).items():
        words, other = _as_known(name, rows, slow)
        told.append(_beside(f"{factor}x of {words}", factor, mine, other))
    return told


def _as_known(name: str, rows: Mapping[str, Row], slow: Mapping[str, Slow]) -> tuple[str, Row]:
    """Another row and its name, as it is known where it is slow here."""
    other = rows.get(name, {})
    return (slow[name].words, slow[name].known(other)) if name in slow else (name, other)


def _beside(words: str, factor: float, mine: Row, other: Row, *, void: bool = False) -> Told:
    if "tokens_per_s" not in other:
        return Told(f"{words}: not judged, it has no result", "open")
    return _target(words, mine["tokens_per_s"] >= factor * other["tokens_per_s"], void)


def _target(words: str, good: bool, void: bool) -> Told:
    return Told(f"{words}: {'VOID' if void else verdict(good)}", outcome_of(good, void=void))


def _losses(name: str, mine: Row, rows: Mapping[str, Row]) -> Told:
    reference = rows.get(name, {})
    if "losses" not in reference:
        return Told(f"losses of {name}: not judged, it has no result", "open")
    worst = furthest(mine["losses"], reference["losses"])
    same = worst <= SAME_LOSSES
    steps = min(len(mine["losses"]), len(reference["losses"]), COMPARED_STEPS)
    over = f" over {steps} steps" if steps < COMPARED_STEPS else ""
    return Told(
        f"losses {'same' if same else 'NOT the same'}{over} ({worst:.1e})", outcome_of(same)
    )


def _device(budget_gib: float, mine: Row) -> Told:
    """Of the whole process, CUDA's own share included. NVML sees no process in some containers."""
    taken_gib = mine["nvml_gib"]
    if taken_gib <= 0:
        return Told(f"{budget_gib} GiB: not judged, NVML saw nothing ({taken_gib:.2f})", "open")
    good = taken_gib <= budget_gib
    return Told(f"{budget_gib} GiB: {verdict(good)} ({taken_gib:.2f})", outcome_of(good))


def _host(mine: Row) -> list[Told]:
    states = mine.get("states")
    by_mode = {"8bit": "8bit", "fp32": "in_backward" if mine.get("in_backward") else "exact"}
    if states not in by_mode or "host_bytes_per_trained" not in mine:
        return []
    most, taken = HOST_BYTES[by_mode[states]], mine["host_bytes_per_trained"]
    good = taken <= most
    return [Told(f"{most} bytes: {verdict(good)} ({taken:.2f})", outcome_of(good))]
