"""Keep the measured constants of a plan: rates of the machine, and the times of one block.

They are kept with the probe's rates and for as long, in one file for each machine and model
shape. They are never taken from an earlier training; but where its steps took far more or less than
predicted, predicted times are multiplied by what they took of it (docs/decisions/0019).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from fluxtrain.core.adamw.kernels import update_threads
from fluxtrain.events.answers.machine import Machine
from fluxtrain.events.run_folder.run_dir import runs_root
from fluxtrain.measure.calibrate import calibrate
from fluxtrain.measure.probe.adamw_rate import LEAST_PARAMETERS, PARAMETERS, adamw_rate
from fluxtrain.measure.probe.bandwidth import bus_rates, host_copy_rate, sample_bytes
from fluxtrain.measure.probe.cache import cache_file, keep, read_kept
from fluxtrain.measure.probe.others import BUSY_SHARE, beside_text, is_calm_after
from fluxtrain.measure.probe.probe import known_rates, sustained_threads
from fluxtrain.measure.small_model import NotCalibrated, free_memory
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.plan.calibration import Calibration, timed_rows
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.rates import Rates, rates_from
from fluxtrain.plan.search import CHUNK_TOKENS, GPU_CHUNK_TOKENS
from fluxtrain.plan.states import STATE_FORMATS, StateFormat, StorageFormat
from fluxtrain.units import MIB, duration_text

COPY_BYTES = 32 * MIB  # with more, this copy would be the memory peak of a small run
FAR_OFF = 1.5  # times: a prediction that a run missed by more is corrected
RATE_LIMIT_S = 0.8  # for each rate of the native optimizer
_log = logging.getLogger(__name__)
FORMAT = 17  # of the file; files of other formats are ignored


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The measured numbers from which a plan's time is computed."""

    per_s: Mapping[str, float | None]  # rates by the probe's names
    calibration: Calibration | None = None
    source: str  # in words: what was measured, and when
    is_new: bool = False  # measured by this process
    run_times: float = 1.0  # what steps of the last run took, of what this calibration predicts
    place: Path | None = None  # the file of the calibration

    @property
    def still_to_come_bytes(self) -> int:
        """Return the bytes by which this process will grow at its first computation, else 0."""
        timed = self.calibration
        return 0 if timed is None or self.is_new else timed.runtime_bytes

    def rates(self, *, has_gpu: bool) -> Rates | str:
        """Return the rates for the cost model, or the missing ones' names."""
        return rates_from(self.per_s, has_gpu=has_gpu, calibration=self.calibration)

    @property
    def timing(self) -> str:
        """Return the basis of predicted times, for `predicted_text`."""
        if self.calibration is None:
            return "assumed"
        disturbed = (self.calibration.others_share or 0.0) >= BUSY_SHARE and self.run_times == 1.0
        return "disturbed" if disturbed else "measured"

    def note_run(self, times: float) -> None:
        """Keep the ratio of a run's step time to its prediction; nothing where that was about
        right."""
        kept = None if self.place is None else read_kept(self.place, _Kept, FORMAT)
        if self.place is None or kept is None or 1 / FAR_OFF < times < FAR_OFF:
            return
        keep(self.place, msgspec.structs.replace(kept, run_times=self.run_times * times))

    def applied(self, facts: ModelFacts) -> ModelFacts:
        """Return `facts` with the measured bytes of activations, if they were measured."""
        timed, row = self.calibration, facts.row
        if timed is None or row is None or not timed.activation_bytes:
            return facts
        found = replace(
            row,
            activation_bytes=timed.activation_bytes,
            saved_bytes=timed.kept_bytes,
            edge_bytes=timed.edge_bytes,
        )
        return replace(facts, row=found)


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """The subject of a measurement: a shape of model on a machine, as a run will train it."""

    facts: ModelFacts
    machine: Machine
    device: str
    batch_rows: int | None
    in_backward: bool

    def place(self, *, mixed: bool) -> Path:
        """Return the file for this machine, device, model shape, timed rows, kind of rows and, on a
        GPU, kind of steps."""
        row = self.facts.row
        assert row is not None
        groups = self.facts.groups
        blocks = [group for group in groups if group.kind == "block"]
        middle = blocks[len(blocks) // 2]
        edges = [(g.weight_bytes, g.users) for g in groups if g.kind == "edge"]
        trained = (middle.trained_bf16, middle.trained_fp16, middle.trained_fp32, middle.states)
        shape = (middle.weight_bytes, middle.storage, trained, edges, self.facts.layers)
        rows = (row.hidden, row.vocabulary, row.sequence_length, row.dtype_bytes)
        timed = timed_rows(row.sequence_length, self.batch_rows, _timed_tokens(self.device))
        kind = (mixed, self.in_backward and self.device == "cuda")
        threads, torch_version = torch.get_num_threads(), str(torch.__version__)
        how = (rows, timed, *kind, threads, torch_version, *_card(self.device))
        return cache_file("block", self.machine, self.device, shape, *how)


class _Kept(msgspec.Struct, frozen=True):
    format: int
    per_s: dict[str, float]
    calibration: Calibration
    run_times: float = 1.0

    @property
    def measured_at_s(self) -> float:
        """Return when the block was timed."""
        return self.calibration.measured_at_s


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
    """Return what was measured before for a model of this shape.

    Where no block was timed, these are the probe's rates (`per_s`; None: the kept ones) with the
    constants of this class of machines. `mixed`: timed with rows of several documents; None: either
    way, those first. `in_backward`: for a run that updates in its backward pass.
    """
    subject = _Subject(
        facts=facts, machine=machine, device=device, batch_rows=batch_rows, in_backward=in_backward
    )
    wanted = (True, False) if mixed is None else (mixed,)
    places = [subject.place(mixed=one) for one in wanted]
    found_at = ((place, read_kept(place, _Kept, FORMAT)) for place in places)
    place, found = next((one for one in found_at if one[1] is not None), (None, None))
    probed = _probed() if per_s is None else per_s
    if found is None:
        return Constants(
            per_s=probed,
            source="rates of the machine and typical times of such machines: `fluxtrain train` "
            "times a block of this model before its first step",
        )
    return Constants(
        per_s=_either(found.per_s, probed),
        calibration=found.calibration,
        source=_source(found.calibration, is_new=False) + _corrected(found.run_times),
        run_times=found.run_times,
        place=place,
    )


def measure_constants(
    facts: ModelFacts,
    machine: Machine,
    device: str,
    batch_rows: int | None,
    model: torch.nn.Module,
    batch_of: Callable[[int], BoundBatch[Any]],
    heavier_of: Callable[[int], BoundBatch[Any] | None] | None = None,
    *,
    in_backward: bool = False,
    steps: int | None = None,
    meet: Callable[[], object] = lambda: None,
) -> Constants:
    """Return `known_constants`; unknown ones are measured now, in a few seconds, and kept.

    `batch_of`, `heavier_of` and `steps` are as for `calibrate`. `meet` waits for a run's other
    processes: all update in one memory, and so they measure that at the same time.
    """
    mixed = heavier_of is not None
    known = known_constants(
        facts, machine, device, batch_rows, mixed=mixed, in_backward=in_backward
    )
    subject = _Subject(
        facts=facts, machine=machine, device=device, batch_rows=batch_rows, in_backward=in_backward
    )
    place = subject.place(mixed=mixed)
    timed, is_new = known.calibration, False
    refused: NotCalibrated | None = None
    if timed is None or _should_time_again(timed):
        assert facts.row is not None
        rows = timed_rows(facts.row.sequence_length, batch_rows, _timed_tokens(device))
        fewer = timed_rows(facts.row.sequence_length, batch_rows, CHUNK_TOKENS)
        try:
            timed = calibrate(
                model,
                batch_of,
                torch.device(device),
                rows,
                fewer,
                _states(facts),
                heavier_of,
                machine.memory_available_bytes,
                frozen=_storage(facts),
                in_backward=in_backward,
                steps=steps,
            )
            is_new = True
        except NotCalibrated as reason:
            refused = reason
    meet()
    if timed is None or refused is not None:
        return replace(known, source=f"{known.source} ({refused})")
    adamw, copies = _adamw_rates(subject, timed), _missing_rates(known.per_s, machine, device)
    if not (is_new or copies or any(adamw.values())):
        return known
    timed = replace(timed, **adamw)
    run_times = 1.0 if is_new else known.run_times
    _write(place, copies, timed, run_times)
    return Constants(
        per_s=_either(copies, known.per_s),
        calibration=timed,
        source=_source(timed, is_new=is_new) + _corrected(run_times),
        is_new=is_new,
        run_times=run_times,
        place=place,
    )


def _either(
    measured: Mapping[str, float], probed: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Return the probe's rates, and those measured with a block where the probe has none."""
    return {**probed, **measured, **{name: rate for name, rate in probed.items() if rate}}


def _timed_tokens(device: str) -> int:
    """Return the tokens of the larger timed chunk: the largest that a plan takes, as small chunks
    do not fill a GPU and say nothing about large ones."""
    return GPU_CHUNK_TOKENS if device == "cuda" else CHUNK_TOKENS


def _should_time_again(timed: Calibration) -> bool:
    """Return whether the disturbance of the measurement is gone now, or may be."""
    missed = timed.steps_not_timed
    return (missed is not None and not missed.lasts) or is_calm_after(timed.others_share)


def _source(timed: Calibration, *, is_new: bool) -> str:
    """Say what was timed, and whether this run or an earlier one did it."""
    who = "" if is_new else " by an earlier run"
    missed = "" if timed.steps_not_timed is None else f"; {timed.steps_not_timed.text}"
    few, many = timed.rows
    beside = beside_text(timed.others_share, command="fluxtrain train")
    return (
        f"one block, timed on this machine{who} with {few} and {many} rows in "
        f"{duration_text(timed.measuring_s)}{beside}{missed}"
    )


def _corrected(run_times: float) -> str:
    if run_times == 1.0:
        return ""
    return f"; times follow the last run, whose steps took {run_times:.2g} times what that predicts"


def _probed() -> dict[str, float | None]:
    return {name: rate.per_s for name, rate in known_rates(runs_root()).items()}


def _missing_rates(
    known: Mapping[str, float | None], machine: Machine, device: str
) -> dict[str, float]:
    """Measure the rates of copies that no probe has measured, if there is memory for that."""
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
    except (RuntimeError, MemoryError) as error:  # other programs fill the card
        _log.info("copies were not measured: %s", error)
        return {}
    finally:
        if torch.cuda.is_initialized():  # what was copied is no memory of the run
            free_memory(torch.device(device))
    return {name: rate.per_s for name, rate in found.items() if rate.per_s}


def _states(facts: ModelFacts) -> StateFormat:
    """Return the state format of FluxTrain's AdamW; block timing uses it for other optimizers
    too."""
    found = {group.states for group in facts.groups if group.masters}
    return next((states for states in STATE_FORMATS if states in found), "fp32")


def _storage(facts: ModelFacts) -> StorageFormat:
    """Return how large frozen weights are stored."""
    return next((g.storage for g in facts.groups if g.storage != "plain"), "plain")


def _adamw_rates(subject: _Subject, timed: Calibration) -> dict[str, Any]:
    """Measure the native optimizer's rates that the calibration `timed` does not have yet, by as
    many parameters as the model trains, up to a number that is beyond any cache."""
    trained = sum(group.trained for group in subject.facts.groups)
    known = (sustained_threads(subject.machine), update_threads(torch.device(subject.device)))
    wanted = {"adamw_per_s": False}
    if any(group.states == "8bit" for group in subject.facts.groups):
        wanted["adamw_8bit_per_s"] = True
    return {
        name: adamw_rate(
            subject.machine.memory_available_bytes,
            parameters=min(max(trained, LEAST_PARAMETERS), PARAMETERS),
            threads=min((count for count in known if count is not None), default=None),
            limit_s=RATE_LIMIT_S,
            eight_bit=eight_bit,
            sustained=True,
        ).per_s
        for name, eight_bit in wanted.items()
        if getattr(timed, name) is None
    }


def _card(device: str) -> tuple[str, ...]:
    """Return the name of the card that computes, where there is one: cards of a machine differ."""
    if device != "cuda" or not torch.cuda.is_available():
        return ()
    return (str(torch.cuda.get_device_name(torch.cuda.current_device())),)


def _write(place: Path, rates: Mapping[str, float], timed: Calibration, run_times: float) -> None:
    """Write `timed`, and add `rates` to the rates already in the file."""
    before = read_kept(place, _Kept, FORMAT)
    every = {**({} if before is None else before.per_s), **rates}
    keep(place, _Kept(FORMAT, every, timed, run_times))
