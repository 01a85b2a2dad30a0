"""How long a planned run takes, and its fast, balanced and fit plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from fluxtrain.config.schema import RunConfig
from fluxtrain.events.answers.plan import (
    PlanAnswer,
    PlannedLayout,
    PlannedTime,
    PlanOption,
    distinct_plans,
)
from fluxtrain.events.events import CardLeftOut, CardPlan
from fluxtrain.measure.measured_constants import Constants
from fluxtrain.methods.method import method_of
from fluxtrain.plan.capacity import DiskHome
from fluxtrain.plan.facts import Capacity, ModelFacts
from fluxtrain.plan.footprint import Layout, embedding_copied, head_copied, saving_bytes
from fluxtrain.plan.guard import EVERY_CHECKPOINT, DiskNeed, disk_need
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import DialStop, Search, TimedSearch
from fluxtrain.plan.simulation import StepTime, step_time
from fluxtrain.train.placing.placing import disk_home, request_of, spill_home
from fluxtrain.units import GIB, bytes_text, count_text, predicted_text


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A predicted run: a placement of a model in a capacity."""

    facts: ModelFacts
    capacity: Capacity
    request: RunRequest
    placement: Placement
    passes: int  # batches a step
    clips: bool  # updates wait for the norm of all gradients
    keep_checkpoints: int
    saved_bytes: int  # of the trained model on the disk
    constants: Constants
    disk: DiskHome | None = None  # where frozen weights may live
    spill: DiskHome | None = None  # where optimizer states may

    def options(self, steps: int) -> tuple[PlanOption, ...]:
        """Return the fast, balanced and fit plans; none where rates are missing.

        On a GPU with `max` as set the rule alone decides: no plan of the dial could be had.
        """
        rates = self._rates
        if isinstance(rates, str) or self.placement.several_cards:
            return ()
        if self.capacity.has_gpu and self.request.offload == "max":
            return ()
        return tuple(self._option(stop, steps) for stop in self._search(rates).stops())

    def time(self, steps: int) -> PlannedTime | None:
        """Predict how long the placement takes; None where rates are missing."""
        if self.placement.time is not None:
            return self._as_run(_time(self.placement.time, steps))
        rates = self._rates
        if isinstance(rates, str) or self.placement.several_cards:
            return None
        found = step_time(self.facts, self.layout, rates, clips=self.clips, passes=self.passes)
        return self._as_run(_time(found, steps))

    def _as_run(self, time: PlannedTime) -> PlannedTime:
        """Correct a time by the steps of the last run, where they took far from the prediction."""
        times = self.constants.run_times
        return PlannedTime(
            step_s=time.step_s * times,
            tokens_per_s=time.tokens_per_s / times,
            eta_s=time.eta_s * times,
            binds=time.binds,
            parts_s={name: seconds * times for name, seconds in time.parts_s.items()},
        )

    @property
    def because(self) -> str:
        """Return the source of the time, or why none is known."""
        rates = self._rates
        return rates if isinstance(rates, str) else self.constants.source

    @property
    def layout(self) -> Layout:
        """Return the predicted layout."""
        return self.placement.layout

    @property
    def _rates(self) -> Rates | str:
        return self.constants.rates(has_gpu=self.capacity.has_gpu)

    def _search(self, rates: Rates) -> TimedSearch:
        request = replace(self.request, batch_rows=self.placement.batch_rows)
        search = Search(self.facts, self.capacity, request, self.disk, self.spill)
        return TimedSearch(search, rates, clips=self.clips, passes=self.passes)

    def _option(self, plan: DialStop, steps: int) -> PlanOption:
        layout, need = plan.chosen.layout, plan.chosen.need
        saving = saving_bytes(self.facts, layout) if self.capacity.has_gpu else 0
        settings: dict[str, Any] = {"train.batch_rows": layout.batch_rows}
        if self.capacity.has_gpu:
            settings["placement.aggressiveness"] = plan.name
        else:
            settings["placement.chunk_rows"] = layout.chunk_rows
        return PlanOption(
            name=plan.name,
            share=plan.share,
            layout=planned_layout(self.facts, layout),
            device_bytes=need.shown_device_bytes(has_gpu=self.capacity.has_gpu),
            host_bytes=need.host_bytes + self.placement.process_bytes + saving,
            predicted=self._as_run(_time(plan.chosen.time, steps)),
            settings=settings,
        )

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of the kept checkpoints, the one being written, and the final model."""
        files = self._files
        return files.copies * files.checkpoint_bytes + files.model_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Return the bytes of one checkpoint: weights and optimizer states."""
        return self._files.checkpoint_bytes

    @property
    def _files(self) -> DiskNeed:
        kept = self.keep_checkpoints
        size = self.saved_bytes
        return disk_need(self.facts, model_bytes=size, kept=kept, written=EVERY_CHECKPOINT, steps=0)


