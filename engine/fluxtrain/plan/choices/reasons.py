"""Why a layout was chosen, or none was, in words with numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fluxtrain.events.choices import setting_name
from fluxtrain.events.events import ChoiceMade
from fluxtrain.plan.choices.activations import staying_words
from fluxtrain.plan.cost.moments import moments_choice
from fluxtrain.plan.cost.prefetch import without_times
from fluxtrain.plan.footprint import (
    Layout,
    by_tier,
    embedding_copied,
    head_copied,
    keepable_count,
    kept_count,
    slot_count,
)
from fluxtrain.plan.heads import comes_apart
from fluxtrain.plan.heads import reason as head_reason
from fluxtrain.plan.request import PlacementRequest, RunRequest
from fluxtrain.plan.search import BATCH_LIMIT_ROWS, CHUNK_TOKENS, Search
from fluxtrain.plan.tables import reason as embedding_reason
from fluxtrain.units import bytes_text

SHORTEST_TOKENS = 32  # nobody is told to train on less


def choices_of(search: Search, layout: Layout) -> tuple[ChoiceMade, ...]:
    """Every choice with its reason; rows only where they are known."""
    because: dict[str, tuple[str | int, str]] = {
        "offload": (layout.offload, _offload(search, layout)),
        "device_groups": (layout.device_groups, _device_groups(search, layout)),
        "resident_blocks": (layout.resident_blocks, _resident_blocks(search, layout)),
    }
    if search.request.blocks_without_recompute != "auto":
        kept = kept_count(search.facts, layout)
        because["blocks_without_recompute"] = (kept, asked_to_keep(search, layout))
    staying = staying_words(search.facts, layout)
    if staying:
        because["activations"] = ("host", staying)
    if search.facts.row is not None:
        because["batch_rows"] = (layout.batch_rows, _batch(search, layout))
        tokens = layout.chunk_rows * search.facts.row.sequence_length
        because["chunk_rows"] = (layout.chunk_rows, _chunk(search, layout, tokens))
    told = (
        ChoiceMade(name=setting_name(name), value=str(value), because=reason)
        for name, (value, reason) in because.items()
    )
    moments = (moments_choice(search.facts, layout, None, is_set=True),)
    return (
        *told,
        *embedding_choice(search, layout),
        *head_choice(search, layout),
        *(moments if search.request.deferred_moments is not None else ()),
        *without_times(search.facts, layout),
    )


def embedding_choice(search: Search, layout: Layout) -> tuple[ChoiceMade, ...]:
    """What of the embedding is copied, where that is a question."""
    facts, request = search.facts, search.request
    if facts.table is None and request.embedding == "auto":
        return ()
    on_host = facts.table in by_tier(facts, layout)[1]
    because = embedding_reason(facts, request, layout.batch_rows, on_host=on_host)
    copied = embedding_copied(facts, layout)
    return (ChoiceMade(name="placement.embedding", value=copied, because=because),)


def head_choice(search: Search, layout: Layout) -> tuple[ChoiceMade, ...]:
    """How the head is copied, where that is a question."""
    facts, request = search.facts, search.request
    if request.head == "auto" and not comes_apart(facts):
        return ()
    names = {group.name for group in by_tier(facts, layout)[1]}
    on_host = facts.head is not None and facts.head.group in names
    by_rows = embedding_copied(facts, layout) == "rows"
    because = head_reason(facts, request, layout.head, on_host=on_host, by_rows=by_rows)
    return (ChoiceMade(name="placement.head", value=head_copied(facts, layout), because=because),)


def without_effect(request: RunRequest, choices: Iterable[ChoiceMade]) -> list[str]:
    """Say which ways of copying were asked for and are not taken, and why."""
    parts = {"placement.embedding": request.embedding, "placement.head": request.head}
    return [
        f"{choice.name.removeprefix('placement.')}={parts[choice.name]!r} has no effect: "
        f"{choice.because}"
        for choice in choices
        if choice.value == "whole" and parts.get(choice.name, "auto") in ("rows", "chunks")
    ]


def refusal(search: Search) -> str:
    """What is needed, what there is, and the first setting that would help."""
    layout = search.nearest()
    need, limits = search.need(layout), search.limits
    parts = [
        f"{bytes_text(needed)} of {name} memory and {bytes_text(limit)} may be used"
        for name, needed, limit in (
            ("device", need.device_bytes, limits.device_bytes),
            ("host", need.host_bytes, limits.host_bytes),
        )
        if limit is not None and needed > limit
    ]
    return (
        f"the model does not fit: {_described(search, layout)} needs {', and '.join(parts)}: "
        f"{_cure(search)}"
    )


def _described(search: Search, layout: Layout) -> str:
    name = "offload" if search.facts.row is None else "placement.offload"  # in `wrap`, in a run
    text = f"{name}={layout.offload}"
    if layout.device_groups and layout.offload != "none":
        text += f" with {layout.device_groups} of {len(search.facts.groups)} groups on the device"
    if search.facts.row is not None:
        text += f", {layout.batch_rows} rows in chunks of {layout.chunk_rows}"
    return text


@dataclass(frozen=True)
class _Setting:
    """What the user may change: its name in a run's configuration and in `wrap`."""

    in_run: str
    in_wrap: str
    easier: RunRequest
    chosen: str | None = None  # the layout's field that says what would fit


