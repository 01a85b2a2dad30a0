"""Changes of a run whose blocks are on several cards. Pure: a placement in, another one out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.cards.shares import Dealt
from fluxtrain.plan.choices.placement import Placement
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import (
    Footprint,
    Layout,
    by_tier,
    footprint,
    keepable_count,
    slot_count,
    streamed,
)
from fluxtrain.plan.group_placement import GroupPlacement, table_of
from fluxtrain.units import bytes_text

COUNTS = ("resident_blocks", "device_groups", "blocks_without_recompute")
_WORDS = {
    "resident_blocks": "blocks are on the host",
    "device_groups": "parts the model has",
    "blocks_without_recompute": "blocks have their weights on a card for good",
}


@dataclass(frozen=True)
class _Share:
    """One card's groups, and where they are."""

    number: int
    facts: ModelFacts
    layout: Layout
    has_gpu: bool

    @cached_property
    def need(self) -> Footprint:
        """Predicted peaks, without what passes between cards."""
        return footprint(self.facts, self.layout, has_gpu=self.has_gpu)

    def most(self, name: str) -> int:
        """The largest value of a count."""
        if name == "device_groups":
            return len(self.facts.groups)
        if name == "resident_blocks":
            return len(by_tier(self.facts, self.layout)[1].blocks)
        return keepable_count(self.facts, self.layout)

    def with_count(self, name: str, value: int) -> _Share:
        """The same with another count."""
        changed: dict[str, Any] = {name: value}
        return replace(self, layout=replace(self.layout, **changed))

    @property
    def streams(self) -> int:
        """Blocks whose weights come through slots."""
        return len(streamed(self.layout, by_tier(self.facts, self.layout)[1]))


def changed_on_cards(
    facts: ModelFacts,
    placement: Placement,
    name: str,
    value: int,
    *,
    has_gpu: bool,
    at_most: bool = False,
) -> Placement:
    """Return the placement with another value of a setting: of `COUNTS`, spread over the cards by
    the memory that each has left; of `prefetch`, on every card. `at_most`: or with the largest
    value that can be, where that is less.

    Raises BadInput for a value that cannot be, DoesNotFit with the card that has no room.
    """
    shares = _shares(facts, placement, has_gpu=has_gpu)
    if placement.offload not in ("weights", "max") and name != "blocks_without_recompute":
        raise BadInput(
            f"{name}={value}: with placement.offload={placement.offload} all weights stay on the "
            "cards, none stream"
        )
    if name == "prefetch":
        most = max(share.streams for share in shares) - 1
        if at_most and most < 1:
            return placement  # nothing is copied ahead
        after = _prefetched(shares, min(value, most) if at_most else value)
    else:
        most = sum(share.most(name) for share in shares)
        value = min(value, most) if at_most else value
        if not 0 <= value <= most:
            raise BadInput(f"{name}={value}: {most} {_WORDS[name]}, use 0 to {most}")
        after = _spread(placement, shares, name, value)
    return _placed(placement, shares, after)


def restored_on_cards(
    facts: ModelFacts, placement: Placement, wanted: Mapping[str, int], *, has_gpu: bool
) -> Placement:
    """Return the placement with as many of what `COUNTS` count as are wanted, where other changes
    have taken some from one card and there is room on another."""
    for name in COUNTS:
        held = getattr(placement.layout, name)
        for value in range(wanted[name], held, -1):
            with suppress(DoesNotFit):
                placement = changed_on_cards(
                    facts, placement, name, value, has_gpu=has_gpu, at_most=True
                )
                break
    return placement


def _shares(facts: ModelFacts, placement: Placement, *, has_gpu: bool) -> list[_Share]:
    blocks = tuple(row.card for row in placement.groups if row.kind == "block")
    dealt = Dealt(facts=facts, cards=blocks)

    def share_of(number: int) -> ModelFacts:
        return dealt.share_with_loss(number, placement.batch_rows, placement.head_dealing)

    found = (
        _Share(number, share_of(number), _layout_of(placement, number), has_gpu)
        for number in range(len(placement.cards))
    )
    return [_with_slots_as_wished(share, placement) for share in found]


def _with_slots_as_wished(share: _Share, placement: Placement) -> _Share:
    """Wish for the slots of the other cards where a card has one a streamed block, or none: it gets
    them when more blocks stream."""
    slots = share.layout.slots or 0
    if slots < share.streams:
        return share
    return share.with_count("slots", max(slots, placement.layout.slots or 0))


