"""How long a planned run takes, and the fast, balanced and fit plans beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fluxtrain.plan.cost import Cost, cost
from fluxtrain.plan.facts import Capacity, ModelFacts
from fluxtrain.plan.footprint import embedding_copied, head_copied, saving_bytes
from fluxtrain.plan.guard import EVERY_CHECKPOINT, DiskNeed, disk_need
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.ranked import Frontier, RankedPlan
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import Search
from fluxtrain.train.config import RunConfig
from fluxtrain.train.constants import Constants
from fluxtrain.train.placing import request_of
from fluxtrain.units import GIB, bytes_text, count_text, duration_text


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is asked: a placement of a model on a machine."""

    facts: ModelFacts
    capacity: Capacity
    request: RunRequest
    placement: Placement
    passes: int  # batches a step
    clips: bool  # updates wait for the norm of all gradients
    keep_checkpoints: int
    constants: Constants

    def told(self, steps: int) -> dict[str, Any]:
        """Time and ranked plans as plain values; None and the reason where rates are missing.

        On a GPU with `max` as set the rule alone decides: no plan of the dial could be had.
        """
        rates = self._rates
        undialed = self.capacity.has_gpu and self.request.offload == "max"
        plans = () if undialed or isinstance(rates, str) else self._frontier(rates).plans()
        return {
            "embedding": embedding_copied(self.facts, self.placement.layout),
            "head": head_copied(self.facts, self.placement.layout),
            "disk_bytes": self.disk_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            **self.time(steps),
            "plans": [self._ranked(plan, steps) for plan in plans],
        }

    def time(self, steps: int) -> dict[str, Any]:
        """`predicted` time of the placement alone, with the reason."""
        rates = self._rates
        if isinstance(rates, str):
            return {"predicted": None, "predicted_because": rates}
        found = cost(self.facts, self.placement.layout, rates, clips=self.clips, passes=self.passes)
        return {
            "predicted": {**_time(found, steps), "parts_s": _parts(found)},
            "predicted_because": self.constants.source,
        }

    @property
    def _rates(self) -> Rates | str:
        return self.constants.rates(has_gpu=self.capacity.has_gpu)

    def _frontier(self, rates: Rates) -> Frontier:
        request = replace(self.request, batch_rows=self.placement.batch_rows)
        search = Search(self.facts, self.capacity, request)
        return Frontier(search, rates, clips=self.clips, passes=self.passes)

    def _ranked(self, plan: RankedPlan, steps: int) -> dict[str, Any]:
        layout, need = plan.chosen.layout, plan.chosen.need
        saving = saving_bytes(self.facts, layout) if self.capacity.has_gpu else 0
        settings: dict[str, Any] = {"train.batch_rows": layout.batch_rows}
        if self.capacity.has_gpu:
            settings["placement.aggressiveness"] = plan.name
        else:
            settings["placement.chunk_rows"] = layout.chunk_rows
        return {
            "name": plan.name,
            "share": plan.share,
            **{
                key: value
                for key, value in asdict(layout).items()
                if key not in ("passes", "optimizer_in_backward", "slots")
            },
            "embedding": embedding_copied(self.facts, layout),
            "head": head_copied(self.facts, layout),
            "device_bytes": need.shown_device_bytes(has_gpu=self.capacity.has_gpu),
            "host_bytes": need.host_bytes + self.placement.process_bytes + saving,
            **_time(plan.chosen.cost, steps),
            "settings": settings,
        }

    @property
    def disk_bytes(self) -> int:
        """Kept checkpoints, one that is being written, and the model at the end."""
        files = self._files
        return files.copies * files.checkpoint_bytes + files.model_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """One checkpoint: weights and optimizer states."""
        return self._files.checkpoint_bytes

    @property
    def _files(self) -> DiskNeed:
        kept = self.keep_checkpoints
        return disk_need(self.facts, kept=kept, written=EVERY_CHECKPOINT, steps=0)


def forecast_of(
    config: RunConfig,
    facts: ModelFacts,
    placement: Placement,
    capacity: Capacity,
    constants: Constants,
) -> Forecast:
    """What is asked for a run as `config` says."""
    request = request_of(config, facts, placement.batch_rows, None)
    budget = placement.budget_bytes
    return Forecast(
        facts=facts,
        capacity=capacity,
        request=request if budget is None else replace(request, budget_gib=budget / GIB),
        placement=placement,
        passes=config.train.accumulation,
        clips=not request.optimizer_in_backward,
        keep_checkpoints=config.train.keep_checkpoints,
        constants=constants,
    )


def plan_lines(told: Mapping[str, Any]) -> list[str]:
    """Time and ranked plans for people."""
    disk = f"disk for checkpoints and the model {bytes_text(told['disk_bytes'])}"
    if told["predicted"] is None:
        return [f"{disk}; time is not predicted: {told['predicted_because']}"]
    lines = [
        f"{disk}; {_time_text(told['predicted'])}",
        f"time from {told['predicted_because']}",
    ]
    if not told["plans"]:
        return lines
    lines += ["", f"plans by their memory, each with {told['plans'][0]['batch_rows']} rows a step"]
    for plan in told["plans"]:
        where = f"{plan['offload']}, {plan['device_groups']}+{plan['resident_blocks']} on device"
        lines.append(
            f"  {plan['name']:<9} device {bytes_text(plan['device_bytes']):>9}  "
            f"host {bytes_text(plan['host_bytes']):>9}  {_time_text(plan)}; "
            f"{where}, chunk {plan['chunk_rows']}"
        )
    return lines


def _time(found: Cost, steps: int) -> dict[str, Any]:
    return {
        "seconds_per_step": found.step_s,
        "tokens_per_s": found.tokens_per_s,
        "eta_s": found.step_s * steps,
        "binds": found.binds,
    }


def _time_text(told: Mapping[str, Any]) -> str:
    return (
        f"{duration_text(told['seconds_per_step'])} a step, "
        f"{count_text(round(told['tokens_per_s']))} tokens/s, {duration_text(told['eta_s'])} in "
        f"all, bound by {told['binds']}"
    )


def _parts(found: Cost) -> dict[str, float]:
    """Seconds of what runs in a step, overlapping or not."""
    return {
        name.removesuffix("_s"): seconds
        for name, seconds in asdict(found).items()
        if name.endswith("_s") and name != "step_s"
    }
