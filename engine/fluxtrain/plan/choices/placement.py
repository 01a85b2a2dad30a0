"""The placement rule: facts in, placement with reasons out. No torch, no device.

    placement = place(facts, Room(device_free_bytes=..., host_available_bytes=...), Wishes())

The rule, in this order:

1. The budget is `budget_bytes`, or the free device memory if that is less. Automatic choices plan
   with 90 % of it (the rest is for fragmentation and libraries), explicit ones with all of it; so
   with the available host memory.
2. Batch: the largest power of two, 32 at most and no more than the data's rows (one step an epoch),
   for which some layout but `max` fits; `max` only where no batch fits otherwise.
3. Chunk: rows for about 4096 tokens, enough to keep a GPU busy; halved until some layout fits.
4. Offload: `none` if it fits, else `weights`: first as many groups as fit live on the device with
   their gradients and optimizer states (host memory bandwidth binds before PCIe does, and such
   groups use neither), then as many of the other blocks' weights stay there as still fit. `max` as
   the last resort is filled up in the same way, and what is then left with the inputs of the last
   blocks (`plan/choices/boundaries.py`); asked for, it takes the least of the device.
   Without a GPU `auto` means `weights` (or `max`) with no residents: the blocks stream for real.

`place_for_any_rows` is the same rule for a model whose batch nobody knows yet: what does not
depend on the batch may take half of the budget, or 90 % where no less is possible.

Nothing fits: `DoesNotFit` says what is needed, what there is and which setting would fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.choices.boundaries import left_on_device
from fluxtrain.plan.choices.reasons import choices_of, refusal
from fluxtrain.plan.facts import (
    OFFLOADS,
    Boundaries,
    Embedding,
    Head,
    ModelFacts,
    Offload,
    Room,
    Wishes,
)
from fluxtrain.plan.footprint import Footprint, Layout, kept_count, slot_count
from fluxtrain.plan.search import AUTO_SHARE, Search
from fluxtrain.plan.spread import DeviceFirst
from fluxtrain.telemetry.events import ChoiceMade

__all__ = ["ModelFacts", "Placement", "Room", "RunPlacement", "Wishes", "place",
           "place_for_any_rows"]  # fmt: skip

SMALLEST_ACTIVATION_BYTES = 1 << 20
ACTIVATION_BYTES = 1 << 30  # for a chunk, where there is no budget


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the bytes go, what that is predicted to take, and why."""

    offload: Offload
    device_groups: int  # so many groups with states and gradients on the device
    boundaries: Boundaries  # where they wait between forward and backward
    boundaries_on_device: int = 0  # of so many last blocks they stay there all the same
    resident_blocks: int  # of so many of the other blocks the weights stay on the device
    slots: int  # shared by the blocks that are left
    kept_blocks: int  # first of the blocks with weights there, whose activations stay there too
    budget_bytes: int | None  # None without a GPU and without a wish
    need: Footprint  # predicted peaks
    chunk_rows: int | None  # None: chosen by `chunk_for` when a row is measured
    choices: tuple[ChoiceMade, ...]
    device_first: DeviceFirst = "embedding"  # which groups those are
    embedding: Embedding = "whole"  # what of one at home is copied to the device
    head: Head = "whole"  # how one at home is copied to the device
    deferred_moments: bool = False  # AdamW's, of groups at home: updated after all weights
    process_bytes: int = 0  # the program itself on the host, measured where a run is planned
    saving_bytes: int = 0  # weights of the device that are on the host while a file is written
    reached_bytes: int = 0  # what the process held at its fullest before this plan

    @property
    def parks(self) -> bool:
        """Do boundary activations wait on the host?"""
        return self.boundaries == "host"

    @property
    def device_bytes(self) -> int:
        """Predicted peak; activations are not in it where the rows are not known."""
        return self.need.device_bytes

    @property
    def host_bytes(self) -> int:
        """Predicted peak of the whole process, as far as the program itself was measured."""
        coming = self.need.host_bytes + self.process_bytes + self.saving_bytes
        return max(coming, self.reached_bytes)

    def chunk_for(self, row_bytes: int, rows: int) -> int:
        """Rows of a chunk whose saved activations (`row_bytes` each) take half of what is left."""
        left = ACTIVATION_BYTES
        if self.budget_bytes is not None:
            left = int(self.budget_bytes * AUTO_SHARE - self.device_bytes) // 2
        return max(1, min(rows, max(left, SMALLEST_ACTIVATION_BYTES) // max(1, row_bytes)))


@dataclass(frozen=True, kw_only=True)
class RunPlacement(Placement):
    """A placement for known rows."""

    batch_rows: int

    def layout(self, *, passes: int = 1, eager: bool = False) -> Layout:
        """What footprint and time are computed from; how the run steps is not the placement's."""
        return Layout(
            offload=self.offload,
            device_groups=self.device_groups,
            device_first=self.device_first,
            resident_blocks=self.resident_blocks,
            kept_blocks=self.kept_blocks,
            boundaries=self.boundaries,
            boundaries_on_device=self.boundaries_on_device,
            embedding=self.embedding,
            head=self.head,
            batch_rows=self.batch_rows,
            chunk_rows=self.chunk_rows or self.batch_rows,
            passes=passes,
            eager=eager,
            deferred_moments=self.deferred_moments,
            slots=self.slots,
        )


def place(facts: ModelFacts, room: Room, wishes: Wishes) -> RunPlacement:
    """Decide for rows as `facts.row` says.

    Raises `BadInput` for wishes that make no sense, `DoesNotFit` when nothing fits.
    """
    assert facts.row is not None, "without a row: place_for_any_rows"
    search, layout = _found(facts, room, wishes)
    rows = {"chunk_rows": layout.chunk_rows, "batch_rows": layout.batch_rows}
    return RunPlacement(**{**vars(_placement(search, layout, None)), **rows})


def place_for_any_rows(facts: ModelFacts, room: Room, wishes: Wishes) -> Placement:
    """Decide without knowing rows; `wishes.chunk_rows` is handed on. Raises as `place` does."""
    assert facts.row is None, "with a row: place"
    return _placement(*_found(facts, room, wishes), wishes.chunk_rows)


def _placement(search: Search, layout: Layout, chunk_rows: int | None) -> Placement:
    """What was found, without its rows."""
    facts = search.facts
    return Placement(
        offload=layout.offload,
        device_groups=layout.device_groups,
        device_first=layout.device_first,
        boundaries="host" if layout.parks else "device",
        boundaries_on_device=layout.boundaries_on_device,
        resident_blocks=layout.resident_blocks,
        slots=slot_count(facts, layout),
        kept_blocks=kept_count(facts, layout),
        deferred_moments=layout.deferred_moments,
        budget_bytes=search.budget_bytes,
        need=search.need(layout),
        chunk_rows=chunk_rows,
        embedding=layout.embedding,
        head=layout.head,
        choices=choices_of(search, layout),
    )


def _found(facts: ModelFacts, room: Room, wishes: Wishes) -> tuple[Search, Layout]:
    if wishes.offload not in ("auto", *OFFLOADS):
        raise BadInput(f"offload is {wishes.offload!r}: use one of auto, {', '.join(OFFLOADS)}")
    counts = {"batch_rows": 1, "chunk_rows": 1, "budget_bytes": 1, "slots": 1}
    for name, least in {
        **counts,
        "device_groups": 0,
        "resident_blocks": 0,
        "kept_blocks": 0,
    }.items():
        value = getattr(wishes, name)
        if value is not None and value < least:
            raise BadInput(f"{name} is {value}: use at least {least}, or leave it out")
    if wishes.boundaries not in ("auto", "device", "host"):
        raise BadInput(f"boundaries is {wishes.boundaries!r}: use auto, device or host")
    if wishes.device_first not in (None, "embedding", "blocks"):
        raise BadInput(f"device_first is {wishes.device_first!r}: use embedding or blocks")
    if wishes.embedding not in ("auto", "whole", "rows"):
        raise BadInput(f"embedding is {wishes.embedding!r}: use auto, whole or rows")
    if wishes.head not in ("auto", "whole", "slices"):
        raise BadInput(f"head is {wishes.head!r}: use auto, whole or slices")
    search = Search(facts, room, wishes)
    layout = search.find()
    if layout is None:
        raise DoesNotFit(refusal(search))
    limit = search.limits.spare_bytes
    if limit is not None and search.leaves_boundaries(layout):
        layout = left_on_device(facts, layout, limit)
    return search, layout
