"""What can change while a run trains, and whether a change fits. Pure: facts in, verdict out.

| name              | is                                          | same bits              |
|-------------------|---------------------------------------------|------------------------|
| `prefetch`        | blocks copied ahead of the one that computes | yes                    |
| `resident_blocks` | blocks whose weights stay on the device      | yes                    |
| `device_groups`   | parts that live there with their states, those that the plan has first | yes |
| `blocks_without_recompute` | blocks with weights there that keep activations | yes       |
| `chunk_rows`      | rows computed at once inside a block         | no, summed in another order |
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.live.cards.changed import COUNTS, changed_on_cards, restored_on_cards
from fluxtrain.plan.choices.activations import left_on_device
from fluxtrain.plan.choices.placement import Placement
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import (
    Footprint,
    Layout,
    by_tier,
    footprint,
    keepable_count,
    kept_count,
    slot_count,
    streamed_count,
)
from fluxtrain.telemetry.choices import setting_name
from fluxtrain.units import bytes_text

LiveSettingName = Literal[
    "prefetch", "resident_blocks", "device_groups", "blocks_without_recompute", "chunk_rows"
]
LIVE_SETTINGS: tuple[LiveSettingName, ...] = get_args(LiveSettingName)
BY_ANOTHER_CHUNK = "by rounding, as they are summed in another order, and by what dropout draws"
StepName = Literal[LiveSettingName, "activations_on_device"]  # what a run gives up by itself


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    """What a run can change between two steps, as it is now."""

    prefetch: int  # blocks copied ahead, where so many stream
    resident_blocks: int  # of those on the host, where there are so many
    chunk_rows: int
    device_groups: int = 0
    blocks_without_recompute: int = (
        0  # of those whose weights are on the device, where there are so many
    )
    # blocks whose inputs wait there, at most: fewer where the plan's peak has no room for them
    activations_on_device: int = 0


@dataclass(frozen=True, kw_only=True)
class Change:
    """One knob and the value it should have."""

    name: StepName
    value: int

    def __str__(self) -> str:
        return f"{self.name}={self.value}"

    def applied_to(self, settings: LiveSettings) -> LiveSettings:
        """`settings` with this change."""
        return replace(settings, **{self.name: self.value})


@dataclass(frozen=True, kw_only=True)
class Use:
    """What is known about memory now; None is not known."""

    device_peak_bytes: int | None = None  # measured; None: as predicted
    host_available_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class LiveContext:
    """The run that changes are judged for; `placement` is as it was planned."""

    facts: ModelFacts
    placement: Placement
    has_gpu: bool

    @property
    def several_cards(self) -> bool:
        """Whether the blocks are on more than one card."""
        return bool(self.placement.cards)

    @property
    def layout(self) -> Layout:
        """As it was planned."""
        return self.placement.layout

    @property
    def budget_bytes(self) -> int | None:
        """Of the device."""
        return self.placement.budget_bytes

    def planned_as(self, layout: Layout) -> LiveContext:
        """The same run planned with another layout."""
        placement = self.placement.with_layout(self.facts, layout, has_gpu=self.has_gpu)
        return replace(self, placement=placement)

    @property
    def planned(self) -> LiveSettings:
        """The settings as the plan set them."""
        return LiveSettings(
            prefetch=max(1, slot_count(self.facts, self.layout) - 1),
            resident_blocks=self.layout.resident_blocks,
            chunk_rows=self.layout.chunk_rows,
            device_groups=self.layout.device_groups,
            blocks_without_recompute=self.layout.blocks_without_recompute,
            activations_on_device=(
                self.facts.layers if self.inputs_may_leave else self.layout.activations_on_device
            ),
        )

    @property
    def inputs_may_leave(self) -> bool:
        """Whether all block inputs wait on a GPU as planned, from where they may go to the host."""
        known = self.has_gpu and self.facts.row is not None
        return known and not self.layout.offloads_activations

    def held(self, settings: LiveSettings, name: StepName) -> int:
        """The value of a setting that these `settings` come to."""
        layout = self.layout_with(settings)
        if name == "activations_on_device" and not layout.offloads_activations:
            kept = kept_count(self.facts, layout)
            return self.facts.layers - kept if self.inputs_may_leave else 0
        return int(getattr(layout, name))

    def host_blocks(self, settings: LiveSettings) -> int:
        """Blocks on the host, which may be resident or stream."""
        moved = replace(self.layout, device_groups=settings.device_groups)
        return len(by_tier(self.facts, moved)[1].blocks)

    def layout_with(self, settings: LiveSettings) -> Layout:
        """The layout that `settings` make. Block inputs that stay on the device beside others that
        wait on the host give way where it would take more of it than was planned, for they only
        have what everything else leaves."""
        leave = self.inputs_may_leave and settings.activations_on_device < self.facts.layers
        layout = replace(
            self.layout,
            activations="host" if leave else self.layout.activations,
            slots=settings.prefetch + 1,
            resident_blocks=min(settings.resident_blocks, self.host_blocks(settings)),
            chunk_rows=settings.chunk_rows,
            device_groups=settings.device_groups,
            blocks_without_recompute=settings.blocks_without_recompute,
        )
        most, has_gpu = settings.activations_on_device, self.has_gpu
        planned = footprint(self.facts, self.layout, has_gpu=has_gpu).device_bytes
        return left_on_device(self.facts, layout, planned, most=most, has_gpu=has_gpu)

    def placement_with(self, settings: LiveSettings) -> Placement:
        """The placement that `settings` make. Raises BadInput and DoesNotFit on several cards."""
        if self.several_cards:
            return self._placement_on_cards(settings)
        layout = self.layout_with(settings)
        return self.placement.with_layout(self.facts, layout, has_gpu=self.has_gpu)

    def _placement_on_cards(self, settings: LiveSettings) -> Placement:
        planned, placement = self.planned, self.placement
        names = [*COUNTS, "prefetch"]
        growth = {name: getattr(settings, name) - getattr(planned, name) for name in names}
        kept = "blocks_without_recompute"  # of blocks whose weights stay, so the last to grow
        for name in sorted(names, key=lambda name: (growth[name] > 0, name == kept, growth[name])):
            if growth[name]:
                placement = changed_on_cards(
                    self.facts, placement, name, getattr(settings, name), has_gpu=self.has_gpu,
                    at_most=True,
                )  # fmt: skip
        wanted = {name: getattr(settings, name) for name in COUNTS}
        placement = restored_on_cards(self.facts, placement, wanted, has_gpu=self.has_gpu)
        layout = replace(placement.layout, chunk_rows=settings.chunk_rows)
        return replace(placement, layout=layout)

    def streamed(self, settings: LiveSettings) -> int:
        """Blocks that stream."""
        return streamed_count(self.facts, self.layout_with(settings))

    def need(self, settings: LiveSettings) -> Footprint:
        """Predicted peaks."""
        return footprint(self.facts, self.layout_with(settings), has_gpu=self.has_gpu)

    def device_growth_bytes(self, now: LiveSettings, new: LiveSettings) -> int:
        """By how much `new` is predicted to raise the device's peak."""
        return self.need(new).device_bytes - self.need(now).device_bytes


