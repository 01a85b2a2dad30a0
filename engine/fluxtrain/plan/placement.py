"""The simple placement rule: facts in, placement with reasons out. No torch, no device.

    placement = place(facts, Room(device_free_bytes=..., host_available_bytes=...), Wishes())

The rule, in this order:

1. The budget is `budget_bytes`, or the free device memory if that is less. Automatic choices plan
   with 90 % of it (the rest is for fragmentation and libraries), explicit ones with all of it; the
   host's arenas may take 90 % of the available host memory.
2. Batch: the largest power of two, 32 at most and no more than the data's rows (one step an epoch),
   for which some layout fits.
3. Chunk: rows for about 4096 tokens, enough to keep a GPU busy; halved until some layout fits.
4. Offload: the first of none, optimizer, weights, max that fits. `weights` keeps as many blocks on
   the device as fit. Without a GPU `auto` means `weights` (or `max`): the blocks stream for real.

Nothing fits: `DoesNotFit` says what is needed, what there is and which setting would fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.choice import Choice
from fluxtrain.plan.footprint import (
    OFFLOADS,
    STATE_BYTES,
    Footprint,
    Layout,
    ModelFacts,
    Offload,
    footprint,
)
from fluxtrain.units import bytes_text

__all__ = ["ModelFacts", "Placement", "Room", "Wishes", "place"]

AUTO_SHARE = 0.9
HOST_SHARE = 0.9
BATCH_LIMIT_ROWS = 32
CHUNK_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the machine has now."""

    device_free_bytes: int | None  # None: no GPU, the device is a buffer in host memory
    host_available_bytes: int | None  # None: unknown, taken as enough


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user asked for; None (and `auto`) leaves it to the rule."""

    offload: Literal["auto", "none", "optimizer", "weights", "max"] = "auto"
    batch_rows: int | None = None
    chunk_rows: int | None = None
    resident_blocks: int | None = None
    budget_bytes: int | None = None
    data_rows: int | None = None  # rows of one epoch


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the bytes go, what that is predicted to take, and why."""

    offload: Offload
    resident_blocks: int
    slots: int
    batch_rows: int
    chunk_rows: int
    budget_bytes: int | None  # None without a GPU and without a wish
    device_bytes: int  # predicted peak
    host_bytes: int  # predicted peak
    choices: dict[str, Choice[str]]


@dataclass(frozen=True)
class _Limits:
    """Bytes that a layout may take; None is no limit."""

    device_bytes: int | None
    host_bytes: int | None

    def hold(self, need: Footprint) -> bool:
        """Whether both peaks stay within."""
        on_device = self.device_bytes is None or need.device_bytes <= self.device_bytes
        return on_device and (self.host_bytes is None or need.host_bytes <= self.host_bytes)


def place(facts: ModelFacts, room: Room, wishes: Wishes) -> Placement:
    """Decide. Raises `BadInput` for wishes that contradict, `DoesNotFit` when nothing fits."""
    _check(facts, wishes)
    layout = _find(facts, room, wishes)
    if layout is None:
        raise DoesNotFit(_refusal(facts, room, wishes))
    need = _need(facts, room, layout)
    return Placement(
        offload=layout.offload,
        resident_blocks=layout.resident_blocks,
        slots=layout.slots(facts.layers),
        batch_rows=layout.batch_rows,
        chunk_rows=layout.chunk_rows,
        budget_bytes=_budget(room, wishes),
        device_bytes=need.device_bytes,
        host_bytes=need.host_bytes,
        choices=_choices(facts, room, wishes, layout),
    )


def _check(facts: ModelFacts, wishes: Wishes) -> None:
    if wishes.offload not in ("auto", *OFFLOADS):
        raise BadInput(f"offload is {wishes.offload!r}: use one of auto, {', '.join(OFFLOADS)}")
    if facts.dtype_bytes not in STATE_BYTES:
        raise BadInput(f"weights of {facts.dtype_bytes} bytes: train in bf16 or fp32 (model.dtype)")
    counts = {"batch_rows": 1, "chunk_rows": 1, "budget_bytes": 1, "resident_blocks": 0}
    for name, least in counts.items():
        value = getattr(wishes, name)
        if value is not None and value < least:
            raise BadInput(f"{name} is {value}: use at least {least}, or leave it on auto")
    resident = wishes.resident_blocks
    if resident is not None and resident > facts.layers:
        raise BadInput(f"resident_blocks is {resident} and the model has {facts.layers} blocks")


def _find(facts: ModelFacts, room: Room, wishes: Wishes) -> Layout | None:
    limits = _limits(room, wishes)
    for layout in _candidates(facts, room, wishes):
        if limits.hold(_need(facts, room, layout)):
            return _with_residents(facts, room, wishes, layout, limits)
    return None


