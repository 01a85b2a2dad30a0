"""The measured constants of a plan: rates of the machine, and one block of this model tried on it.

They are kept beside the probe's rates, for as long, one file for each machine and model shape, and
never come from a training of the same case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from fluxtrain.adamw.native_adamw import update_threads
from fluxtrain.calibration.block_timing import NotCalibrated
from fluxtrain.calibration.calibrate import calibrate
from fluxtrain.client.machine import Machine
from fluxtrain.errors import FluxTrainError
from fluxtrain.hardware.cache import cache_file, is_fresh
from fluxtrain.hardware.others import beside_text, is_calm_after
from fluxtrain.hardware.probe.adamw_rate import LEAST_PARAMETERS, PARAMETERS, Part, adamw_rate
from fluxtrain.hardware.probe.bandwidth import bus_rates, host_copy_rate, sample_bytes
from fluxtrain.hardware.probe.probe import known_rates, sustained_threads
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.plan.choices.ranked import GPU_CHUNK_TOKENS
from fluxtrain.plan.cost.calibration import Calibration, trial_rows
from fluxtrain.plan.cost.rates import Rates, rates_from
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.search import CHUNK_TOKENS
from fluxtrain.plan.states import STATE_FORMATS, StateFormat
from fluxtrain.rundir.run_dir import runs_root
from fluxtrain.telemetry.storage import write_json
from fluxtrain.units import MIB, duration_text

COPY_BYTES = 32 * MIB  # more would be the most that a small run ever holds
RATE_LIMIT_S = 0.8  # of each rate of the native optimizer
_log = logging.getLogger(__name__)
FORMAT = 12  # of the file; a reader ignores another one


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the time of a plan is computed from."""

    per_s: Mapping[str, float | None]  # by the probe's names
    calibration: Calibration | None = None
    source: str  # in words
    is_new: bool = False  # measured by this process

    @property
    def still_to_come_bytes(self) -> int:
        """What this process will grow by when it first computes, unless it has."""
        tried = self.calibration
        return 0 if tried is None or self.is_new else tried.runtime_bytes

    def rates(self, *, has_gpu: bool) -> Rates | str:
        """For the cost model, or what is missing."""
        return rates_from(self.per_s, has_gpu=has_gpu, calibration=self.calibration)

    def applied(self, facts: ModelFacts) -> ModelFacts:
        """`facts` with the activations that were measured, where they were."""
        tried, row = self.calibration, facts.row
        if tried is None or row is None or not tried.activation_bytes:
            return facts
        found = replace(
            row,
            activation_bytes=tried.activation_bytes,
            saved_bytes=tried.kept_bytes,
            edge_bytes=tried.edge_bytes,
        )
        return replace(facts, row=found)


class _Kept(msgspec.Struct, frozen=True):
    format: int
    per_s: dict[str, float]
    calibration: Calibration


def known_constants(
    facts: ModelFacts,
    machine: Machine,
    device: str,
    batch_rows: int | None,
    per_s: Mapping[str, float | None] | None = None,
    *,
    mixed: bool | None = None,
    in_backward: bool = False,
) -> Constants:
    """What was measured before: a block of this shape, else the probe's rates (`per_s`, or those
    that are kept) with the constants of this class of machines. `mixed`: with rows of several
    documents; None: with any, those first. `in_backward`: for a run that updates in its backward
    pass."""
    wanted = (True, False) if mixed is None else (mixed,)
    places = (
        _place(facts, machine, device, batch_rows, mixed=one, in_backward=in_backward)
        for one in wanted
    )
    kept = (_read(place) for place in places)
    found = next((one for one in kept if one is not None), None)
    probed = _probed() if per_s is None else per_s
    if found is None:
        return Constants(
            per_s=probed,
            source="rates of the machine and constants of its class: no block of this model was "
            "tried here yet, which `fluxtrain train` does",
        )
    return Constants(
        per_s=_either(found.per_s, probed),
        calibration=found.calibration,
        source=_source(found.calibration),
    )