def parse_change(arguments: Mapping[str, Any]) -> Change:
    """One change from the arguments of a command. Raises BadInput."""
    names = ", ".join(LIVE_SETTINGS)
    if len(arguments) != 1:
        raise BadInput(f"one change at a time: use one of {names} with a whole number")
    ((name, value),) = arguments.items()
    short = name.removeprefix("placement.")  # as a configuration and a plan have it
    name = short if setting_name(short) == name else name
    if name not in LIVE_SETTINGS:
        raise BadInput(f"{name} cannot change while a run trains: {names} can")
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{name} is {value!r}: use a whole number")
    return Change(name=name, value=value)


def settings_after(
    context: LiveContext, now: LiveSettings, change: Change, use: Use, *, back: bool = False
) -> LiveSettings:
    """The settings once `change` is made. `back`: to what was set before, which is in force as far
    as it can be beside what other changes have set.

    Raises BadInput when it makes no sense for this run, DoesNotFit when there is no room for it.
    """
    if getattr(now, change.name) == change.value:
        raise BadInput(f"{change.name} is {change.value} already")
    new = change.applied_to(now)
    if context.several_cards and change.name != "chunk_rows":
        if not back:
            _check_range_on_cards(context, now, change)
        _refuse_without_host(context, context.placement_with(now), context.placement_with(new), use)
        return new
    if not back:
        _check_range(context, now, change)
    refuse_without_room(context, now, new, use)
    return new


