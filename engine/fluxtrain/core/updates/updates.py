"""Optimizer updates: one job a group, in the order of the forward pass, on a thread of its own.

With deferred moments these jobs write the weights alone, all that the next forward needs. A second
job a group then writes m and v, the last group first, because both jobs read the gradients and the
next backward overwrites those in that order. Among several cards these wait until the next forward
is queued: one thread queues the work of all cards, several times slower while AdamW runs.

Who waits: a job waits for its group's gradients and for the norm; an upload of a group waits for
that group's first job; other readers and writers of the group on the host wait for both jobs
(`GroupJobs.wait`), the next backward when it has computed the group's gradients. Nothing else
waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain._native import Pass
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, Hyper
from fluxtrain.core.adamw.kernels import step_, update_threads, zero_
from fluxtrain.core.adamw.reference import rounding
from fluxtrain.core.device.device import Device
from fluxtrain.core.device.recorder import Recorder
from fluxtrain.core.device.spill import Awaited, Spill
from fluxtrain.core.device.worker import Job, Worker
from fluxtrain.core.gradients.host_gradients import Arrival
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.segment import Member, Segment
from fluxtrain.core.memory.states_on_disk import GRADIENT, WEIGHTS, Piece
from fluxtrain.core.ranks.shares import Shares
from fluxtrain.core.updates.norm import GradNorm
from fluxtrain.errors import Diverged

LONGEST_GATE_S = 2.0  # a program that runs no further pass goes on, and ends, after it


class Updates:
    """Runs the updates; `submit` once a step, or `submit_one` once a group and step.

    If the model computes on the host too, the kernels' threads are ended whenever no update waits:
    while OpenMP counts more threads than there are cores, all threads sleep at each barrier instead
    of spinning. The model's threads would too, and its small kernels take up to twice as long.
    """

    def __init__(
        self,
        arrivals: Mapping[Group, Arrival],
        device: Device,
        *,
        defers_moments: bool = False,
        holds_moments: bool = False,
    ) -> None:
        """Start the thread. `arrivals`: gradients on the host or on their way; `holds_moments`:
        deferred moments wait for `begin_moments`."""
        self._arrivals = arrivals
        self._recorder = device.recorder
        self._shares_cores = device.torch_device.type == "cpu"
        self._threads = update_threads(device.torch_device)
        self._worker = Worker("flux-update", _native.end_threads if self._shares_cores else None)
        self._refused = RefusedSteps()
        self._pending: dict[Group, None] = {}  # in the order of their updates
        self.defers_moments = defers_moments  # in steps that `submit` takes
        self._holds_moments = holds_moments
        self._gate = MomentsGate()
        self._copies = _CopyWaits()
        self.first_to_arrive: Group | None = None  # its gradients come before

    def submit(self, work: dict[Group, dict[int, Hyper]], norm: GradNorm | None) -> None:
        """Queue one step of all groups of `work`, in the order of the forward pass."""
        late: dict[Group, _Step] = {}
        self.begin_moments()
        self._gate = MomentsGate(opened=not self._holds_moments)
        try:
            for group, hypers in work.items():
                step = self._queue(group, hypers, norm, defers=self.defers_moments)
                if step is not None and step.defers:
                    late[group] = step
        finally:  # a group whose weights are queued gets its moments too
            order = [group for group in reversed(work) if group in late]
            for group in sorted(order, key=lambda group: group is not self.first_to_arrive):
                job = self._worker.submit(late[group].update_moments)
                group.jobs.moments = HeldMoments(job, self._gate)

    def begin_moments(self) -> None:
        """Let deferred moments begin: the forward pass is queued, or later work."""
        self._gate.open()

    def submit_one(self, group: Group, hypers: dict[int, Hyper], norm: GradNorm | None) -> None:
        """Queue one step of the group's members, weights and moments at once, during backward."""
        self.begin_moments()  # of another optimizer's step, which come first
        self._queue(group, hypers, norm, defers=False)

    def _queue(
        self,
        group: Group,
        hypers: dict[int, Hyper],
        norm: GradNorm | None,
        *,
        defers: bool,
    ) -> _Step | None:
        """Queue the group's first job; its weights count as changed from now on. None if the
        device updates the group."""
        group.homes.use("state")
        self._refused.take_back()
        copied, group.jobs.saving = group.jobs.saving, None  # this update waits for it
        if group.is_on("device", "state"):
            self._copies.wait_for(copied)
        unwritten = _at_home(group, group.memory.ensure_state())
        work = ranges(group, hypers)
        group.weights_changed(frozen=False)
        if group.is_on("device", "state"):
            recorder = self._recorder.of(group.placement.card)
            start = recorder.instant()
            for flat in unwritten:  # the processor is the device
                zero_(flat, threads=self._threads)
            step_on_device(work, norm)
            self._refused.note(norm, [group.members[index] for index in hypers])
            recorder.computed("update", group.name, start)
            return None
        step = _Step(
            recorder=self._recorder,
            name=group.name,
            work=work,
            stepped=[group.members[index] for index in hypers],
            arrival=self._arrivals.get(group),
            norm=norm,
            earlier=group.jobs.before_update,
            copied=copied,
            copies=self._copies,
            gate=self._gate,
            defers=defers and any(part.has_two_passes for part in work),
            pieces=expected_pieces(work, group.jobs.storing),
            threads=self._threads,
            unwritten=unwritten,
        )
        own, shares = self._worker.submit(step.update), group.shares
        group.jobs.pending = own if shares is None else shares.done_by_all(own)
        self._pending[group] = None
        return step

    @property
    def held_s(self) -> float:
        """Return the seconds that updates have waited for the copies of checkpoints."""
        return self._copies.seconds

    def wait(self) -> None:
        """Block until all updates are done; raises the first error, once. After an interrupt
        (Ctrl-C) the next call waits for the rest."""
        errors: list[Exception] = []
        for group in list(self._pending):
            try:
                group.jobs.wait()
            except Exception as error:  # noqa: BLE001  # raised below, after all jobs
                errors.append(error)
                group.weights_changed(frozen=False)  # an upload that waited for the job fails too
            self._pending.pop(group, None)
        self._refused.take_back(wait=True)
        if errors:  # a failure matters more than a refused step
            raise next((e for e in errors if not isinstance(e, Diverged)), errors[0])

    def forget_refused(self) -> None:
        """Wait without raising Diverged, because refused steps are reported already. Raises the
        error of a job that failed."""
        with suppress(Diverged):
            self.wait()

    def close(self) -> None:
        self._worker.close()


