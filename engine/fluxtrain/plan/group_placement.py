"""The placement table: a row for each group of parameters says where its bytes live.

`table_of` makes the rows from the planner's counts; everybody else reads rows. A tier says where
bytes live between their uses. Weights that live on the host are copied to the device before their
block computes: through slots that the streamed blocks share, or (`resident`) into a slot of their
own, where the copy stays.

On disk live frozen weights of blocks, and optimizer states: the trained weights of such rows, and
all else, are on the host, unless they followed the states (`refuse_tiers` of
memory/group_memory.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

from fluxtrain.errors import BadInput
from fluxtrain.events.events import PlacedAlike
from fluxtrain.plan.facts import GroupFacts, ModelFacts
from fluxtrain.plan.footprint import (
    Layout,
    by_tier,
    gradients_on_disk,
    kept_count,
    on_disk,
    spilled,
    streamed,
    trained_on_disk,
)
from fluxtrain.plan.heads import comes_apart
from fluxtrain.plan.states import StorageFormat

Tier = Literal["device", "host", "disk"]  # where bytes live between their uses
Kind = Literal["weights", "state", "gradients"]  # of a group's bytes
KINDS: tuple[Kind, ...] = get_args(Kind)
Activations = Literal["kept", "inputs_on_device", "inputs_on_host"]
Transfer = Literal["whole", "rows", "vocabulary_chunks"]


@dataclass(frozen=True, kw_only=True)
class GroupPlacement:
    """Where one group's bytes live, and how they move."""

    name: str = ""
    kind: Literal["block", "edge"] = "block"
    weights: Tier = "host"  # disk: the frozen ones, and trained ones on the host; else the trained
    state: Tier = "host"  # optimizer state: what completes the masters, and the moments
    gradients: Tier = "host"
    storage: StorageFormat = "plain"  # of the weights
    card: int = 0  # the GPU that computes with the group
    # kept: nothing is recomputed; else the inputs wait there for backward, which recomputes
    activations: Activations = "inputs_on_device"
    # how weights reach the device where they do not live there; a tied embedding has two ways
    transfers: tuple[Transfer, ...] = ("whole",)
    resident: bool = False  # the device's copy of the weights stays there, in a slot of its own

    @staticmethod
    def on(tier: Tier, **rest: Any) -> GroupPlacement:
        """Make a row with weights, state and gradients in one tier."""
        return GroupPlacement(weights=tier, state=tier, gradients=tier, **rest)

    def tier_of(self, kind: Kind) -> Tier:
        """Return where bytes of this kind live."""
        tiers: dict[Kind, Tier]
        tiers = {"weights": self.weights, "state": self.state, "gradients": self.gradients}
        return tiers[kind]

    def is_on(self, tier: Tier, kind: Kind = "weights") -> bool:
        """Return whether bytes of this kind live on `tier`."""
        return self.tier_of(kind) == tier


class Named(Protocol):
    """A group of the model."""

    @property
    def name(self) -> str: ...


def table_of(facts: ModelFacts, layout: Layout) -> tuple[GroupPlacement, ...]:
    """Make a row for each group of the model, in forward order."""
    tiers = by_tier(facts, layout)
    on_device, on_host = tiers["device"], tiers["host"]
    passing = streamed(layout, on_host)
    away = {group.name for group in on_disk(facts, layout)}
    states = {group.name for group in spilled(facts, layout)}
    gradients = {group.name for group in gradients_on_disk(facts, layout)}
    away |= {group.name for group in trained_on_disk(facts, layout)}
    rows: list[GroupPlacement] = []
    for group in facts.groups:
        tier: Tier = "device" if group in on_device else "host"
        transfers = _transfers(facts, layout, group)
        rows.append(
            GroupPlacement.on(
                tier,
                name=group.name,
                kind=group.kind,
                storage=group.storage,
                transfers=transfers,
                resident=tier == "host" and group not in passing and "whole" in transfers,
            )
        )
    rows = [replace(row, weights="disk") if row.name in away else row for row in rows]
    rows = [replace(row, state="disk") if row.name in states else row for row in rows]
    rows = [replace(row, gradients="disk") if row.name in gradients else row for row in rows]
    return _with_activations(rows, layout, kept_count(facts, layout))


def disk_counts(groups: Iterable[GroupFacts], rows: Sequence[GroupPlacement]) -> dict[str, Any]:
    """Count what the rows of these groups have on disk, as fields of a `Layout`."""
    frozen = {group.name for group in groups if group.file_bytes}
    away = [row.name in frozen for row in rows if row.weights == "disk"]
    return {
        "disk_groups": sum(away),
        "disk_weights": len(away) - sum(away),
        "disk_states": sum(row.state == "disk" for row in rows),
        "disk_gradients": sum(row.gradients == "disk" for row in rows),
    }


