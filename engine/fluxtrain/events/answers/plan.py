"""The answer of `fluxtrain plan --json`: what a run would do and need, how long, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

from fluxtrain.events.answers.answers import Answer
from fluxtrain.events.events import CardLeftOut, CardPlan, ChoiceMade, SampleFit
from fluxtrain.units import bytes_text, count_text


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model that would be trained."""

    name: str
    parameters: int
    blocks: int
    dtype: str


class PlannedMethod(msgspec.Struct, frozen=True, kw_only=True):
    """The trained weights of a model, and the storage of the rest.

    Bytes are of weights wherever they live. `rank` is None without adapters, `storage` is plain
    where nothing is packed.
    """

    name: str
    trained_parameters: int
    trained_bytes: int
    frozen_bytes: int  # in the model's dtype
    packed_bytes: int
    storage: str
    saved_bytes: int  # of what the run leaves behind: the model, or the adapter
    rank: int | None = None

    def line(self, parameters: int) -> str:
        """Describe in one line the trained weights of a model of `parameters`, and the size of the
        rest."""
        trained = f"{count_text(self.trained_parameters)} parameters"
        others = count_text(max(0, parameters - self.trained_parameters))
        if self.rank is None:
            return f"full: all {trained} are trained"
        sizes = []
        if self.packed_bytes:
            sizes.append(f"{bytes_text(self.packed_bytes)} packed as {self.storage}")
        if self.frozen_bytes:
            sizes.append(f"{bytes_text(self.frozen_bytes)} as they are")
        return (
            f"{self.name}: adapters of rank {self.rank} with {trained} are trained on {others} "
            f"frozen ones, {', '.join(sizes) or 'nothing'}; the adapter's file takes "
            f"{bytes_text(self.saved_bytes)}"
        )


class PlannedTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step and of the run, and the resource that binds a step.

    `parts_s` are the seconds of a step by kind of work, overlapping or not.
    """

    step_s: float
    tokens_per_s: float
    eta_s: float
    binds: str
    parts_s: dict[str, float]


class PlannedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model's parts live, and how many rows are computed at once."""

    offload: str
    device_groups: int
    device_first: str
    resident_blocks: int
    blocks_without_recompute: int
    activations: str
    activations_on_device: int
    batch_rows: int
    chunk_rows: int
    embedding: str
    head: str
    deferred_moments: bool


class PlanOption(msgspec.Struct, frozen=True, kw_only=True):
    """One of the plans from as fast as possible to as small as possible.

    `share` is the used fraction of the device's memory, from 0 for the least that runs to 1 for
    all of it; `settings` are the configuration's settings that select this plan.
    """

    name: str
    share: float
    layout: PlannedLayout
    device_bytes: int
    host_bytes: int
    predicted: PlannedTime
    settings: dict[str, Any]


def distinct_plans(plans: Iterable[PlanOption]) -> dict[str, PlanOption]:
    """Return different plans by name; names that lead to one plan are joined, as in
    "fast = balanced"."""
    found: list[tuple[str, PlanOption]] = []
    for one in plans:
        if found and found[-1][1].layout == one.layout:
            found[-1] = (f"{found[-1][0]} = {one.name}", one)
        else:
            found.append((one.name, one))
    return dict(found)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of the configuration by its dotted key, such as `train.steps`."""

    key: str
    value: Any
    default: Any
    changed: bool
    description: str


class PlanAnswer(Answer, frozen=True, kw_only=True):
    """The placement that a run would get, its predicted peaks and time, and other plans.

    `device_bytes` and `host_bytes` are peaks, each with its limit; `need` has the parts of the
    peaks. `predicted` is None where rates of the machine are missing, for the reason in
    `predicted_because`. `config` is the whole configuration.
    """

    COMMAND: ClassVar[str] = "plan"

    model: PlannedModel
    method: PlannedMethod
    device: str  # cpu or cuda
    layout: PlannedLayout
    accumulation: int
    sequence_length: int
    notes: tuple[str, ...]  # sentences: what of the data is cut, left out or not shown to the model
    fitting_share: float | None  # of the first samples: no longer than a row; None: not looked at
    samples: SampleFit | None = None  # of the first samples; None: not looked at
    device_bytes: int
    device_budget_bytes: int | None
    need: dict[str, int]
    host_bytes: int
    process_bytes: int
    host_limit_bytes: int | None
    disk_bytes: int  # kept checkpoints, one that is being written, and the model at the end
    checkpoint_bytes: int
    estimated_rows: int  # of an epoch
    rows_estimated: bool = True  # False: all of the data was counted, by the packing of the run
    steps: int
    machine: str
    predicted: PlannedTime | None
    predicted_because: str
    timing: str = "measured"  # a block was timed; or disturbed, assumed: see `predicted_text`
    plans: tuple[PlanOption, ...]
    choices: tuple[ChoiceMade, ...]
    settings: tuple[Setting, ...]
    config: dict[str, Any]
    cards: tuple[CardPlan, ...] = ()  # where several compute; the other numbers are of all together
    left_out: tuple[CardLeftOut, ...] = ()  # cards of the machine that would not compute

    @property
    def fits(self) -> bool:
        """Return whether no predicted peak is over its limit, as far as the limits are known."""
        peaks = (
            (self.device_bytes, self.device_budget_bytes),
            (self.host_bytes, self.host_limit_bytes),
        )
        return all(limit is None or used <= limit for used, limit in peaks)

    @property
    def steps_text(self) -> str:
        """Return the steps of the run, with "about" where they follow from an estimate of the
        rows."""
        by_rows = self.rows_estimated and self.config["train"].get("steps") is None
        return "about " * by_rows + ("1 step" if self.steps == 1 else f"{self.steps:,} steps")

    @property
    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, and always model and data, by their
        keys."""
        always = ("model.path", "data.path")
        return {one.key: one.value for one in self.settings if one.changed or one.key in always}
