"""Time one block of a model for the planner, with real rows, before a training.

A small model (the edges of the model and two copies of a block of each list, all of which count as
their mean) runs through the engine as the run will. All of it is on the device, so that no copy is
in the times. Where that is too much (embedding and head can be larger than many blocks) the edges
stream, and their copies are hidden.

Three sizes are timed: few rows, many rows at once, and the many rows in chunks of the few. The last
two are the same work, so their difference is the cost of a chunk besides its rows: gradients are
added up once for each chunk, and small products are slow. Without a GPU, where copies and updates
take time from the cores that compute, streamed steps are timed too, in turn with the others: other
programs can slow down all steps of one kind for a second, so of each kind the fastest step counts.
With a GPU, `measure/timed_steps.py` times what its host does.

The small model has copies of the model's own weights; the model itself and the random state are
left as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch
from torch import nn

from fluxtrain.core.block.rng import randomness_kept
from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import Diverged, UnsupportedModel
from fluxtrain.measure.block_timing import (
    COPIES,
    BlockTimer,
    BlockTimes,
    streamed_steps,
)
from fluxtrain.measure.probe.others import others_share, read_use
from fluxtrain.measure.small_model import (
    NotCalibrated,
    free_memory,
    make_small_model,
    wrapped,
)
from fluxtrain.measure.timed_steps import CHUNKS, Kind, StepTimes, time_steps
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.plan.calibration import (
    Calibration,
    HostTimes,
    Line,
    StepsNotTimed,
    Streamed,
    line_of_chunks,
    line_through,
)
from fluxtrain.plan.facts import GroupFacts
from fluxtrain.plan.rates import rate_of_update
from fluxtrain.plan.request import PlacementRequest
from fluxtrain.plan.states import StateFormat, StorageFormat
from fluxtrain.units import duration_text

if TYPE_CHECKING:
    from fluxtrain.core.wrap.engine import Engine

LIMIT_S = 20.0  # for a calibration: kernels that are tuned first take minutes
SHARE = 0.1  # of the run, where that is longer
MOST_REPEATS, REPEATS_S = 3, 3.0  # without a GPU; none begins later
SIZES = ("few", "many", "cut")  # "cut" is the many rows in chunks of the few
_TimedSteps = tuple[dict[Kind, StepTimes], GroupFacts]


class Patience:
    """The time since a calibration began, against its limit."""

    def __init__(
        self, steps: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare a calibration; steps: of the run that follows; None: not known."""
        self._steps, self._clock = steps or 0, clock
        self._began_s = clock()

    def check(self, step_s: float) -> None:
        """Raise NotCalibrated where more than the limit has passed; a step of the small model, with
        a part of the run's blocks and rows, takes `step_s`."""
        passed_s = self._clock() - self._began_s
        if passed_s > max(LIMIT_S, SHARE * self._steps * step_s):
            raise NotCalibrated(
                f"its timing was stopped after {duration_text(passed_s)}, because kernels were "
                "still being compiled or tuned: the next run finds them ready"
            )


def calibrate(  # noqa: PLR0913 - each is a choice of its own
    model: nn.Module,
    batch_of: Callable[[int], BoundBatch[Any]],
    device: torch.device,
    rows: tuple[int, int],
    fewer: tuple[int, int] | None = None,
    states: StateFormat = "fp32",
    heavier_of: Callable[[int], BoundBatch[Any] | None] | None = None,
    host_available_bytes: int | None = None,
    *,
    frozen: StorageFormat = "plain",
    in_backward: bool = False,
    steps: int | None = None,
) -> Calibration:
    """Time a block, and what stands outside the blocks, in chunks of `rows` rows, (few, many).

    Where the small model does not fit on a GPU, its edges wait on the host; where that does not fit
    either, `fewer` rows are timed. `states` are those of AdamW, whose update on the device is timed
    too; `frozen` is how frozen weights are stored. `in_backward` times steps that update in the
    backward pass. `steps` are those of the run, a tenth of whose time may be taken.

    `batch_of` gives real rows. `heavier_of` gives rows whose activations may take more memory, None
    where the usual rows do already. Their memory counts but not their time, as they may be few.

    Raises NotCalibrated with the reason: a list of blocks that a batch does not pass, too little
    memory for the small model, too much time, or a loss that is not finite.
    """
    started_s, before = time.monotonic(), read_use()
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    sizes = dict.fromkeys((rows, fewer or rows))
    how = _Setup(rows, states=states, frozen=frozen, patience=Patience(steps))
    edges_on_host = [replace(how, rows=count, edges="host") for count in sizes]
    try:
        with randomness_kept(device):
            setups = [how, *edges_on_host]
            timed = _first_that_fits(setups, model, _Batches(batch_of, heavier_of), device)
            whole: _TimedSteps | StepsNotTimed | None = None
            if device.type == "cuda":
                # two rows at least, where they fit: the host's are timed in chunks, too
                few = max(timed.few.rows, min(timed.many.rows, 2))
                batch, limit = batch_of(few), host_available_bytes
                formats = states, frozen
                whole = time_steps(model, batch, device, formats, limit, in_backward=in_backward)
    except (UnsupportedModel, Diverged) as error:
        raise NotCalibrated(str(error)) from error
    finally:
        free_memory(device)

    return Calibration(
        **_lines(timed),
        **_of_host(timed, whole),
        device_update_s=timed.many.median("update"),
        streamed=timed.streamed,
        runtime_bytes=max(0, process.memory_info().rss - before_bytes),
        rows=(timed.few.rows, timed.many.rows),
        measured_at_s=time.time(),
        measuring_s=time.monotonic() - started_s,
        others_share=others_share(before),
    )