def measured_constants(
    facts: ModelFacts,
    machine: Machine,
    device: str,
    batch_rows: int | None,
    model: torch.nn.Module,
    batch_of: Callable[[int], BoundBatch[Any]],
    heavier_of: Callable[[int], BoundBatch[Any] | None] | None = None,
    *,
    in_backward: bool = False,
) -> Constants:
    """As `known_constants`, but what is not known is measured now, in a few seconds, and kept."""
    mixed = heavier_of is not None
    known = known_constants(
        facts, machine, device, batch_rows, mixed=mixed, in_backward=in_backward
    )
    place = _place(facts, machine, device, batch_rows, mixed=mixed, in_backward=in_backward)
    if known.calibration is not None and not _tries_again(known.calibration, machine):
        known = _completed(
            known, known.calibration, place, facts, machine, device, in_backward=in_backward
        )
        return _warned(known)
    assert facts.row is not None
    rows = trial_rows(facts.row.sequence_length, batch_rows, _trial_tokens(device))
    fewer = trial_rows(facts.row.sequence_length, batch_rows, CHUNK_TOKENS)
    try:
        on, states = torch.device(device), _states(facts)
        memory = machine.memory_available_bytes
        tried = calibrate(
            model, batch_of, on, rows, fewer, states, heavier_of, memory, in_backward=in_backward
        )
    except NotCalibrated as reason:
        return _warned(replace(known, source=f"{known.source} ({reason})"))
    tried = replace(tried, **_adamw_rates(facts, machine, device, tried, in_backward=in_backward))
    rates = _missing_rates(known.per_s, machine, device)
    _write(place, rates, tried)
    found = Constants(
        per_s=_either(rates, known.per_s),
        calibration=tried,
        source=_source(tried),
        is_new=True,
    )
    return _warned(found)


def _warned(found: Constants) -> Constants:
    """The same, after a warning where whole steps were not rehearsed and may be the next time."""
    missed = None if found.calibration is None else found.calibration.not_rehearsed
    if missed is not None and not missed.lasts:
        _log.warning("%s", missed.text)
    return found


def _completed(
    known: Constants,
    tried: Calibration,
    place: Path,
    facts: ModelFacts,
    machine: Machine,
    device: str,
    *,
    in_backward: bool,
) -> Constants:
    """With the rates that could not be measured when the block was tried, and can be now."""
    adamw = _adamw_rates(facts, machine, device, tried, in_backward=in_backward)
    rates = _missing_rates(known.per_s, machine, device)
    if not rates and not any(adamw.values()):
        return known
    tried = replace(tried, **adamw)
    _write(place, rates, tried)
    return replace(known, per_s=_either(rates, known.per_s), calibration=tried)


def _either(
    measured: Mapping[str, float], probed: Mapping[str, float | None]
) -> dict[str, float | None]:
    """The probe's rates, and what was measured for a trial where it has none."""
    return {**probed, **measured, **{name: rate for name, rate in probed.items() if rate}}


def _trial_tokens(device: str) -> int:
    """Of the larger chunk that is tried: the largest that a plan takes, because small ones do not
    fill a GPU and say nothing about large ones."""
    return GPU_CHUNK_TOKENS if device == "cuda" else CHUNK_TOKENS


def _tries_again(tried: Calibration, machine: Machine) -> bool:
    """Was something in the way that is gone now, or may be?"""
    missed = tried.not_rehearsed
    if missed is not None and missed.may_succeed(machine.memory_available_bytes):
        return True
    return is_calm_after(tried.others_share)


def _source(tried: Calibration) -> str:
    missed = "" if tried.not_rehearsed is None else f"; {tried.not_rehearsed.text}"
    return f"one block, tried {_when(tried)}{missed}"


def _when(tried: Calibration) -> str:
    few, many = tried.rows
    beside = beside_text(tried.others_share, command="fluxtrain train")
    return (
        f"with {few} and {many} rows before a training on this machine, in "
        f"{duration_text(tried.measuring_s)}{beside}"
    )


def _probed() -> dict[str, float | None]:
    return {name: rate.per_s for name, rate in known_rates(runs_root()).items()}


def _missing_rates(
    known: Mapping[str, float | None], machine: Machine, device: str
) -> dict[str, float]:
    """The copies' rates, where no probe measured them, as far as there is memory for that."""
    size = sample_bytes(machine.memory_available_bytes)
    names = ("h2d_pinned", "d2h_pinned") if device == "cuda" else ("host_copy",)
    if all(known.get(name) for name in names):
        return {}
    try:
        if device == "cuda":
            found = bus_rates(size_bytes=size)
        else:
            few, threads = min(COPY_BYTES, size), sustained_threads(machine)
            found = {"host_copy": host_copy_rate(few, threads=threads)}
    except (RuntimeError, MemoryError) as error:  # a card that others fill, as for the probe
        _log.info("copies were not measured: %s", error)
        return {}
    return {name: rate.per_s for name, rate in found.items() if rate.per_s}