class _CopyWaits:
    """Waits for the copies of checkpoints, and counts the seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wait_for(self, copied: Future[None] | None) -> None:
        """Block until a group is copied; None: nothing copies it."""
        if copied is not None:
            started_s = time.perf_counter()
            copied.result()
            self.seconds += time.perf_counter() - started_s


@dataclass(eq=False, kw_only=True)
class _Step:
    """One group's update, in one job or two."""

    recorder: Recorder
    name: str
    work: list[Range]
    stepped: list[Member]
    arrival: Arrival | None
    norm: GradNorm | None
    earlier: list[Job]  # of the group's previous step, done before, and what stores gradients
    copied: Future[None] | None  # for a checkpoint
    copies: _CopyWaits
    gate: MomentsGate
    defers: bool  # whether a second job writes the moments
    threads: int | None  # None: all
    unwritten: list[Tensor]  # states that no step has written yet
    pieces: list[PieceWork]  # states on disk, on their way
    clip: float | None = None  # set once the weights are written with it

    def update(self) -> None:
        """Update everything, or the weights alone, once the gradients and the norm are there."""
        try:
            clip = self._clip_when_ready()
            if clip is not None:
                self._update(clip)
        finally:
            for piece in self.pieces:  # of a step that is skipped, or failed
                piece.spill.drop(piece.awaited)

    def _clip_when_ready(self) -> float | None:
        """Wait for the gradients and the norm; return the factor of the gradients, None for a step
        that is skipped."""
        for state in self.unwritten:  # while the gradients are downloaded
            zero_(state, threads=self.threads)
        try:
            for job in self.earlier:
                job.result()
            self.copies.wait_for(self.copied)
            if self.arrival is not None:
                self.arrival.wait()
            if self.norm is not None and self.norm.overflowed():
                return None  # skipped; `LossScale.take_back_skipped` takes back its count
            if self.norm is not None and self.norm.skips and self.norm.refuses():
                for member in self.stepped:
                    member.step -= 1
                return None
            return _clip(self.norm)
        except BaseException:
            for member in self.stepped:  # nothing was written: this step did not happen
                member.step -= 1
            raise

    def _update(self, clip: float) -> None:
        with self.recorder.working("cpu", "update", self.name):
            for part in self.work:
                if part.segment.on_disk is None:
                    what = Pass.WEIGHTS if self.defers and part.has_two_passes else Pass.UPDATE
                    step_(part.flat(), part.update(clip), part=what, threads=self.threads)
            while self.pieces:
                self._update_piece(self.pieces.pop(0), clip)
        self.clip = clip

    def _update_piece(self, one: PieceWork, clip: float) -> None:
        with one.spill.take(one.awaited) as buffer:
            states = one.piece.views(buffer)
            for part in one.parts:
                flat = part.flat_of(one.piece, states)
                step_(flat, part.update(clip), threads=self.threads)

    def update_moments(self) -> None:
        """Update the moments; do nothing if `update` skipped the step or failed."""
        if self.clip is None:
            return
        self.gate.wait()
        with self.recorder.working("cpu", "moments", self.name):
            for part in self.work:
                if part.has_two_passes:
                    step_(
                        part.flat(), part.update(self.clip), part=Pass.MOMENTS, threads=self.threads
                    )