def _candidates(facts: ModelFacts, room: Room, wishes: Wishes) -> Iterator[Layout]:
    """Layouts in the order of preference, with the least resident blocks."""
    for batch_rows in _batches(wishes):
        for chunk_rows in _chunks(facts, wishes, batch_rows):
            for offload in _offloads(room, wishes):
                streams = offload in ("weights", "max")
                resident = (wishes.resident_blocks or 0) if streams else facts.layers
                yield Layout(
                    offload=offload,
                    resident_blocks=resident,
                    batch_rows=batch_rows,
                    chunk_rows=chunk_rows,
                )


def _batches(wishes: Wishes) -> list[int]:
    if wishes.batch_rows is not None:
        return [wishes.batch_rows]
    most = BATCH_LIMIT_ROWS if wishes.data_rows is None else min(BATCH_LIMIT_ROWS, wishes.data_rows)
    return _halvings(_power_of_two(most))


def _chunks(facts: ModelFacts, wishes: Wishes, batch_rows: int) -> list[int]:
    if wishes.chunk_rows is not None:
        return [min(wishes.chunk_rows, batch_rows)]
    return _halvings(min(batch_rows, _power_of_two(CHUNK_TOKENS // facts.sequence_length)))


def _halvings(rows: int) -> list[int]:
    """12, 6, 3, 1."""
    return [rows >> shift for shift in range(rows.bit_length())]


def _power_of_two(rows: int) -> int:
    """The largest that is no more than `rows`; at least 1."""
    return 1 << (max(1, rows).bit_length() - 1)


def _offloads(room: Room, wishes: Wishes) -> tuple[Offload, ...]:
    if wishes.offload != "auto":
        return (wishes.offload,)
    streaming: tuple[Offload, ...] = ("weights", "max")
    if room.device_free_bytes is None or wishes.resident_blocks is not None:
        return streaming
    return OFFLOADS


def _with_residents(
    facts: ModelFacts, room: Room, wishes: Wishes, layout: Layout, limits: _Limits
) -> Layout:
    """The same layout with as many resident blocks as fit, where that is left to the rule."""
    fixed = wishes.resident_blocks is not None or room.device_free_bytes is None
    if fixed or layout.offload != "weights":
        return layout
    for resident in range(facts.layers, 0, -1):
        fuller = replace(layout, resident_blocks=resident)
        if limits.hold(_need(facts, room, fuller)):
            return fuller
    return layout


def _need(facts: ModelFacts, room: Room, layout: Layout) -> Footprint:
    return footprint(facts, layout, has_gpu=room.device_free_bytes is not None)


def _budget(room: Room, wishes: Wishes) -> int | None:
    known = [size for size in (wishes.budget_bytes, room.device_free_bytes) if size is not None]
    return min(known, default=None)


def _limits(room: Room, wishes: Wishes) -> _Limits:
    budget, host = _budget(room, wishes), room.host_available_bytes
    explicit = wishes.offload != "auto" and None not in (wishes.batch_rows, wishes.chunk_rows)
    share = 1.0 if explicit else AUTO_SHARE
    return _Limits(
        None if budget is None else int(budget * share),
        None if host is None else int(host * HOST_SHARE),
    )


def _refusal(facts: ModelFacts, room: Room, wishes: Wishes) -> str:
    """What is needed, what there is, and the first setting that would help."""
    smallest = list(_candidates(facts, room, wishes))[-1]
    need, limits = _need(facts, room, smallest), _limits(room, wishes)
    parts = []
    for name, needed, limit in (
        ("device", need.device_bytes, limits.device_bytes),
        ("host", need.host_bytes, limits.host_bytes),
    ):
        if limit is not None and needed > limit:
            parts.append(
                f"{bytes_text(needed)} of {name} memory and {bytes_text(limit)} may be used"
            )
    return (
        f"the model does not fit: offload={smallest.offload} with {smallest.batch_rows} rows in "
        f"chunks of {smallest.chunk_rows} needs {', and '.join(parts)}: "
        f"{_cure(facts, room, wishes)}"
    )


def _cure(facts: ModelFacts, room: Room, wishes: Wishes) -> str:
    relaxed: list[tuple[str, Wishes]] = [
        ("placement.chunk_rows", replace(wishes, chunk_rows=None)),
        ("placement.offload", replace(wishes, offload="auto")),
        ("train.batch_rows", replace(wishes, batch_rows=None)),
        ("placement.budget_gib", replace(wishes, budget_bytes=None)),
        ("all of placement", Wishes(data_rows=wishes.data_rows)),
    ]
    for name, easier in relaxed:
        layout = _find(facts, room, easier) if easier != wishes else None
        if layout is not None:
            found = {
                "placement.chunk_rows": f"={layout.chunk_rows} fits",
                "placement.offload": f"={layout.offload} fits",
                "train.batch_rows": f"={layout.batch_rows} fits",
            }
            return name + found.get(name, " left out fits")
    return (
        f"set data.sequence_length below {facts.sequence_length}, close other programs, or take a "
        "smaller model or a machine with more memory"
    )


def _choices(
    facts: ModelFacts, room: Room, wishes: Wishes, layout: Layout
) -> dict[str, Choice[str]]:
    tokens = layout.chunk_rows * facts.sequence_length
    batch, chunk = "as set", "as set"
    if wishes.batch_rows is None:
        batch = _batch_reason(facts, room, wishes, layout)
    if wishes.chunk_rows is None:
        chunk = f"{tokens} tokens at once; about {CHUNK_TOKENS} keep a device busy"
        if tokens * 2 <= CHUNK_TOKENS and layout.chunk_rows < layout.batch_rows:
            chunk = f"{tokens} tokens at once; a larger chunk does not fit"
    return {
        "offload": Choice(layout.offload, _offload_reason(facts, room, wishes, layout)),
        "resident_blocks": Choice(
            str(layout.resident_blocks), _resident_reason(facts, room, wishes, layout)
        ),
        "batch_rows": Choice(str(layout.batch_rows), batch),
        "chunk_rows": Choice(str(layout.chunk_rows), chunk),
    }


def _batch_reason(facts: ModelFacts, room: Room, wishes: Wishes, layout: Layout) -> str:
    if layout.batch_rows == BATCH_LIMIT_ROWS:
        return f"{BATCH_LIMIT_ROWS} rows fit, the most that is chosen by itself"
    if wishes.data_rows is not None and layout.batch_rows * 2 > wishes.data_rows:
        return f"the data has {wishes.data_rows} rows, and each epoch needs a step"
    twice = replace(wishes, batch_rows=layout.batch_rows * 2)
    smallest = list(_candidates(facts, room, twice))[-1]
    need = _need(facts, room, smallest)
    return f"{layout.batch_rows * 2} rows would need {_room_text(need, room, wishes)}"


def _offload_reason(facts: ModelFacts, room: Room, wishes: Wishes, layout: Layout) -> str:
    need = _need(facts, room, layout)
    if wishes.offload != "auto":
        return f"as set; takes {_room_text(need, room, wishes)}"
    if room.device_free_bytes is None and layout.offload == "weights":
        return f"without a GPU the blocks stream through {layout.slots(facts.layers)} buffers"
    rejected = OFFLOADS[: OFFLOADS.index(layout.offload)]
    if not rejected or room.device_free_bytes is None:
        return f"takes {_room_text(need, room, wishes)}"
    fuller = replace(layout, offload=rejected[-1], resident_blocks=facts.layers)
    if rejected[-1] == "weights":
        fuller = replace(fuller, resident_blocks=0)
    over = _need(facts, room, fuller)
    return (
        f"{rejected[-1]} would need {_room_text(over, room, wishes)}; "
        f"{layout.offload} takes {bytes_text(need.device_bytes)} and "
        f"{bytes_text(need.host_bytes)} of host memory"
    )


def _resident_reason(facts: ModelFacts, room: Room, wishes: Wishes, layout: Layout) -> str:
    if wishes.resident_blocks is not None:
        return "as set"
    if layout.offload in ("none", "optimizer"):
        return f"{layout.offload} keeps all {facts.layers} blocks on the device"
    if layout.offload == "max":
        return "max streams every block"
    if room.device_free_bytes is None:
        return "without a GPU nothing is gained by keeping a second copy"
    if layout.resident_blocks == facts.layers:
        return f"all {facts.layers} blocks fit"
    one_more = replace(layout, resident_blocks=layout.resident_blocks + 1)
    need = _need(facts, room, one_more)
    return f"one more would need {_room_text(need, room, wishes)}"


def _room_text(need: Footprint, room: Room, wishes: Wishes) -> str:
    """`need` beside what there is of the resource that it presses harder."""
    limits = _limits(room, wishes)
    device = need.device_bytes / limits.device_bytes if limits.device_bytes else 0.0
    host = need.host_bytes / limits.host_bytes if limits.host_bytes else 0.0
    if host > device:
        return f"{bytes_text(need.host_bytes)} of {bytes_text(limits.host_bytes)} host memory"
    return f"{bytes_text(need.device_bytes)} of {bytes_text(limits.device_bytes)} device memory"
