"""Changes of a running training as edits of the placement table. Pure: settings in, settings out.

A count is spread over the cards: one row more where the most memory is left, one less where the
least is. On a card the rows come in the planner's order. What other settings count on a card stays
as far as it can: fewer blocks on the host can be resident, fewer that stay can keep activations,
and inputs that wait on the device give way where a card would take more than was planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.group_placement import GroupPlacement, Tier
from fluxtrain.train.live.live_run import LiveRun, offloads_inputs, streamed
from fluxtrain.train.live.settings import Change, LiveSettings, SettingName, count_of
from fluxtrain.units import bytes_text

_Rows = list[GroupPlacement]


@dataclass(frozen=True, kw_only=True)
class MemoryInUse:
    """Memory in use now; None is not known."""

    device_peak_bytes: tuple[int, ...] | None = None  # measured on each card; None: as predicted
    host_available_bytes: int | None = None


def settings_after(
    run: LiveRun, now: LiveSettings, change: Change, memory: MemoryInUse, *, share: float = 1.0
) -> LiveSettings:
    """Return the settings with `change` made; `share` of each card's budget may be used.

    Raises BadInput when it makes no sense for this run, DoesNotFit when there is no room for it.
    """
    if now.value(change.name) == change.value:
        raise BadInput(f"{change.name} is {change.value} already")
    new = changed(run, now, change)
    refuse_without_room(run, now, new, memory, share=share)
    return new


def changed(run: LiveRun, now: LiveSettings, change: Change) -> LiveSettings:
    """Return the settings with `change` made, whether they fit or not. Raises BadInput for an
    impossible value."""
    _check_range(run, now, change)
    if change.name == "chunk_rows":
        new = replace(now, chunk_rows=change.value)
    elif change.name == "prefetch":
        new = replace(now, slots=(change.value + 1,) * run.cards)
    else:
        return _spread(run, now, change)
    for card in range(run.cards):
        new = _inputs_give_way(run, new, card)
    return new


def with_count(
    run: LiveRun, settings: LiveSettings, card: int, name: SettingName, count: int
) -> LiveSettings:
    """Return the settings with another count on one card, and with its other counts as far as they
    stay possible."""
    rows = settings.on_card(card)
    resident = count_of(rows, "resident_blocks")
    kept = count_of(rows, "blocks_without_recompute")
    offloads = offloads_inputs(rows)
    if name == "device_groups":
        rows = _with_device(run, rows, run.first_on_device(rows, count))
    if name in ("device_groups", "resident_blocks"):
        host = [row for row in rows if row.kind == "block" and row.weights != "device"]
        resident = count if name == "resident_blocks" else resident
        rows = _with_resident(rows, run.first_resident(host, resident))
    if name == "blocks_without_recompute":
        kept = count
    if name == "activations_on_device":
        return _put(settings, card, _with_activations(rows, kept, True, count))
    settings = _put(settings, card, _with_activations(rows, kept, offloads, 0))
    return _inputs_give_way(run, settings, card)


def _spread(run: LiveRun, now: LiveSettings, change: Change) -> LiveSettings:
    """Return the settings with a count over all cards changed row by row."""
    name, new = change.name, now
    if run.cards == 1:
        return with_count(run, now, 0, name, change.value)
    step = 1 if change.value > now.value(name) else -1

    def left(of: LiveSettings, card: int) -> float:
        budget = run.placement.budget_of(card)
        return float("inf") if budget is None else budget - run.device_bytes(of, card)

    for _ in range(abs(change.value - now.value(name))):
        options: dict[int, LiveSettings] = {}
        for card in range(run.cards):
            count = count_of(new.on_card(card), name) + step
            if 0 <= count <= _most_on(new.on_card(card), name):
                options[card] = with_count(run, new, card, name, count)
        room = {card: step * left(options[card] if step > 0 else new, card) for card in options}
        new = options[max(options, key=lambda card: (room[card], -card))]
    return new


def _with_device(
    run: LiveRun, rows: Sequence[GroupPlacement], chosen: Iterable[GroupPlacement]
) -> _Rows:
    """Move the chosen groups to the device, and groups that leave it to where they were planned."""
    names = {row.name for row in chosen}
    planned = {row.name: row for row in run.planned.rows}
    return [
        _on_device(row) if row.name in names else _off_device(row, planned[row.name])
        for row in rows
    ]


def _on_device(row: GroupPlacement) -> GroupPlacement:
    return replace(row, weights="device", state="device", gradients="device", resident=False)


def _off_device(row: GroupPlacement, planned: GroupPlacement) -> GroupPlacement:
    """Move a group to the host; one that is no block, and is copied whole, has its own slot. What
    was planned on disk goes back there."""
    if row.weights != "device":
        return row
    resident = row.kind == "edge" and "whole" in row.transfers
    weights: Tier = "disk" if planned.is_on("disk") else "host"
    state: Tier = "disk" if planned.is_on("disk", "state") else "host"
    return replace(row, weights=weights, state=state, gradients="host", resident=resident)


def _with_resident(rows: Sequence[GroupPlacement], chosen: Iterable[GroupPlacement]) -> _Rows:
    names = {row.name for row in chosen}
    return [
        replace(row, resident=row.name in names) if row.kind == "block" else row for row in rows
    ]


def _with_activations(
    rows: Sequence[GroupPlacement], kept: int, offloads: bool, staying: int
) -> _Rows:
    """Let the first `kept` blocks that can keep their activations. The inputs of other blocks stay
    on the device; where inputs are offloaded, only those of the last `staying` blocks do."""
    keeping = [at for at, row in enumerate(rows) if _can_keep(row)][:kept]
    others = [at for at, row in enumerate(rows) if row.kind == "block" and at not in keeping]
    first = 0 if not offloads else [*others[-staying:], len(rows)][0] if staying else len(rows)
    found: _Rows = []
    for at, row in enumerate(rows):
        if at in keeping:
            found.append(replace(row, activations="kept"))
        elif at < first:
            found.append(replace(row, activations="inputs_on_host"))
        else:
            found.append(replace(row, activations="inputs_on_device"))
    return found


def _can_keep(row: GroupPlacement) -> bool:
    """Return whether a block's weights stay on the device, where saved activations
    refer to them."""
    return row.kind == "block" and (row.resident or row.weights == "device")


def _inputs_give_way(run: LiveRun, settings: LiveSettings, card: int) -> LiveSettings:
    """Offload inputs of further blocks until the card takes no more than was planned: inputs get
    the memory that everything else leaves. They come back when more is left."""
    rows = settings.on_card(card)
    if not offloads_inputs(rows):
        return settings
    kept = count_of(rows, "blocks_without_recompute")
    most = count_of(run.planned.on_card(card), "activations_on_device")
    staying = run.inputs_with_room(settings, card, most)
    return _put(settings, card, _with_activations(rows, kept, True, staying))


def _put(settings: LiveSettings, card: int, rows: Iterable[GroupPlacement]) -> LiveSettings:
    """Return the settings with other rows on one card, in their order."""
    new = iter(rows)
    return replace(
        settings, rows=tuple(next(new) if row.card == card else row for row in settings.rows)
    )


# -- what is possible


def _most_on(rows: Sequence[GroupPlacement], name: SettingName) -> int:
    """Return the largest count on a card with these rows."""
    if name == "device_groups":
        return len(rows)
    if name == "resident_blocks":
        return sum(row.kind == "block" and row.weights != "device" for row in rows)
    return sum(map(_can_keep, rows))


def _check_range(run: LiveRun, now: LiveSettings, change: Change) -> None:
    name = change.name
    if name == "chunk_rows":
        _between(change, 1, run.batch_rows, f"a backward pass has {run.batch_rows} rows")
        return
    if not run.streams and name != "blocks_without_recompute":
        raise BadInput(
            f"{change}: with placement.offload={run.placement.offload} all weights stay on the "
            "device, none stream"
        )
    if name == "prefetch":
        most = max(streamed(now.rows, card) for card in range(run.cards))
        where = " through one card" if run.cards > 1 else ""
        if most < 2:
            raise BadInput(f"{change}: {most} blocks stream{where}, so none can be copied ahead")
        _between(change, 1, most - 1, f"{most} blocks stream{where}")
        return
    if name == "device_groups" and run.facts.processes > 1:
        raise BadInput(
            f"{change}: {run.facts.processes} processes exchange the gradients of embedding and "
            "head in one way where they live on the device and in another on the host: set "
            "placement.device_groups for all of them, before they start"
        )
    most = sum(_most_on(now.on_card(card), name) for card in range(run.cards))
    because = {
        "device_groups": f"the model has {most} groups",
        "resident_blocks": f"{most} blocks are on the host",
    }
    _between(change, 0, most, because.get(name, f"weights of {most} blocks stay on the device"))


def _between(change: Change, low: int, high: int, because: str) -> None:
    if not low <= change.value <= high:
        raise BadInput(f"{change}: {because}, use {low} to {high}")


def refuse_without_room(
    run: LiveRun,
    now: LiveSettings,
    new: LiveSettings,
    memory: MemoryInUse,
    *,
    share: float = 1.0,
) -> None:
    """Raise DoesNotFit, with the numbers, when `new` is predicted to exceed `share` of a card's
    budget, or what is free on the host."""
    for card in range(run.cards):
        given, predicted = run.placement.budget_of(card), run.device_bytes(now, card)
        growth = run.device_bytes(new, card) - predicted
        if given is None or growth <= 0:
            continue
        budget, measured = int(given * share), memory.device_peak_bytes
        peak = predicted if measured is None else measured[card]
        if peak + growth > budget:
            raise DoesNotFit(
                f"it takes {bytes_text(growth)} more of {run.name_of(card)}, and of its budget of "
                f"{bytes_text(budget)} the {'predicted' if measured is None else 'measured'} peak "
                f"of {bytes_text(peak)} leaves {bytes_text(max(0, budget - peak))}"
            )
    refuse_without_host_room(run, now, new, memory)


def refuse_without_host_room(
    run: LiveRun, now: LiveSettings, new: LiveSettings, memory: MemoryInUse
) -> None:
    """Raise DoesNotFit when `new` is predicted to take more of the host than is free there."""
    more = run.host_bytes(new) - run.host_bytes(now)
    available = memory.host_available_bytes
    if available is not None and more > max(0, available):
        raise DoesNotFit(
            f"it takes {bytes_text(more)} more host memory, and {bytes_text(available)} is free"
        )