def _clip(norm: GradNorm | None) -> float:
    scale = 1.0 if norm is None else norm.scale()
    if norm is not None and math.isnan(scale):
        found = f"the gradient norm is {norm.value()}"
        if not norm.losses_are_finite():
            found = f"the loss is {norm.losses()[0] if len(norm.losses()) == 1 else norm.losses()}"
        raise Diverged(
            f"{found}: the weights were left as they were before this step. Lower the learning "
            "rate, or look for bad values in the data"
        )
    return scale


@dataclass(frozen=True)
class Range:
    """Neighbouring members of one segment that take the same step."""

    segment: Segment
    gradient: Tensor | None  # the segment's, kept as zero_grad may come before the update runs;
    # None: on disk
    start: int  # elements
    stop: int
    hyper: Hyper
    step: int
    scale: float  # recorded by the caller (clip_grad_norm_, a manual mul_)

    def update(self, factor: float = 1.0, clip: Tensor | None = None) -> AdamWUpdate:
        """Return the step, with gradients also multiplied by `factor` and `clip`."""
        return AdamWUpdate(hyper=self.hyper, step=self.step, scale=self.scale * factor, clip=clip)

    def flat(self) -> Flat:
        """Return the range's slices of its segment's tensors."""
        s = self.segment
        return self._cut(slice(0, s.elements), s.states())

    def flat_of(self, piece: Piece, states: dict[str, Tensor]) -> Flat:
        """Return the range's part of a piece, whose states are these."""
        return self._cut(slice(piece.start, piece.stop), states)

    def _cut(self, there: slice, states: dict[str, Tensor]) -> Flat:
        """Return the range's slices of the segment's elements `there`, with their states."""
        s, own = self.segment, dict(states)
        weights, gradient = own.pop(WEIGHTS, None), own.pop(GRADIENT, None)
        if weights is None:
            assert s.weights is not None
            weights = s.weights[there]
        if gradient is None:
            assert self.gradient is not None
            gradient = self.gradient[there]
        whole = Flat(
            weights=weights,
            gradient=gradient,
            rounding=rounding(s.seed, self.step, there.start),
            **own,
        )
        start, stop = max(self.start, there.start), min(self.stop, there.stop)
        return whole.cut(start - there.start, stop - there.start)

    @property
    def has_two_passes(self) -> bool:
        """Return whether moments can be updated after the weights; on disk both are one record."""
        return self.segment.on_disk is None and self.flat().has_two_passes


def ranges(group: Group, hypers: dict[int, Hyper]) -> list[Range]:
    """Cut the group's members (index -> hyperparameters) into the fewest ranges that take the same
    step. A segment stores matrices first and vectors last, so two ranges suffice when only the
    matrices have weight decay."""
    found: list[Range] = []
    for segment in group.trained:
        gradient = None if segment.gradient_on_disk is not None else segment.gradient
        how: tuple[Hyper, int, float] | None = None  # of the range that the member before ended
        start = stop = 0
        for member in segment.by_offset:
            hyper = hypers.get(member.index)
            mine = None if hyper is None else (hyper, member.step, member.gradient_scale)
            if mine != how:
                if how is not None:
                    found.append(Range(segment, gradient, start, stop, *how))
                how, start = mine, member.offset
            stop = member.offset + member.count
        if how is not None:
            found.append(Range(segment, gradient, start, stop, *how))
    return found if group.shares is None else list(_of_this_process(found, group.shares))