def _cure(search: Search) -> str:
    request, row = search.request, search.facts.row
    own = search.facts.has_masters
    settings = _settings(request)
    if not own:  # another package's optimizer has no states on the host
        settings = tuple(replace(s, easier=replace(s.easier, offload="none")) for s in settings)
    for setting in settings:
        if setting.easier == request:
            continue
        layout = replace(search, request=setting.easier).find()
        if layout is not None:
            value = _named(search, setting, layout)
            found = " left out fits" if value is None else f"={value} fits"
            return (setting.in_wrap if row is None else setting.in_run) + found
    narrow = replace(search, facts=search.facts.with_states("8bit"))
    if not own:
        narrow = replace(narrow, request=replace(request, offload="auto"))
    layout = narrow.find()
    if layout is not None:
        need = narrow.need(layout)
        name = "states" if row is None else "train.states"
        with_own = "" if own else "train.optimizer=adamw with "
        return (
            f"{with_own}{name}=8bit fits: optimizer states of 8 bits "
            f"take {bytes_text(need.host_bytes)} of host memory"
        )
    if row is not None:
        length = row.sequence_length // 2
        while length >= SHORTEST_TOKENS:
            facts = replace(search.facts, row=row.of_length(length))
            if replace(search, facts=facts).find() is not None:
                return f"data.sequence_length={length} fits"
            length //= 2
    return "close other programs, or take a smaller model or a machine with more memory"


def _settings(request: RunRequest) -> tuple[_Setting, ...]:
    """What may be left out, one after another, those first that cost the least."""
    unplaced = replace(request, **vars(PlacementRequest()))
    device, resident = "device_groups", "resident_blocks"
    kept = "blocks_without_recompute"
    return (
        _Setting(
            "placement.chunk_rows", "chunk_rows", replace(request, chunk_rows="auto"), "chunk_rows"
        ),
        _Setting(f"placement.{kept}", kept, replace(request, blocks_without_recompute="auto")),
        _Setting("placement.prefetch", "prefetch", replace(request, prefetch="auto")),
        _Setting(f"placement.{resident}", resident, replace(request, resident_blocks="auto")),
        _Setting(f"placement.{device}", device, replace(request, device_groups="auto")),
        _Setting(
            f"placement.{device} and placement.{resident}",
            f"{device} and {resident}",
            replace(request, device_groups="auto", resident_blocks="auto"),
        ),
        _Setting("placement.offload", "offload", replace(request, offload="auto"), "offload"),
        _Setting("train.batch_rows", "batch_rows", replace(request, batch_rows=None), "batch_rows"),
        _Setting("train.accumulation", "passes", replace(request, passes=1), "passes"),
        _Setting("placement.budget_gib", "budget_gib", replace(request, budget_gib=None)),
        _Setting("all of placement", "every argument", unplaced),
        _Setting(
            "train.batch_rows and all of placement",
            "every argument",
            replace(unplaced, batch_rows=None),
        ),
    )


def _named(search: Search, setting: _Setting, layout: Layout) -> Any:
    """What the setting has in `layout`, if asking for just that fits too: where it is left to the
    rule, `max` puts parts on the device where that saves slots; asked for, it does not."""
    if setting.chosen is None:
        return None
    value = getattr(layout, setting.chosen)
    asked = replace(setting.easier, **{setting.chosen: value})
    return None if replace(search, request=asked).find() is None else value


def _offload(search: Search, layout: Layout) -> str:
    need = search.need(layout)
    if search.request.offload != "auto":
        return f"as set; takes {_room(search, layout)}"
    if layout.offload == "none":
        return f"takes {_room(search, layout, spare=True)}"
    takes = (
        f"{layout.offload} takes {bytes_text(need.device_bytes)} and "
        f"{bytes_text(need.host_bytes)} of host memory"
    )
    if layout.offload == "max":
        fewest = replace(search, request=replace(search.request, offload="weights")).nearest()
        return f"{_described(search, fewest)} would need {_room(search, fewest)}; {takes}"
    if not search.capacity.has_gpu:
        slots = slot_count(search.facts, layout)
        return f"without a GPU the blocks stream through {slots} buffers"
    everything = replace(layout, offload="none", resident_blocks=0)
    return f"none would need {_room(search, everything, spare=True)}; {takes}"


