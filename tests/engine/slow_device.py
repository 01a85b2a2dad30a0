"""A "device" in host memory whose copies come late and in the order that a GPU gives them.

`CpuDevice` makes uploads on one thread in the order in which they were asked for. On a GPU one that
waits for an update is queued when that is done, by the thread that did it, and those that were
asked for later are queued before it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import _MultiDeviceReplicator

from fluxtrain.core.device.arena import host_copy
from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.device.device import Transfer
from fluxtrain.core.device.recorder import Stalls
from fluxtrain.core.updates import updates
from fluxtrain.core.wrap import wrap as wrapping

_LONGEST_S = 0.004  # of a delay; a step of the tests' models takes some 0.02


class SlowTransfer:
    """A copy that is first issued, then made."""

    def __init__(self, stalls: Stalls) -> None:
        self._stalls = stalls
        self._issued = threading.Event()
        self._made: Future[tuple[float, float]] = Future()

    def issue(self, queue: Callable[[], Future[tuple[float, float]]]) -> None:
        queue().add_done_callback(lambda made: self._made.set_result(made.result()))
        self._issued.set()

    def fail(self, error: BaseException) -> None:
        self._made.set_exception(error)
        self._issued.set()

    @property
    def duration_s(self) -> float | None:
        return None

    def instants(self) -> tuple[float, float] | None:
        return (0.0, 0.0) if self._issued.is_set() and not self.failed() else None

    def done(self) -> bool:
        return self._made.done() and not self.failed()

    def failed(self) -> bool:
        return self._made.done() and self._made.exception() is not None

    def wait_host(self) -> None:
        self._made.result()

    def wait_compute(self, cause: str) -> None:
        self._made.result()


class SlowDevice(CpuDevice):
    """Delays are drawn by `seed`; what they are added to runs on real threads."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.asked: list[SlowTransfer] = []  # uploads, by whom it may concern

    def delay(self) -> None:
        """Now and then none, or a short or a long one."""
        time.sleep(_LONGEST_S * self._random.choice((0.0, 0.1, 1.0)))

    def upload(
        self, to: Tensor, source: Tensor, after: Future[None] | None, free: Any,
        follows: Sequence[Transfer] = (), *, urgent: bool = False,
    ) -> Transfer:  # fmt: skip
        transfer = SlowTransfer(self.stalls)
        self.asked.append(transfer)
        worker = self._up if all(one.done() for one in follows) else self._behind

        def issue(done: Future[None] | None) -> None:
            error = None if done is None else done.exception()
            if error is not None:
                transfer.fail(error)
            else:
                transfer.issue(lambda: worker.submit(lambda: self._copy(to, source, follows)))

        if after is None or after.done():
            issue(after)
        else:
            after.add_done_callback(issue)
        return transfer

    def download(self, to: Tensor, source: Tensor) -> Transfer:
        transfer = SlowTransfer(self.stalls)
        transfer.issue(lambda: self._down.submit(lambda: self._copy(to, source, ())))
        return transfer

    def _copy(self, to: Tensor, source: Tensor, follows: Sequence[Transfer]) -> tuple[float, float]:
        for earlier in follows:
            earlier.wait_host()
        self.delay()
        host_copy(to, source)
        return 0.0, 0.0


def slowed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """From now on wrapped models compute on a slow device, and their updates are slow too."""
    devices: list[SlowDevice] = []

    def opened(_: torch.device, *, one_of_several: bool = False) -> SlowDevice:
        devices.append(SlowDevice(seed))
        return devices[-1]

    def late(step: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            devices[-1].delay()
            step(*arguments, **options)
            devices[-1].delay()

        return run

    monkeypatch.setattr(wrapping, "open_device", opened)
    monkeypatch.setattr(updates, "step_", late(updates.step_))


@contextmanager
def scalers_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, what torch.amp.GradScaler sends to the host is on its way, as it is from a GPU: torch
    copies to page-locked memory without waiting. It arrives when the host has waited for the GPU,
    which it does by reading a value of another tensor; until then anything is in its place."""
    sent: dict[int, tuple[Tensor, Tensor]] = {}  # by id: here, there
    with monkeypatch.context() as patch:

        def get(self: _MultiDeviceReplicator, device: torch.device) -> Tensor:
            if device not in self._per_device_tensors:
                here = torch.full_like(self.master, torch.nan)
                sent[id(here)] = here, self.master
                self._per_device_tensors[device] = here
            return self._per_device_tensors[device]

        def reading(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
            def value_of(tensor: Tensor) -> Any:
                if id(tensor) not in sent:
                    for here, there in sent.values():
                        here.copy_(there)
                    sent.clear()
                return read(tensor)

            return value_of

        patch.setattr(_MultiDeviceReplicator, "get", get)
        for name in ("__bool__", "__float__", "item"):
            patch.setattr(Tensor, name, reading(getattr(Tensor, name)))
        yield