def _layout_of(placement: Placement, number: int) -> Layout:
    rows = [row for row in placement.groups if row.card == number]
    away = any(row.activations == "inputs_on_host" for row in rows)
    staying = sum(row.kind == "block" and row.activations == "inputs_on_device" for row in rows)
    return replace(
        _counted(placement.layout, rows),
        activations="host" if away else "device",
        activations_on_device=staying if away else 0,
        slots=placement.slots_of(number),
    )


def _counted(layout: Layout, rows: Sequence[GroupPlacement]) -> Layout:
    return replace(
        layout,
        device_groups=sum(row.weights == "device" for row in rows),
        resident_blocks=sum(row.resident and row.kind == "block" for row in rows),
        blocks_without_recompute=sum(row.activations == "kept" for row in rows),
    )


def counted(placement: Placement) -> Placement:
    """Return the placement with the counts of its table."""
    return replace(placement, layout=_counted(placement.layout, placement.groups))


def _prefetched(shares: Iterable[_Share], value: int) -> list[_Share]:
    found = list(shares)
    most = max(share.streams for share in found) - 1
    if not 1 <= value <= most:
        raise BadInput(
            f"prefetch={value}: {most + 1} blocks stream through a card at most"
            + (f", use 1 to {most}" if most > 0 else ", so none can be copied ahead")
        )
    return [share.with_count("slots", value + 1) for share in found]


def _spread(placement: Placement, shares: list[_Share], name: str, value: int) -> list[_Share]:
    """Take one more at a time where most memory is left, or one less where least is."""
    found = list(shares)
    total = sum(getattr(share.layout, name) for share in found)
    step = 1 if value > total else -1
    for _ in range(abs(value - total)):
        options: dict[int, _Share] = {}
        for at, share in enumerate(found):
            count = getattr(share.layout, name) + step
            if 0 <= count <= share.most(name):
                options[at] = share.with_count(name, count)
        best = _roomiest(placement, shares, options if step > 0 else _now(found, options), step)
        found[best] = options[best]
    return found


def _now(found: list[_Share], options: Mapping[int, _Share]) -> dict[int, _Share]:
    return {at: found[at] for at in options}


def _roomiest(
    placement: Placement, before: list[_Share], options: Mapping[int, _Share], step: int
) -> int:
    """Return the card with the most memory left (`step` 1) or the least."""

    def left(at: int) -> float:
        budget = placement.budget_of(at)
        taken = _device_bytes(placement, before[at], options[at])
        return float("inf") if budget is None else step * (budget - taken)

    return max(options, key=lambda at: (left(at), -at))


def _device_bytes(placement: Placement, before: _Share, after: _Share) -> int:
    """A card's predicted peak, once its share is as `after`."""
    planned = placement.cards[before.number].device_bytes
    return planned + after.need.device_bytes - before.need.device_bytes


def _placed(placement: Placement, before: list[_Share], after: list[_Share]) -> Placement:
    tables = [iter(table_of(share.facts, share.layout)) for share in after]
    rows: list[GroupPlacement] = [
        replace(next(tables[row.card]), card=row.card) for row in placement.groups
    ]
    cards = list(placement.cards)
    total = {part.name: getattr(placement.need, part.name) for part in fields(Footprint)}
    for was, share in zip(before, after, strict=True):
        need = _device_bytes(placement, was, share)
        budget = placement.budget_of(share.number)
        growth = need - cards[share.number].device_bytes
        if budget is not None and growth > 0 and need > budget:
            raise DoesNotFit(
                f"it takes {bytes_text(growth)} more of card {cards[share.number].index}, and of "
                f"its {bytes_text(budget)} the predicted peak of "
                f"{bytes_text(cards[share.number].device_bytes)} leaves "
                f"{bytes_text(max(0, budget - cards[share.number].device_bytes))}"
            )
        slots = slot_count(share.facts, share.layout)
        cards[share.number] = replace(cards[share.number], device_bytes=need, slots=slots)
        for name in total:
            total[name] += getattr(share.need, name) - getattr(was.need, name)
    layout = replace(placement.layout, slots=max(share.layout.slots or 0 for share in after))
    how: dict[str, Any] = {"cards": tuple(cards), "need": Footprint(**total), "layout": layout}
    return counted(replace(placement, groups=tuple(rows), **how))