def _of_this_process(work: Iterable[Range], shares: Shares) -> Iterator[Range]:
    for part in work:
        for first, last in shares.own(part.segment.elements):
            start, stop = max(part.start, first), min(part.stop, last)
            if start < stop:
                yield replace(part, start=start, stop=stop)


def _at_home(group: Group, states: list[Tensor]) -> list[Tensor]:
    """Return the parts of state tensors that this process is home to."""
    shares = group.shares
    if shares is None:
        return states
    return [
        part
        for segment in group.trained
        for flat in segment.states().values()
        if any(flat is one for one in states)
        for part in shares.own_parts(flat, segment.elements)
    ]


@dataclass(frozen=True)
class PieceWork:
    """A piece of states on disk that is on its way, and the ranges that step a part of it."""

    piece: Piece
    spill: Spill
    awaited: Awaited
    parts: list[Range]


def expected_pieces(work: Sequence[Range], after: Future[None] | None = None) -> list[PieceWork]:
    """Begin to read the states on disk that these ranges step, each piece once, as soon as `after`
    is done."""
    found: list[PieceWork] = []
    for segment in dict.fromkeys(part.segment for part in work):
        states = segment.on_disk
        if states is None:
            continue
        mine = [part for part in work if part.segment is segment]
        for piece in states.pieces:
            parts = [p for p in mine if p.start < piece.stop and piece.start < p.stop]
            if parts:
                awaited = states.spill.expect(piece.record, after)
                found.append(PieceWork(piece, states.spill, awaited, parts))
    return found


def step_on_device(work: Sequence[Range], norm: GradNorm | None) -> None:
    """Queue the step on the compute stream; nothing is read back."""
    if not work:
        return
    weights = work[0].segment.weights
    assert weights is not None
    one = torch.ones((), device=weights.device)
    clip = one if norm is None else norm.device_scale().to(weights.device)  # of another card
    for part in work:
        step_(part.flat(), part.update(clip=clip))


class MomentsGate:
    """Holds the moments of one step back until it is opened."""

    def __init__(self, *, opened: bool = True) -> None:
        self._opened = threading.Event()
        if opened:
            self._opened.set()

    def open(self) -> None:
        """Let the moments begin."""
        self._opened.set()

    def wait(self) -> None:
        """Block until the moments may begin, `LONGEST_GATE_S` at most."""
        self._opened.wait(LONGEST_GATE_S)
        self._opened.set()  # the other groups of this step wait no longer


class HeldMoments:
    """The moments of one group; waiting for them opens the gate of all groups."""

    def __init__(self, job: Job, gate: MomentsGate) -> None:
        self._job, self._gate = job, gate

    def result(self) -> None:
        """Wait until they are updated; raise the error of a failed update."""
        self._gate.open()
        self._job.result()

    def done(self) -> bool:
        """Return whether they are updated, or the update failed."""
        return self._job.done()


class RefusedSteps:
    """Counted steps that the device may have skipped."""

    def __init__(self) -> None:
        self._counted: list[tuple[GradNorm, Sequence[Member]]] = []

    def note(self, norm: GradNorm | None, stepped: Sequence[Member]) -> None:
        """Note a step by `norm` that was queued on the device and counted up `stepped`."""
        if norm is not None and norm.guards:
            self._counted.append((norm, stepped))

    def take_back(self, *, wait: bool = False) -> None:
        """Take back the counts of skipped steps whose norms are known; wait: of all steps.
        `LossScale.take_back_skipped` does it for steps that overflowed."""
        unknown: list[tuple[GradNorm, Sequence[Member]]] = []
        for norm, stepped in self._counted:
            if not (wait or norm.is_known()):
                unknown.append((norm, stepped))
            elif norm.refuses():
                for member in stepped:
                    member.step -= 1
        self._counted = unknown
