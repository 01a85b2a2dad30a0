"""Optimizer updates: one job a group, in the order of the forward pass, on a thread of its own.

With deferred moments these jobs write the weights alone, all that the next forward needs; a second
one a group follows for m and v, the last group first: in that order the next backward overwrites
the gradients, which both jobs read.

A table whose rows are looked up is updated last: what the next forward needs of it is computed
ahead of its job (`rows_ahead`), or between two pieces of it.

Who waits: a job waits for its group's gradients and for the norm, that of a table before each piece
for whoever asks for rows; an upload of a group waits for that group's first job; whoever else
touches the group at home waits for both (`Group.wait`), the next backward when it has computed the
group's gradients. Nobody else waits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain.device.device import Device
from fluxtrain.device.worker import Worker
from fluxtrain.errors import Diverged
from fluxtrain.gradients.gradients import Gradients
from fluxtrain.gradients.host_gradients import Arrival
from fluxtrain.memory.group import Group
from fluxtrain.memory.recorder import Recorder
from fluxtrain.memory.segment import Member
from fluxtrain.optim.row_adamw import weights_of_rows
from fluxtrain.optim.split_adamw import Hyper, zero_
from fluxtrain.optim.stepping import (
    Flat,
    step_moments_on_host_,
    step_on_host_,
    step_weights_on_host_,
    update_threads,
)
from fluxtrain.plan.states import STATE_BLOCK
from fluxtrain.stream.norm import GradNorm
from fluxtrain.stream.ranges import Range, flat_of, ranges, step_on_device
from fluxtrain.stream.refused_steps import RefusedSteps

FIRST_PIECE_ELEMENTS = 1 << 24  # of a table that others look into, some 3 ms on a GPU's host


class Updates:
    """Runs the updates; `submit` once a step, or `submit_one` once a group and step.

    Where the model computes on the host's cores too, the threads that the kernels keep are ended
    whenever no update waits: while OpenMP counts more threads than there are cores, all of them
    sleep at each barrier instead of spinning. The computation's do too, and its small kernels take
    up to twice as long.
    """

    def __init__(
        self, gradients: Gradients, device: Device, *, defers_moments: bool = False
    ) -> None:
        self._gradients = gradients
        self._recorder = device.recorder
        self._shares_cores = device.torch_device.type == "cpu"
        self._threads = update_threads(device.torch_device)
        self._worker = Worker("flux-update", _native.end_threads if self._shares_cores else None)
        self._refused = RefusedSteps()
        self._pending: dict[Group, None] = {}  # in the order of their updates
        self._ahead: dict[Group, _Step] = {}  # of tables, the last one
        self.defers_moments = defers_moments  # of the steps that `submit` takes
        self.first_home: Group | None = None  # whose gradients come before those of groups after it

    def submit(self, work: dict[Group, dict[int, Hyper]], norm: GradNorm | None) -> None:
        """Queue one step of all groups of `work` (in the order of the forward pass), a table whose
        rows are computed ahead late."""
        late: dict[Group, _Step] = {}
        try:
            for group in _in_order(work):
                step = self._queue(group, work[group], norm, defers=self.defers_moments)
                if step is not None and step.defers:
                    late[group] = step
        finally:  # whose weights are on their way gets its moments too
            order = [group for group in reversed(work) if group in late]
            for group in sorted(order, key=lambda group: group is not self.first_home):
                group.moments = self._worker.submit(late[group].update_moments)

    def submit_one(self, group: Group, hypers: dict[int, Hyper], norm: GradNorm | None) -> None:
        """Queue one step of the group's members, weights and moments at once, under the backward
        pass."""
        self._queue(group, hypers, norm, defers=False)

    def _queue(
        self,
        group: Group,
        hypers: dict[int, Hyper],
        norm: GradNorm | None,
        *,
        defers: bool,
    ) -> _Step | None:
        """Queue the group's first job; its weights count as changed from now on. None where the
        device updates."""
        self._refused.settle()
        unwritten = group.ensure_state()
        work = ranges(group, hypers)
        group.version += 1
        if group.placement.state == "device":
            start = self._recorder.instant()
            for flat in unwritten:  # where the processor is the device
                zero_(flat, threads=self._threads)
            step_on_device(work, norm)
            self._refused.note(norm, [group.members[index] for index in hypers])
            self._recorder.computed("update", group.name, start)
            return None
        step = _Step(
            recorder=self._recorder,
            name=group.name,
            work=work,
            stepped=[group.members[index] for index in hypers],
            arrival=self._gradients.host.arrivals.get(group),
            norm=norm,
            earlier=[job for job in (group.pending, group.moments) if job is not None],
            defers=defers and any(flat_of(part).moments_can_wait for part in work),
            first_piece=self._first_piece(group),
            threads=self._threads,
            unwritten=unwritten,
        )
        group.pending = self._worker.submit(step.update)
        self._pending[group] = None
        if _looks_ahead(group):
            self._ahead[group] = step
        return step

    def _first_piece(self, group: Group) -> int | None:
        """Elements of the first piece of a table, whole rows and whole blocks of states. None: the
        group is updated in one. Where the model computes on the same cores every piece would wait
        for the thread that gets a core last."""
        if self._shares_cores or not _looks_ahead(group):
            return None
        width: int = group.members[0].shape[1]
        return width * STATE_BLOCK * max(1, FIRST_PIECE_ELEMENTS // width // STATE_BLOCK)

    def rows_ahead(self, group: Group, rows: Tensor, into: Tensor) -> bool:
        """The weights that `rows` (U,) ascending of the group's table have after the update under
        way, `into` (U, H); waits for the gradients and the norm, and for the piece of the table
        that is just being updated. False where the table itself has them, or will have when its
        update is done."""
        step = self._ahead.pop(group, None)
        if step is None:
            return False
        found = step.rows_ahead(rows, into)
        if found:
            self._ahead[group] = step
        if self._shares_cores:
            _native.end_threads()
        return found

    def wait(self) -> None:
        """Block until all updates are done; raises the first error, once. After an interrupt
        (Ctrl-C) the next call waits for the rest."""
        errors: list[Exception] = []
        for group in list(self._pending):
            try:
                group.wait()
            except Exception as error:  # noqa: BLE001  # raised below, when all have ended
                errors.append(error)
                group.version += 1  # a copy that waited for it has failed, or is about to
            self._pending.pop(group, None)
        self._refused.settle(wait=True)
        self._ahead.clear()  # the tables have it all, and the gradients may be given up
        if errors:  # one that was refused is no news beside one that failed
            raise next((e for e in errors if not isinstance(e, Diverged)), errors[0])

    def forget_refused(self) -> None:
        """Wait; those that were refused have been told of, by who saw the first of them. Raises
        what made others fail."""
        with suppress(Diverged):
            self.wait()

    def close(self) -> None:
        self._worker.close()


@dataclass(eq=False, kw_only=True)
class _Step:
    """One group's update: what its one or two jobs do."""

    recorder: Recorder
    name: str
    work: list[Range]
    stepped: list[Member]
    arrival: Arrival | None
    norm: GradNorm | None
    earlier: list[Future[None]]  # of the group's step before; done when the first job's turn comes
    defers: bool  # are there two jobs?
    first_piece: int | None  # elements; None: it is written in one
    threads: int | None  # None: all
    unwritten: list[Tensor]  # of the states
    clip: float | None = None  # the weights were written with it
    its_turn: bool = False  # no other update runs: while rows are answered, none at all
    written: int | None = 0  # elements; None: being written, not known after an error, or all
    lock: threading.Lock = field(default_factory=threading.Lock)  # held by who reads or writes it
    asking: threading.Lock = field(default_factory=threading.Lock)  # held until rows are answered

    def update(self) -> None:
        """All of it, or the weights, once the gradients and the norm are there."""
        self.its_turn = True
        try:
            for flat in self.unwritten:  # while the gradients are on their way
                zero_(flat, threads=self.threads)
            self._update()
        finally:
            self.written = None

    def _update(self) -> None:
        try:
            for job in self.earlier:
                job.result()
            if self.arrival is not None:
                self.arrival.wait()
            if self.norm is not None and self.norm.overflowed():
                return  # the step is left out; `LossScale.settle` takes back its count
            clip = _clip(self.norm)
        except BaseException:
            for member in self.stepped:  # nothing was written: this step did not happen
                member.step -= 1
            raise
        with self.recorder.working("cpu", "update", self.name):
            for part in self.work:
                for flat, stop in self._pieces(flat_of(part)):
                    self._write(flat, stop, part, part.scale * clip)
        self.clip = clip

    def _pieces(self, flat: Flat) -> Iterator[tuple[Flat, int]]:
        """The range, or of a table the first piece and then others as long as all before them, each
        begun when whoever asks for rows has them; and where it ends. Whoever asks so waits no
        longer than the update has run, and few pieces are enough."""
        n, start = flat.weights.numel(), 0
        while start < n:
            stop = min(n, start + max(start, self.first_piece or n))
            with self.asking:
                pass
            yield (flat.cut(start, stop) if stop - start < n else flat), stop
            start = stop

    def _write(self, flat: Flat, stop: int, part: Range, scale: float) -> None:
        if self.defers and flat.moments_can_wait:
            step_on_host = step_weights_on_host_
        else:
            step_on_host = step_on_host_
        with self.lock:
            self.written = None
            step_on_host(
                flat, hyper=part.hyper, step=part.step, scale=scale,
                threads=self.threads, turns=part.turns,
            )  # fmt: skip
            self.written = stop

    def rows_ahead(self, rows: Tensor, into: Tensor) -> bool:
        """As `Updates.rows_ahead`."""
        with self.asking:  # nothing that is waited for here needs the next piece
            for job in self.earlier:  # they write what is read here
                job.result()
            if self.arrival is not None:
                self.arrival.wait()
            scale = 1.0 if self.norm is None else self.norm.scale()
            if not math.isfinite(scale):
                return False  # the update refuses the step, or leaves it out
            with self.lock:
                if self.written is None or len(self.work) != 1:
                    return False
                with self.recorder.working("cpu", "update", self.name):
                    self._look_up(rows, into, self.written // into.shape[1], scale)
        return True

    def _look_up(self, rows: Tensor, into: Tensor, written_rows: int, scale: float) -> None:
        """The weights of rows of a table whose first `written_rows` have theirs."""
        part = self.work[0]
        flat, there = flat_of(part), int(torch.searchsorted(rows, written_rows))
        table = flat.weights.view(-1, into.shape[1])
        torch.index_select(table, 0, rows[:there], out=into[:there])
        weights_of_rows(
            flat, rows[there:], into[there:],
            hyper=part.hyper, step=part.step, scale=part.scale * scale,
            threads=self.threads if self.its_turn else None,
        )  # fmt: skip

    def update_moments(self) -> None:
        """What `update` left; nothing where that left the step out or failed, which it tells."""
        if self.clip is None:
            return
        with self.recorder.working("cpu", "moments", self.name):
            for part in self.work:
                flat = flat_of(part)
                if flat.moments_can_wait:
                    scale = part.scale * self.clip
                    step_moments_on_host_(
                        flat, hyper=part.hyper, step=part.step, scale=scale, threads=self.threads
                    )


def _in_order(work: Iterable[Group]) -> list[Group]:
    """That of the forward pass, but a table whose rows are computed ahead comes last; one that the
    head needs whole, early enough for its copy."""
    order = list(work)
    for group in [group for group in order if _looks_ahead(group)]:
        order.remove(group)
        order.insert(len(order) if group.by_rows else 3 * len(order) // 4, group)
    return order


def _looks_ahead(group: Group) -> bool:
    """Does the forward read rows of it, which can be computed before its own turn? fp16 is rounded
    from its masters when they are written."""
    at_home = group.rows is not None and group.placement.weights != "device"
    return at_home and group.members[0].segment.dtype is not torch.float16


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
