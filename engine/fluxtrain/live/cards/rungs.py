"""What one of several cards gives up when its memory runs out. Pure: a placement in, others out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fluxtrain.live.cards.changed import counted
from fluxtrain.live.settings import StepName
from fluxtrain.plan.choices.placement import Placement
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import INPUTS_IN_FLIGHT
from fluxtrain.plan.group_placement import Activations, GroupPlacement

_SLOTS = 2  # for a card's first streamed blocks: one computes while the next is copied
_Rows = tuple[GroupPlacement, ...]


@dataclass(frozen=True, kw_only=True)
class CardRung:
    """A placement with less on one card."""

    index: int  # of the card, as torch counts
    name: StepName
    before: int  # on this card
    after: int
    placement: Placement
    to_host_bytes: int = 0  # that find their place on the host instead

    def __str__(self) -> str:
        return f"{self.name} {self.after} instead of {self.before} on card {self.index}"


def card_rungs(
    facts: ModelFacts,
    placement: Placement,
    index: int | None,
    *,
    backward: bool = True,
    has_gpu: bool = True,
) -> Iterator[CardRung]:
    """Yield what card `index` may give up, first what costs least: where there is a backward pass,
    all block inputs that wait there, and half of the blocks that keep their activations; where
    there are none, half of its resident blocks, then of the parts that live there. Every bit of the
    results stays."""
    number = next((at for at, card in enumerate(placement.cards) if card.index == index), None)
    if number is None or index is None:
        return
    inputs = _at(
        placement, number, lambda row: row.kind == "block" and row.activations == "inputs_on_device"
    )
    if backward and has_gpu and facts.row is not None and len(inputs) > INPUTS_IN_FLIGHT:
        rows = _changed(placement, inputs, lambda row: replace(row, activations="inputs_on_host"))
        moved = len(inputs) * placement.layout.batch_rows * facts.row.block_input_bytes
        yield CardRung(
            index=index, name="activations_on_device", before=len(inputs), after=0,
            placement=_with_more_on_host(replace(placement, groups=rows), moved),
            to_host_bytes=moved,
        )  # fmt: skip
    kept = _at(placement, number, lambda row: row.activations == "kept")
    if kept and backward:
        rows = _changed(placement, kept[len(kept) // 2 :], _recomputed(placement.groups))
        yield CardRung(
            index=index, name="blocks_without_recompute", before=len(kept), after=len(kept) // 2,
            placement=counted(replace(placement, groups=rows)),
        )  # fmt: skip
        return
    if placement.offload not in ("weights", "max"):
        return
    resident = _at(placement, number, lambda row: row.resident and row.kind == "block")
    after = len(resident) // 2
    if not placement.slots_of(number) and len(resident) - after <= _SLOTS:
        after = 0
    if len(resident) - after > (0 if placement.slots_of(number) else _SLOTS):
        rows = _changed(placement, resident[after:], lambda row: replace(row, resident=False))
        yield CardRung(
            index=index, name="resident_blocks", before=len(resident), after=after,
            placement=_with_slots(replace(placement, groups=rows), number),
        )  # fmt: skip
    parts = _at(placement, number, lambda row: row.weights == "device")
    if parts:
        gone = parts[len(parts) // 2 :]
        moved = sum(facts.groups[at].host_bytes(accumulates=True) for at in gone)
        after_it = replace(placement, groups=_changed(placement, gone, _on_host))
        yield CardRung(
            index=index, name="device_groups", before=len(parts), after=len(parts) // 2,
            placement=_with_slots(_with_more_on_host(after_it, moved * has_gpu), number),
            to_host_bytes=moved,
        )  # fmt: skip


def _at(placement: Placement, number: int, is_one: Callable[[GroupPlacement], bool]) -> list[int]:
    """Return where in the table the card's rows are that are such."""
    rows = enumerate(placement.groups)
    return [at for at, row in rows if row.card == number and is_one(row)]


def _changed(
    placement: Placement, at: Iterable[int], change: Callable[[GroupPlacement], GroupPlacement]
) -> _Rows:
    chosen = set(at)
    rows = enumerate(placement.groups)
    return tuple(change(row) if here in chosen else row for here, row in rows)


def _recomputed(rows: Sequence[GroupPlacement]) -> Callable[[GroupPlacement], GroupPlacement]:
    """Let a block's inputs wait where those of others do."""
    others: set[Activations] = {row.activations for row in rows}
    waits: Activations = "inputs_on_host" if "inputs_on_host" in others else "inputs_on_device"
    return lambda row: replace(row, activations=waits)


def _on_host(row: GroupPlacement) -> GroupPlacement:
    """Move a part to the host; what no block shares slots for has a slot of its own."""
    resident = row.kind == "edge" and "whole" in row.transfers
    return replace(row, weights="host", state="host", gradients="host", resident=resident)


def _with_more_on_host(placement: Placement, more_bytes: int) -> Placement:
    """Tell what has moved there; without a GPU it was there before."""
    host_bytes = placement.need.host_bytes + more_bytes
    return replace(placement, need=replace(placement.need, host_bytes=host_bytes))


def _with_slots(placement: Placement, number: int) -> Placement:
    """Give the card slots where its first blocks stream."""
    streams = _at(
        placement,
        number,
        lambda row: row.kind == "block" and row.weights != "device" and not row.resident,
    )
    need = placement.cards[number]
    if not streams or need.slots:
        return counted(placement)
    cards = list(placement.cards)
    cards[number] = replace(need, slots=min(_SLOTS, len(streams)))
    return counted(replace(placement, cards=tuple(cards)))