def _states(facts: ModelFacts) -> StateFormat:
    """Of FluxTrain's own AdamW, which the trial updates with also where another one will."""
    found = {group.states for group in facts.groups if group.masters}
    return next((states for states in STATE_FORMATS if states in found), "fp32")


def _adamw_rates(
    facts: ModelFacts, machine: Machine, device: str, tried: Calibration, *, in_backward: bool
) -> dict[str, Any]:
    """Fields of a calibration that it has not yet: the native optimizer's rates as this model's
    updates run, on a GPU's host, where they can be hidden, also in two passes, or beside the
    backward pass of an `in_backward` run."""
    narrow = any(group.states == "8bit" for group in facts.groups)
    two_passes = any(group.pass_bytes for group in facts.groups)
    wanted: dict[str, tuple[Part, bool, bool]] = {"adamw_per_s": ("all", False, False)}
    if narrow:
        wanted["adamw_8bit_per_s"] = ("all", True, False)
    if device == "cuda" and in_backward:
        wanted["adamw_beside_per_s"] = ("all", False, True)
    if device == "cuda" and in_backward and narrow:
        wanted["adamw_8bit_beside_per_s"] = ("all", True, True)
    if device == "cuda" and two_passes and not in_backward:
        wanted["adamw_weights_per_s"] = ("weights", False, False)
        wanted["adamw_moments_per_s"] = ("moments", False, True)
    return {
        name: _adamw_per_s(facts, machine, device, part, eight_bit=eight_bit, beside=beside)
        for name, (part, eight_bit, beside) in wanted.items()
        if getattr(tried, name) is None
    }


def _adamw_per_s(
    facts: ModelFacts, machine: Machine, device: str, part: Part, *, eight_bit: bool, beside: bool
) -> float | None:
    """The native optimizer over as much memory as this model's states take, up to what is beyond
    any cache, beside copies as a training has them: what is updated goes up for the next forward
    pass. `beside` the backward pass gradients come down too, and fewer threads update."""
    trained = sum(group.trained for group in facts.groups)
    known = (sustained_threads(machine), update_threads(torch.device(device)))
    threads = min((count for count in known if count is not None), default=None)
    found = adamw_rate(
        machine.memory_available_bytes,
        parameters=min(max(trained, LEAST_PARAMETERS), PARAMETERS),
        threads=threads,
        limit_s=RATE_LIMIT_S,
        eight_bit=eight_bit,
        part=part,
        sustained=True,
        sends=device == "cuda",
        receives=device == "cuda" and beside,
    )
    return found.per_s


def _place(
    facts: ModelFacts,
    machine: Machine,
    device: str,
    batch_rows: int | None,
    *,
    mixed: bool,
    in_backward: bool,
) -> Path:
    """The file of this machine, device, model shape, size of the trial, kind of rows and, on a GPU,
    of steps."""
    row = facts.row
    assert row is not None
    blocks = [group for group in facts.groups if group.kind == "block"]
    middle = blocks[len(blocks) // 2]
    edges = [(g.weight_bytes, g.users) for g in facts.groups if g.kind == "edge"]
    trained = (middle.trained_bf16, middle.trained_fp16, middle.trained_fp32, middle.states)
    shape = (middle.weight_bytes, trained, edges, facts.layers)
    rows = (row.hidden, row.vocabulary, row.sequence_length, row.dtype_bytes)
    trial = trial_rows(row.sequence_length, batch_rows, _trial_tokens(device))
    threads = torch.get_num_threads()
    kind = (mixed, in_backward and device == "cuda")
    how = (rows, trial, *kind, threads, str(torch.__version__))
    return cache_file("block", machine, device, shape, *how)


def _read(place: Path) -> _Kept | None:
    try:
        kept = msgspec.json.decode(place.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    usable = kept.format == FORMAT and is_fresh(kept.calibration.measured_at_s)
    return kept if usable else None


def _write(place: Path, rates: Mapping[str, float], tried: Calibration) -> None:
    """`rates` beside those that are there. A cache that cannot be written costs a new measurement
    next time, no more."""
    before = _read(place)
    every = {**({} if before is None else before.per_s), **rates}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, _Kept(FORMAT, every, tried))
    except (OSError, FluxTrainError):
        return