def _lines(timed: _Timed) -> dict[str, Any]:
    """Return the fields of a calibration that are seconds and bytes over rows."""
    few, many, cut = timed.few, timed.many, timed.cut
    chunks = -(-many.rows // few.rows)

    def of_chunks(name: str) -> Line:
        return line_of_chunks(many.rows, many.median(name), chunks, cut.median(name))

    def of_batches(of: Callable[[BlockTimes], float]) -> Line:
        return line_through((few.rows, of(few)), (many.rows, of(many)))

    keeps = many.keeps and cut.keeps
    return {
        "forward": of_chunks("forward"),
        "backward": of_chunks("backward"),
        "outside_forward": of_batches(lambda times: times.median("outside_forward")),
        "outside_backward": of_batches(lambda times: times.median("outside_backward")),
        "activation_bytes": round(of_batches(lambda times: float(times.activation_bytes)).slope),
        "edge_bytes": round(of_batches(lambda times: float(times.edge_bytes)).slope),
        "kept_backward": of_chunks("kept_backward") if keeps else None,
        "kept_bytes": many.kept_bytes // many.rows if keeps else None,
    }


def _of_host(timed: _Timed, steps: _TimedSteps | StepsNotTimed | None) -> dict[str, Any]:
    """Return the fields of a calibration that are the host's: from whole steps, if these were
    timed."""
    if steps is None or isinstance(steps, StepsNotTimed):
        return {**_host_alone(timed.many), "steps_not_timed": steps}
    return _host_in_steps(timed.few, *steps)


def _host_alone(many: BlockTimes) -> dict[str, Any]:
    """Return the host's least times without whole steps: waiting for the device's full queue, which
    makes others longer, is no time of the host."""
    return {
        "host_block_s": min(many.seconds["host"]),
        "host_forward_s": min(many.seconds["host_forward"]),
    }


def _host_in_steps(
    few: BlockTimes, of: Mapping[Kind, StepTimes], block: GroupFacts
) -> dict[str, Any]:
    """Return the host's times and AdamW's rates in whole steps.

    Of the times of `few` rows on the device the least count: a full queue makes others longer.
    """
    alone, offloaded, passes = of["alone"], of["offloaded"], of.get("passes")
    whole = of.get("whole") or of["in_backward"]
    host = HostTimes(
        forward=alone.forward,
        backward=alone.backward,
        forward_beside=_beside((passes or whole).forward, alone.forward),
        backward_beside=_beside((passes or whole).backward, alone.backward),
        offload_forward_s=max(0.0, offloaded.forward_s - alone.forward_s),
        offload_backward_s=max(0.0, offloaded.backward_s - alone.backward_s),
        outside_s=min(few.seconds["host_outside"]),
        host_group_update_s=(passes or whole).optimizer_s,
        device_update_s=min(few.seconds["host_update"]),
    )
    found: dict[str, Any] = {
        "host": host,
        "host_forward_s": alone.forward.at(1),
        "host_block_s": alone.forward.at(1) + alone.backward.at(1),
    }
    bits = "_8bit" if block.states == "8bit" else ""
    of_all = [f"adamw{bits}_per_s", *([f"adamw{bits}_beside_per_s"] if "in_backward" in of else [])]
    rates = [(name, whole.update_s, False) for name in of_all]
    if passes is not None:
        rates.append(("adamw_weights_per_s", passes.update_s, True))
        rates.append(("adamw_moments_per_s", passes.moments_s, True))
    for name, seconds, one_pass in rates:
        if seconds:
            found[name] = rate_of_update(block, seconds, one_pass=one_pass)
    return found


@dataclass(frozen=True)
class _Batches:
    """The rows to time, by how many."""

    usual: Callable[[int], BoundBatch[Any]]
    heavier_of: Callable[[int], BoundBatch[Any] | None] | None

    def heavier(self, rows: int) -> BoundBatch[Any] | None:
        """Return rows that may take more memory than the usual ones, where there are some."""
        return None if self.heavier_of is None else self.heavier_of(rows)


@dataclass(frozen=True)
class _Timed:
    few: BlockTimes
    many: BlockTimes
    cut: BlockTimes  # the many rows in chunks of the few
    streamed: Streamed | None


@dataclass(frozen=True)
class _Setup:
    """The rows (few, many) of the small model, and where its edges are."""

    rows: tuple[int, int]
    edges: Literal["device", "host"] = "device"
    states: StateFormat = "fp32"
    frozen: StorageFormat = "plain"
    patience: Patience = field(default_factory=Patience)

    def wrapped(self, small: nn.Module, device: torch.device) -> AbstractContextManager[Engine]:
        """Wrap `small` with its blocks on the device and its edges as set."""
        how: dict[str, Any] = {"states": self.states, "frozen": self.frozen}
        if self.edges == "device":
            return wrapped(small, device, "none", max(self.rows), **how)
        count = len(take_apart(small).blocks)
        how["placement"] = PlacementRequest(
            device_groups=count, device_first="blocks", embedding="whole", head="whole"
        )
        return wrapped(small, device, "weights", max(self.rows), **how)


def _beside(found: Line, alone: Line) -> Line:
    """Return the host's seconds while AdamW runs: for each chunk no less than without it. Where
    noise says less, the line goes through the middle of the measurements, as steep as without
    AdamW."""
    if found.slope >= alone.slope:
        return found
    middle = (1 + CHUNKS) / 2
    base = found.base + (found.slope - alone.slope) * middle
    return Line(base=max(base, alone.base), slope=alone.slope)


def _first_that_fits(
    setups: Iterable[_Setup],
    model: nn.Module,
    batches: _Batches,
    device: torch.device,
) -> _Timed:
    for setup in setups:
        try:
            return _timed(model, batches, device, setup)
        except (torch.OutOfMemoryError, MemoryError):
            pass  # the error holds the small model until here
        free_memory(device)
    raise NotCalibrated("two blocks do not fit on the device with their states")


def _timed(model: nn.Module, batches: _Batches, device: torch.device, setup: _Setup) -> _Timed:
    edges = device if setup.edges == "device" else torch.device("cpu")
    small = make_small_model(model, COPIES, blocks=device, edges=edges)
    small.train()
    facts = facts_of(small)
    if device.type == "cuda":
        return _Timed(**_time_sizes(small, batches, device, setup), streamed=None)
    sizes: dict[str, BlockTimes] = {}
    streamed_s: list[float] = []
    started_s, copied_bytes = time.monotonic(), 0
    for number in range(MOST_REPEATS):
        names = SIZES[1:] if number else SIZES
        for name, times in _time_sizes(small, batches, device, setup, names).items():
            sizes.setdefault(name, BlockTimes(times.rows)).add(times)
        free_memory(device)  # or the two wrapped models would take memory at the same time
        with wrapped(small, device, "weights", max(setup.rows), frozen=setup.frozen) as engine:
            steps_s, copied_bytes = streamed_steps(small, engine, batches.usual(max(setup.rows)))
        streamed_s += steps_s
        free_memory(device)
        if time.monotonic() - started_s > REPEATS_S:
            break
    streamed = Streamed(
        longer_s=min(streamed_s) - min(sizes["many"].seconds["whole"]),
        updated_bytes=sum(group.update_bytes for group in facts.groups),
        copied_bytes=copied_bytes,
        groups=len(facts.groups),
    )
    return _Timed(**sizes, streamed=streamed)


def _time_sizes(
    small: nn.Module,
    batches: _Batches,
    device: torch.device,
    setup: _Setup,
    names: Sequence[str] = SIZES,
) -> dict[str, BlockTimes]:
    """Time the sizes called `names`; memory is measured where these are all sizes."""
    few, many = setup.rows
    sizes = {"few": (few, None), "many": (many, None), "cut": (many, few)}
    with setup.wrapped(small, device) as engine:
        blocks = [module for _, module in take_apart(small).blocks]
        timer = BlockTimer(small, engine, blocks, device)
        found: dict[str, BlockTimes] = {}
        for name in names:
            rows, chunk_rows = sizes[name]
            batch, memory = batches.usual(rows), names == SIZES
            found[name] = timer.measure(batch, chunk_rows=chunk_rows, memory=memory)
            setup.patience.check(found[name].step_s)
        for name in ("few", "many") if names == SIZES else ():
            heavier = batches.heavier(found[name].rows)
            if heavier is not None:
                timer.measure_memory(heavier, found[name])
        timer.close()
    return found