def _check_range(context: LiveContext, now: LiveSettings, change: Change) -> None:
    layout, streamed = context.layout, context.streamed(now)
    if change.name == "chunk_rows":
        _between(change, 1, layout.batch_rows, f"a backward pass has {layout.batch_rows} rows")
        return
    if change.name == "blocks_without_recompute":
        most = keepable_count(context.facts, context.layout_with(now))
        _between(change, 0, most, f"of {most} blocks the weights stay on the device")
        return
    if layout.offload not in ("weights", "max"):
        raise BadInput(
            f"{change}: with placement.offload={layout.offload} all weights stay on the device, "
            "none stream"
        )
    if change.name == "device_groups":
        parts = len(context.facts.groups)
        _between(change, 0, parts, f"the model has {parts} parts")
    elif change.name == "resident_blocks":
        home = context.host_blocks(now)
        _between(change, 0, home, f"{home} blocks are on the host")
    elif streamed < 2:
        raise BadInput(f"{change}: {streamed} blocks stream, so none can be copied ahead")
    else:
        _between(change, 1, streamed - 1, f"{streamed} blocks stream")


def _check_range_on_cards(context: LiveContext, now: LiveSettings, change: Change) -> None:
    """Raise BadInput for a value that cannot be beside what is set now."""
    with suppress(DoesNotFit):  # whether it fits is decided from the plan
        changed_on_cards(
            context.facts, context.placement_with(now), change.name, change.value,
            has_gpu=context.has_gpu,
        )  # fmt: skip


def _between(change: Change, low: int, high: int, because: str) -> None:
    if not low <= change.value <= high:
        raise BadInput(f"{change}: {because}, use {low} to {high}")


def steps_down(context: LiveContext, now: LiveSettings, *, backward: bool = True) -> list[Change]:
    """Return what to give up when device memory runs out in a step: all block inputs that stay on
    the device by choice (no computation is lost with them), or where the host has no room for
    them, and next, half of the blocks that keep their activations, then half of the chunk, and of
    the smallest chunk half of the resident blocks, else of the parts on the device. Not backward:
    an evaluation keeps nothing for a backward pass, so that it begins with the chunk."""
    if context.several_cards:
        half = Change(name="chunk_rows", value=now.chunk_rows // 2)
        return [half] if now.chunk_rows > 1 else []
    leave = Change(name="activations_on_device", value=0)
    helps = (
        backward
        and context.held(now, leave.name)
        and context.device_growth_bytes(now, leave.applied_to(now)) < 0
    )
    return [*([leave] if helps else []), *_later_steps(context, now, backward)]


def _later_steps(context: LiveContext, now: LiveSettings, backward: bool) -> list[Change]:
    kept = kept_count(context.facts, context.layout_with(now))
    if kept and backward:
        return [Change(name="blocks_without_recompute", value=kept // 2)]
    if now.chunk_rows > 1:
        return [Change(name="chunk_rows", value=now.chunk_rows // 2)]
    layout = context.layout_with(now)
    if layout.offload not in ("weights", "max"):
        return []
    held = {"resident_blocks": layout.resident_blocks, "device_groups": layout.device_groups}
    names: tuple[LiveSettingName, ...] = ("resident_blocks", "device_groups")
    return [Change(name=name, value=held[name] // 2) for name in names if held[name]]


def _refuse_without_host(context: LiveContext, now: Placement, new: Placement, use: Use) -> None:
    """Raise DoesNotFit where the host lacks what leaves the cards."""
    more = new.need.host_bytes - now.need.host_bytes
    available = use.host_available_bytes
    if context.has_gpu and available is not None and more > max(0, available):
        raise DoesNotFit(
            f"it takes {bytes_text(more)} more host memory, and {bytes_text(available)} is free"
        )


def refuse_without_room(
    context: LiveContext, now: LiveSettings, new: LiveSettings, use: Use
) -> None:
    """Raise DoesNotFit, with the numbers, when `new` is predicted to exceed what there is."""
    growth = context.device_growth_bytes(now, new)
    budget = context.budget_bytes
    if budget is not None and growth > 0:
        known = use.device_peak_bytes
        peak = context.need(now).device_bytes if known is None else known
        if peak + growth > budget:
            word = "predicted" if known is None else "measured"
            raise DoesNotFit(
                f"it takes {bytes_text(growth)} more of the device, and of its budget of "
                f"{bytes_text(budget)} the {word} peak of {bytes_text(peak)} leaves "
                f"{bytes_text(max(0, budget - peak))}"
            )
    more = context.need(new).host_bytes - context.need(now).host_bytes
    available = use.host_available_bytes
    if available is not None and more > max(0, available):
        raise DoesNotFit(
            f"it takes {bytes_text(more)} more host memory, and {bytes_text(available)} is free"
        )