def planned_layout(facts: ModelFacts, layout: Layout) -> PlannedLayout:
    """Return a layout with the actual ways of copying embedding and head."""
    copied = replace(
        layout, embedding=embedding_copied(facts, layout), head=head_copied(facts, layout)
    )
    return msgspec.convert(copied, PlannedLayout, from_attributes=True)


def forecast_of(
    config: RunConfig,
    facts: ModelFacts,
    placement: Placement,
    capacity: Capacity,
    constants: Constants,
) -> Forecast:
    """Predict the run of `config`."""
    request = request_of(config, facts, placement.batch_rows, None)
    budget = placement.budget_bytes
    return Forecast(
        facts=facts,
        capacity=capacity,
        request=request if budget is None else replace(request, budget_gib=budget / GIB),
        placement=placement,
        passes=config.train.accumulation,
        clips=not request.optimizer_in_backward,
        keep_checkpoints=config.train.checkpoints_kept,
        saved_bytes=method_of(config).saved_bytes(facts),
        constants=constants,
        disk=disk_home(
            facts,
            constants.per_s,
            allowed=config.model.packed_cache,
            asked=config.placement.disk,
        ),
        spill=spill_home(config, constants.per_s, placement.spill_folder),
    )


def card_lines(
    cards: Sequence[CardPlan], left_out: Sequence[CardLeftOut], blocks: int
) -> list[str]:
    """Describe the work of each card, and the cards left out, for people; nothing for a single
    card."""
    lines = []
    for card in cards:
        holds = f"{card.blocks} of {blocks} blocks" + ", embedding and head" * card.edges
        peak = bytes_text(card.device_bytes)
        room = f" of {bytes_text(card.budget_bytes)}" if card.budget_bytes else ""
        lines.append(f"{card_name(card)}: {holds}; device memory {peak}{room}")
    return lines + [f"{card_name(card)} is left out: {card.because}" for card in left_out]


def card_name(card: CardPlan | CardLeftOut) -> str:
    """Name a card by torch's number of it."""
    return f"card {card.index} ({card.name})" if card.name else f"card {card.index}"


def plan_lines(plan: PlanAnswer) -> list[str]:
    """Time and ranked plans for people."""
    disk = f"disk for checkpoints and the model {bytes_text(plan.disk_bytes)}"
    if plan.predicted is None:
        return [f"{disk}; time is not predicted: {plan.predicted_because}"]
    lines = [
        f"{disk}; {_time_text(plan.predicted, plan.timing)}",
        f"time from {plan.predicted_because}",
    ]
    if not plan.plans:
        return lines
    lines += ["", f"plans by their memory, each with {plan.layout.batch_rows} rows a step"]
    found = distinct_plans(plan.plans)
    widest = max(map(len, found))
    for name, one in found.items():
        layout = one.layout
        where = f"{layout.offload}, {layout.device_groups}+{layout.resident_blocks} on device"
        lines.append(
            f"  {name:<{widest}}  device {bytes_text(one.device_bytes):>9}  "
            f"host {bytes_text(one.host_bytes):>9}  {_time_text(one.predicted, plan.timing)}; "
            f"{where}, chunk {layout.chunk_rows}"
        )
    return lines


def _time(found: StepTime, steps: int) -> PlannedTime:
    return PlannedTime(
        step_s=found.step_s,
        tokens_per_s=found.tokens_per_s,
        eta_s=found.step_s * steps,
        binds=found.binds,
        parts_s=found.parts_s,
    )


def _time_text(time: PlannedTime, timing: str) -> str:
    rate = f"{count_text(round(time.tokens_per_s))} tokens/s, " * (timing == "measured")
    return (
        f"{predicted_text(time.step_s, timing)} a step, {rate}"
        f"{predicted_text(time.eta_s, timing)} in all, bound by {time.binds}"
    )
