"""Run one block for real before training: what it takes on this machine, for the planner.

A miniature of the model (its edges, and one of its blocks twice) goes through the engine as the run
will, all of it on the device so that no copy is in the times; where that is too much (embedding and
head can be larger than many blocks) the edges stream, and their copies are hidden. Tried are some
rows, more rows at once, and those in chunks of some. The latter two are the same work, so their
difference is what a chunk costs beside its rows: gradients are added up once for each, and small
products are slow. Without a GPU, where copies and updates take time from the cores that compute, it
streams for some steps too, in turn with the others (`calibration/repeats.py`). Weights are the
model's own; nothing of the model itself is touched, and the random state is as it was afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch
from torch import nn

from fluxtrain.block.rng import randomness_kept
from fluxtrain.calibration.block_timing import (
    COPIES,
    REPEATS,
    ROUND_LIMIT_S,
    Bench,
    NotCalibrated,
    Trial,
    give_back,
)
from fluxtrain.calibration.repeats import Round, until_agreed
from fluxtrain.calibration.small_model import miniature, wrapped
from fluxtrain.calibration.timed_steps import Kind, Rehearsed, rehearse
from fluxtrain.errors import Diverged, UnsupportedModel
from fluxtrain.hardware.others import others_share, read_use
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.plan.cost.calibration import (
    Calibration,
    HostTimes,
    Line,
    NotRehearsed,
    Streamed,
    line_of_chunks,
    line_through,
)
from fluxtrain.plan.cost.updates import rate_of_update
from fluxtrain.plan.facts import GroupFacts
from fluxtrain.plan.request import PlacementRequest
from fluxtrain.plan.states import StateFormat
from fluxtrain.wrapping.block_discovery import take_apart
from fluxtrain.wrapping.grouping import facts_of

if TYPE_CHECKING:
    from fluxtrain.wrapping.engine import Engine

WARMING = 2  # streamed steps: the first touches weights and gradients, the second the moments
TRIALS = ("few", "many", "cut")
_OfSteps = tuple[dict[Kind, Rehearsed], GroupFacts]


def calibrate(
    model: nn.Module,
    batch_of: Callable[[int], BoundBatch[Any]],
    device: torch.device,
    rows: tuple[int, int],
    fewer: tuple[int, int] | None = None,
    states: StateFormat = "fp32",
    heavier_of: Callable[[int], BoundBatch[Any] | None] | None = None,
    host_available_bytes: int | None = None,
    *,
    in_backward: bool = False,
) -> Calibration:
    """Time a block, and what stands outside the blocks, at chunks of `rows` rows. Where the
    miniature does not fit on a GPU, with its edges at home on the host; or else with `fewer` rows.
    `states` are those of AdamW, whose update on the device is timed too.

    `batch_of` gives real rows; `heavier_of` gives rows whose activations may take more memory, None
    where the usual ones do already: their memory counts, but not their time, for they may be few.
    Raises
    NotCalibrated with the reason: blocks in several lists, too little memory for the miniature, or
    a loss that is not finite.
    """
    started_s, before = time.monotonic(), read_use()
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    sizes = dict.fromkeys((rows, fewer or rows))
    at_home = [_Way(count, edges="host", states=states) for count in sizes]
    try:
        with randomness_kept(device):
            ways = [_Way(rows, states=states), *at_home]
            tried = _first_that_fits(ways, model, _Batches(batch_of, heavier_of), device)
            rehearsed: _OfSteps | NotRehearsed | None = None
            if device.type == "cuda":
                batch = batch_of(tried.few.rows)
                rehearsed = rehearse(
                    model, batch, device, states, host_available_bytes, in_backward=in_backward
                )
    except (UnsupportedModel, Diverged) as error:
        raise NotCalibrated(str(error)) from error
    finally:
        give_back(device)

    return Calibration(
        **_lines(tried),
        **_of_host(tried, rehearsed),
        device_update_s=tried.many.median("update"),
        streamed=tried.streamed,
        runtime_bytes=max(0, process.memory_info().rss - before_bytes),
        rows=(tried.few.rows, tried.many.rows),
        measured_at_s=time.time(),
        measuring_s=time.monotonic() - started_s,
        others_share=others_share(before),
    )


def _lines(tried: _Tried) -> dict[str, Any]:
    """Fields of a calibration: seconds and bytes over rows."""
    few, many, cut = tried.few, tried.many, tried.cut
    chunks = -(-many.rows // few.rows)

    def of_chunks(name: str) -> Line:
        return line_of_chunks(many.rows, many.median(name), chunks, cut.median(name))

    def of_batches(of: Callable[[Trial], float]) -> Line:
        return line_through((few.rows, of(few)), (many.rows, of(many)))

    keeps = many.keeps and cut.keeps
    return {
        "forward": of_chunks("forward"),
        "backward": of_chunks("backward"),
        "outside_forward": of_batches(lambda trial: trial.median("outside_forward")),
        "outside_backward": of_batches(lambda trial: trial.median("outside_backward")),
        "activation_bytes": round(of_batches(lambda trial: float(trial.activation_bytes)).slope),
        "edge_bytes": round(of_batches(lambda trial: float(trial.edge_bytes)).slope),
        "kept_backward": of_chunks("kept_backward") if keeps else None,
        "kept_bytes": many.kept_bytes // (COPIES * many.rows) if keeps else None,
    }


def _of_host(tried: _Tried, rehearsed: _OfSteps | NotRehearsed | None) -> dict[str, Any]:
    """Fields of a calibration: what the host takes, in whole steps where these were made."""
    if rehearsed is None or isinstance(rehearsed, NotRehearsed):
        return {**_host_alone(tried.many), "not_rehearsed": rehearsed}
    return _rehearsed(tried.few, *rehearsed)


def _host_alone(many: Trial) -> dict[str, Any]:
    """The host's times where no whole steps were made; a full queue of the device is none of its
    own."""
    return {
        "host_block_s": min(many.seconds["host"]),
        "host_forward_s": min(many.seconds["host_forward"]),
    }


def _rehearsed(tried: Trial, of: Mapping[Kind, Rehearsed], block: GroupFacts) -> dict[str, Any]:
    """Fields of a calibration: the host's times, and AdamW's rates as its steps have them. What
    was `tried` on the device, with few rows, counts at its least: a full queue makes it longer."""
    alone, parked, passes = of["alone"], of["parked"], of.get("passes")
    whole = of.get("whole") or of["in_backward"]
    host = HostTimes(
        forward_s=alone.forward_s,
        backward_s=alone.backward_s,
        forward_beside_s=(passes or whole).forward_s,
        backward_beside_s=(passes or whole).backward_s,
        park_forward_s=max(0.0, parked.forward_s - alone.forward_s),
        park_backward_s=max(0.0, parked.backward_s - alone.backward_s),
        outside_s=min(tried.seconds["host_outside"]),
        home_update_s=(passes or whole).optimizer_s,
        device_update_s=min(tried.seconds["host_update"]),
    )
    found: dict[str, Any] = {
        "host": host,
        "host_forward_s": alone.forward_s,
        "host_block_s": alone.forward_s + alone.backward_s,
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
    """Rows to try, by how many."""

    usual: Callable[[int], BoundBatch[Any]]
    heavier_of: Callable[[int], BoundBatch[Any] | None] | None

    def heavier(self, rows: int) -> BoundBatch[Any] | None:
        """Return rows that may take more memory than the usual ones, where there are some."""
        return None if self.heavier_of is None else self.heavier_of(rows)


@dataclass(frozen=True)
class _Tried:
    few: Trial
    many: Trial
    cut: Trial  # the many rows in chunks of the few
    streamed: Streamed | None


@dataclass(frozen=True)
class _Way:
    """How the miniature is tried."""

    rows: tuple[int, int]
    edges: Literal["device", "host"] = "device"
    states: StateFormat = "fp32"

    def wrapped(self, mini: nn.Module, device: torch.device) -> AbstractContextManager[Engine]:
        how: dict[str, Any] = {"states": self.states}
        if self.edges == "device":
            return wrapped(mini, device, "none", max(self.rows), **how)
        how["placement"] = PlacementRequest(
            device_groups=COPIES, device_first="blocks", embedding="whole", head="whole"
        )
        return wrapped(mini, device, "weights", max(self.rows), **how)


def _first_that_fits(
    ways: Iterable[_Way],
    model: nn.Module,
    batches: _Batches,
    device: torch.device,
) -> _Tried:
    for way in ways:
        try:
            return _tried(model, batches, device, way)
        except (torch.OutOfMemoryError, MemoryError):
            pass  # the error holds the miniature until here
        give_back(device)
    raise NotCalibrated("two blocks do not fit on the device with their states")


def _tried(model: nn.Module, batches: _Batches, device: torch.device, way: _Way) -> _Tried:
    edges = device if way.edges == "device" else torch.device("cpu")
    mini = miniature(model, COPIES, blocks=device, edges=edges)
    mini.train()
    facts = facts_of(mini)
    if device.type == "cuda":
        return _Tried(**_trials(mini, batches, device, way), streamed=None)
    rounds = until_agreed(partial(_round, mini, batches, device, way))
    longer_s = rounds.longer_s()
    streamed = (
        None
        if longer_s is None
        else Streamed(
            longer_s=longer_s,
            updated_bytes=sum(group.update_bytes for group in facts.groups),
            copied_bytes=rounds.rounds[0].copied_bytes,
            groups=len(facts.groups),
        )
    )
    return _Tried(**rounds.trials(), streamed=streamed)


def _round(
    mini: nn.Module,
    batches: _Batches,
    device: torch.device,
    way: _Way,
    is_first: bool,
) -> Round:
    trials = _trials(mini, batches, device, way, TRIALS if is_first else TRIALS[1:])
    give_back(device)  # the trials after each other take no more than one of them
    with wrapped(mini, device, "weights", max(way.rows)) as engine:
        streamed_s, copied_bytes = _streamed_steps(mini, engine, batches.usual(max(way.rows)))
    give_back(device)
    return Round(trials=trials, streamed_s=streamed_s, copied_bytes=copied_bytes)


def _trials(
    mini: nn.Module,
    batches: _Batches,
    device: torch.device,
    way: _Way,
    names: Sequence[str] = TRIALS,
) -> dict[str, Trial]:
    """Those of `names`; what a block holds is weighed where all are made."""
    few, many = way.rows
    sizes = {"few": (few, None), "many": (many, None), "cut": (many, few)}
    with way.wrapped(mini, device) as engine:
        bench = Bench(mini, engine, [module for _, module in take_apart(mini).blocks], device)
        found = {
            name: bench.trial(batches.usual(rows), chunk_rows=chunk_rows, weighs=names == TRIALS)
            for name, (rows, chunk_rows) in sizes.items()
            if name in names
        }
        for name in ("few", "many") if names == TRIALS else ():
            heavier = batches.heavier(found[name].rows)
            if heavier is not None:
                bench.weighed(heavier, found[name])
        bench.close()
    return found


def _streamed_steps(
    mini: nn.Module, engine: Engine, batch: BoundBatch[Any]
) -> tuple[Sequence[float], int]:
    """Seconds of whole steps with the update of all that is trained, and bytes that one copies."""
    optimizer = torch.optim.AdamW([p for p in mini.parameters() if p.requires_grad], lr=1e-5)
    ends_s = [time.perf_counter()]
    while len(ends_s) <= WARMING + REPEATS:
        batch.loss(mini).backward()
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
        if len(ends_s) > 1 + WARMING and ends_s[-1] - ends_s[WARMING] > 2 * ROUND_LIMIT_S:
            break
    engine.flush()
    traffic = engine.traffic()
    steps_s = [after - before for before, after in pairwise(ends_s)]
    return steps_s[WARMING:], (traffic.h2d_bytes + traffic.d2h_bytes) // len(steps_s)