def _transfers(facts: ModelFacts, layout: Layout, group: GroupFacts) -> tuple[Transfer, ...]:
    head = facts.head
    by_rows = layout.embedding == "rows" and group is facts.table
    is_head = head is not None and head.group == group.name
    in_chunks = is_head and layout.head == "chunks" and comes_apart(facts)
    in_chunks = in_chunks and (by_rows or not (head is not None and head.tied))
    found: list[Transfer] = ["rows"] if by_rows else []
    if in_chunks:
        found.append("vocabulary_chunks")
    elif not by_rows or group.users > 1:
        found.append("whole")
    return tuple(found)


def _with_activations(
    rows: Sequence[GroupPlacement], layout: Layout, kept: int
) -> tuple[GroupPlacement, ...]:
    """Let the first `kept` blocks with weights on the device keep their activations. Of the other
    inputs, those of the last `activations_on_device` blocks and of the modules behind them stay on
    the device where the others wait on the host."""
    blocks = [at for at, row in enumerate(rows) if row.kind == "block"]
    keeping = [at for at in blocks if rows[at].resident or rows[at].is_on("device")][:kept]
    staying = layout.activations_on_device
    others = [at for at in blocks if at not in keeping]
    first = others[-staying:][0] if staying and others else len(rows)

    def of(at: int) -> Activations:
        if at in keeping:
            return "kept"
        return (
            "inputs_on_host" if layout.offloads_activations and at < first else "inputs_on_device"
        )

    return tuple(
        row if row.activations == of(at) else replace(row, activations=of(at))
        for at, row in enumerate(rows)
    )


def check_groups(rows: Sequence[GroupPlacement], groups: Sequence[Named]) -> None:
    """Raise BadInput where the table's rows do not match the model's groups in order."""
    planned, there = [row.name for row in rows], [group.name for group in groups]
    if planned == there:
        return
    pairs = zip(planned, there, strict=False)
    at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(planned), len(there)))
    row, group = ((*names, "nothing")[min(at, len(names))] for names in (planned, there))
    raise BadInput(
        f"the placement has {len(planned)} groups and the model has {len(there)}; the first that "
        f"differs is number {at + 1}: {row} in the placement, {group} in the model. Plan this "
        "very model, or call fluxtrain.wrap without a placement"
    )


def check_rows(rows: Iterable[GroupPlacement], *, cards: int = 1) -> None:
    """Raise BadInput for a row with an unknown word, or for a card beyond the `cards` there are."""
    for row in rows:
        _refuse_unknown(row)
        if not 0 <= row.card < cards:
            raise BadInput(f"{row.name}: there is no card {row.card}: use one of 0 to {cards - 1}")
        if row.card and row.kind == "edge":
            raise BadInput(f"{row.name}: what stands outside of blocks is on card 0")


def _refuse_unknown(row: GroupPlacement) -> None:
    words = {
        "kind": ("block", "edge"),
        "weights": get_args(Tier),
        "state": get_args(Tier),
        "gradients": get_args(Tier),
        "storage": get_args(StorageFormat),
        "activations": get_args(Activations),
    }
    for name, known in words.items():
        if getattr(row, name) not in known:
            raise BadInput(
                f"{row.name}: {name} is {getattr(row, name)!r}: use one of {', '.join(known)}"
            )
    for way in row.transfers:
        if way not in get_args(Transfer):
            raise BadInput(
                f"{row.name}: transfer {way!r} is unknown: use {', '.join(get_args(Transfer))}"
            )


def alike(rows: Sequence[GroupPlacement]) -> tuple[PlacedAlike, ...]:
    """Describe the table compactly: equal rows together, in the order of their first groups."""
    found: dict[GroupPlacement, list[int]] = {}
    for at, row in enumerate(rows):
        found.setdefault(replace(row, name="", kind="block"), []).append(at)
    return tuple(
        PlacedAlike(
            groups=_numbers(numbers),
            weights=row.weights,
            state=row.state,
            gradients=row.gradients,
            storage=row.storage,
            card=row.card,
            activations=row.activations,
            transfers=row.transfers,
            resident=row.resident,
        )
        for row, numbers in found.items()
    )


def _numbers(ascending: Iterable[int]) -> str:
    """Write 0, 2, 3, 4 as "0,2-4"."""
    spans: list[list[int]] = []
    for number in ascending:
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
