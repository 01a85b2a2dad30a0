"""Buffers that gradients pass through, on a device whose blocks compute beside each other: who
writes to a buffer waits for the lane that still reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.gradients.host_gradients import GradientStaging
from fluxtrain.core.wrap import wrap as wrapping
from fluxtrain.core.wrap.engine import engine_of
from tests.on_cards import batch, llama, wrapped

SIZE_BYTES = 64


class LanesDevice(CpuDevice):
    """Counts the points of its computation, and remembers which were waited for."""

    lanes = 2

    def __init__(self) -> None:
        super().__init__()
        self.points = 0
        self.waited: set[Any] = set()

    def mark(self) -> Any:
        self.points += 1
        return self.points

    def wait_for(self, point: Any) -> None:
        self.waited.add(point)


def staged_in(staging: GradientStaging, value: float) -> Tensor:
    host, values = torch.zeros(16), torch.full((16,), value)
    _, staged = staging.download(None, host, values, SIZE_BYTES)  # type: ignore[arg-type]
    return staged


def quiet(*told: object) -> None: ...


@pytest.mark.parametrize("reads", ["the last", "an earlier one"])
def test_the_next_to_write_to_a_buffer_waits_for_its_readers(reads: str) -> None:
    device = LanesDevice()
    staging = GradientStaging(device, quiet, quiet)
    first, second = staged_in(staging, 1.0), staged_in(staging, 2.0)
    read = second if reads == "the last" else first
    staging.read_until_now(SIZE_BYTES, read)
    point = device.points
    while True:
        waited = point in device.waited
        if staged_in(staging, 3.0).data_ptr() == read.data_ptr():
            break
        assert not waited
    assert point in device.waited
    device.close()


def test_all_that_reads_gradients_on_their_way_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapping, "open_device", lambda device, one_of_several=False: LanesDevice())
    engine = wrapped(model := llama(6), 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for passes in (1, 2):  # rounded gradients, and sums that come up again
        for part in range(passes):
            model(**batch(part)).loss.backward()
        optimizer.step()
        engine_of(model).flush()
        for card in engine.cards:
            rings = card.gradients.host.staging._rings
            assert rings
            assert all(all(ring.read) for ring in rings.values())
