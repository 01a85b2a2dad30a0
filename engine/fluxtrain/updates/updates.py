"""Optimizer updates: one job a group, in the order of the forward pass, on a thread of its own.

With deferred moments these jobs write the weights alone, all that the next forward needs. A second
job a group then writes m and v, the last group first, because both jobs read the gradients and the
next backward overwrites those in that order. Among several cards these wait until the next forward
is queued: one thread queues the work of all cards, several times slower while AdamW runs.

Who waits: a job waits for its group's gradients and for the norm; an upload of a group waits for
that group's first job; other readers and writers of the group on the host wait for both jobs
(`Group.wait`), the next backward when it has computed the group's gradients. Nothing else waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from fluxtrain import _native
from fluxtrain.adamw.hyper import Hyper
from fluxtrain.adamw.native_adamw import update_threads, zero_
from fluxtrain.adamw.step import Part, step_
from fluxtrain.device.device import Device
from fluxtrain.device.recorder import Recorder
from fluxtrain.device.worker import Job, Worker
from fluxtrain.errors import Diverged
from fluxtrain.gradients.host_gradients import Arrival
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member
from fluxtrain.updates.held_moments import HeldMoments, Hold
from fluxtrain.updates.norm import GradNorm
from fluxtrain.updates.ranges import Range, flat_of, ranges, step_on_device
from fluxtrain.updates.refused_steps import RefusedSteps


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
        """`arrivals`: gradients on the host or on their way there. `holds_moments`: deferred ones
        wait for `begin_moments`."""
        self._arrivals = arrivals
        self._recorder = device.recorder
        self._shares_cores = device.torch_device.type == "cpu"
        self._threads = update_threads(device.torch_device)
        self._worker = Worker("flux-update", _native.end_threads if self._shares_cores else None)
        self._refused = RefusedSteps()
        self._pending: dict[Group, None] = {}  # in the order of their updates
        self.defers_moments = defers_moments  # in steps that `submit` takes
        self._holds_moments = holds_moments
        self._moments_held = Hold()
        self._hold = _CopyHold()
        self.first_to_arrive: Group | None = None  # its gradients come before

    def submit(self, work: dict[Group, dict[int, Hyper]], norm: GradNorm | None) -> None:
        """Queue one step of all groups of `work`, in the order of the forward pass."""
        late: dict[Group, _Step] = {}
        self.begin_moments()
        self._moments_held = Hold(begun=not self._holds_moments)
        try:
            for group, hypers in work.items():
                step = self._queue(group, hypers, norm, defers=self.defers_moments)
                if step is not None and step.defers:
                    late[group] = step
        finally:  # a group whose weights are queued gets its moments too
            order = [group for group in reversed(work) if group in late]
            for group in sorted(order, key=lambda group: group is not self.first_to_arrive):
                job = self._worker.submit(late[group].update_moments)
                group.moments = HeldMoments(job, self._moments_held)

    def begin_moments(self) -> None:
        """Let deferred moments begin: the forward pass is queued, or what comes after it."""
        self._moments_held.end()

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
        self._refused.take_back()
        copied, group.saving = group.saving, None  # this update waits for it
        if group.placement.state == "device":
            self._hold.wait_for(copied)
        unwritten = group.ensure_state()
        work = ranges(group, hypers)
        group.weights_changed(frozen=False)
        if group.placement.state == "device":
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
            earlier=[job for job in (group.pending, group.moments) if job is not None],
            copied=copied,
            hold=self._hold,
            moments_held=self._moments_held,
            defers=defers and any(flat_of(part).has_two_passes for part in work),
            threads=self._threads,
            unwritten=unwritten,
        )
        group.pending = self._worker.submit(step.update)
        self._pending[group] = None
        return step

    @property
    def held_s(self) -> float:
        """Seconds that updates waited for the copies of checkpoints, ever."""
        return self._hold.seconds

    def wait(self) -> None:
        """Block until all updates are done; raises the first error, once. After an interrupt
        (Ctrl-C) the next call waits for the rest."""
        errors: list[Exception] = []
        for group in list(self._pending):
            try:
                group.wait()
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


class _CopyHold:
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
    earlier: list[Job]  # of the group's previous step, on the same thread, so done before
    copied: Future[None] | None  # for a checkpoint
    hold: _CopyHold
    moments_held: Hold
    defers: bool  # whether a second job writes the moments
    threads: int | None  # None: all
    unwritten: list[Tensor]  # states that no step has written yet
    clip: float | None = None  # set once the weights are written with it

    def update(self) -> None:
        """Update everything, or the weights alone, once the gradients and the norm are there."""
        for state in self.unwritten:  # while the gradients are downloaded
            zero_(state, threads=self.threads)
        try:
            for job in self.earlier:
                job.result()
            self.hold.wait_for(self.copied)
            if self.arrival is not None:
                self.arrival.wait()
            if self.norm is not None and self.norm.overflowed():
                return  # the step is skipped; `LossScale.take_back_skipped` takes back its count
            if self.norm is not None and self.norm.skips and self.norm.refuses():
                for member in self.stepped:
                    member.step -= 1
                return
            clip = _clip(self.norm)
        except BaseException:
            for member in self.stepped:  # nothing was written: this step did not happen
                member.step -= 1
            raise
        with self.recorder.working("cpu", "update", self.name):
            for part in self.work:
                flat = flat_of(part)
                what: Part = "weights" if self.defers and flat.has_two_passes else "update"
                step_(flat, part.update(clip), part=what, threads=self.threads)
        self.clip = clip

    def update_moments(self) -> None:
        """Update the moments; do nothing if `update` skipped the step or failed."""
        if self.clip is None:
            return
        self.moments_held.wait()
        with self.recorder.working("cpu", "moments", self.name):
            for part in self.work:
                flat = flat_of(part)
                if flat.has_two_passes:
                    step_(flat, part.update(self.clip), part="moments", threads=self.threads)


def _clip(norm: GradNorm | None) -> float:
    scale = 1.0 if norm is None else norm.scale()
    if norm is not None and math.isnan(scale):
        told = f"the gradient norm is {norm.value()}"
        if not norm.losses_are_finite():
            told = f"the loss is {norm.losses()[0] if len(norm.losses()) == 1 else norm.losses()}"
        raise Diverged(
            f"{told}: the weights were left as they were before this step. Lower the learning "
            "rate, or look for bad values in the data"
        )
    return scale