def _device_groups(search: Search, layout: Layout) -> str:
    groups = search.facts.groups
    if layout.offload == "none":
        return f"none has all {len(groups)} on the device"
    if search.request.device_groups != "auto":
        return _as_set(search.request.device_groups, layout.device_groups)
    if not search.capacity.has_gpu:
        return "without a GPU nothing is gained by updating a group elsewhere"
    if not search.fills(layout):
        return f"{layout.offload} has every group on the host"
    if layout.device_groups == len(groups):
        return f"all {len(groups)} fit"
    following = search.one_more_group(layout)
    before = by_tier(search.facts, layout)[0]
    name = next(g.name for g in by_tier(search.facts, following)[0] if g not in before)
    return (
        "their updates need no host memory and no copies; "
        f"{name} as well would need {_room(search, following, spare=True)}"
    )


def _resident_blocks(search: Search, layout: Layout) -> str:
    on_host = search.host_blocks(layout.device_groups, layout.device_first)
    if layout.offload == "none" or not on_host:
        return "every block lives on the device"
    if layout.offload == "optimizer":
        return f"optimizer keeps the weights of all {on_host} blocks on the device"
    if search.request.resident_blocks != "auto":
        return _as_set(search.request.resident_blocks, layout.resident_blocks)
    if not search.capacity.has_gpu:
        return "without a GPU nothing is gained by keeping a second copy"
    if not search.fills(layout):
        return f"{layout.offload} streams every block"
    if layout.resident_blocks == on_host:
        return f"the weights of all {on_host} other blocks fit"
    one_more = replace(layout, resident_blocks=layout.resident_blocks + 1)
    return f"one more would need {_room(search, one_more, spare=True)}"


def _as_set(asked: int, taken: int) -> str:
    return "as set" if asked == taken else f"{asked} as set, and there are {taken}"


def asked_to_keep(search: Search, layout: Layout) -> str:
    """The reason for `kept_count` where a count was asked for."""
    asked, keepable = search.request.blocks_without_recompute, keepable_count(search.facts, layout)
    if asked == "auto" or asked <= keepable:
        return "as set"
    return f"{asked} as set, and the weights of {keepable} blocks stay on the device"


def _batch(search: Search, layout: Layout) -> str:
    request = search.request
    if request.batch_rows is not None:
        return "as set"
    if layout.batch_rows == BATCH_LIMIT_ROWS:
        return f"{BATCH_LIMIT_ROWS} rows fit, the most that is chosen by itself"
    if request.data_rows is not None and layout.batch_rows * 2 > request.data_rows:
        share = f" for each of {request.passes} backward passes" if request.passes > 1 else ""
        return f"the data has {request.data_rows} rows{share}, and each epoch needs a step"
    doubled = replace(request, batch_rows=layout.batch_rows * 2)
    if request.offload == "auto" and layout.offload != "max":
        doubled = replace(doubled, offload="weights")
    larger = replace(search, request=doubled)
    return f"{layout.batch_rows * 2} rows would need {_room(search, larger.nearest())}"


def _chunk(search: Search, layout: Layout, tokens: int) -> str:
    if search.request.chunk_rows != "auto":
        return "as set"
    if tokens * 2 <= CHUNK_TOKENS and layout.chunk_rows < layout.batch_rows:
        return f"{tokens} tokens at once; a larger chunk does not fit"
    return f"{tokens} tokens at once; about {CHUNK_TOKENS} keep a device busy"


def _room(search: Search, layout: Layout, *, spare: bool = False) -> str:
    """What `layout` takes of the resource that it presses harder, beside what there is of it."""
    need, limits = search.need(layout), search.limits
    device_limit = limits.spare_bytes if spare else limits.device_bytes
    device = need.device_bytes / device_limit if device_limit else 0.0
    host = need.host_bytes / limits.host_bytes if limits.host_bytes else 0.0
    if host > device:
        return f"{bytes_text(need.host_bytes)} of {bytes_text(limits.host_bytes)} host memory"
    kept = ", which leaves the rest to activations" if spare and search.facts.row is None else ""
    return f"{bytes_text(need.device_bytes)} of {bytes_text(device_limit)} device memory{kept}"
