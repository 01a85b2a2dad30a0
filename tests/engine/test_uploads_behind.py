"""An upload that waits for other copies holds up none but its like."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.device.device import Transfer
from fluxtrain.core.gradients.gradients import Gradients
from fluxtrain.core.memory.group import Group
from tests.engine.slow_device import SlowDevice
from tests.engine.test_host_gradients import Told, group, of, one_pass

COUNT, LIMIT_S = 1000, 10.0


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    one = CpuDevice()
    yield one
    one.close()


@pytest.fixture
def come(device: CpuDevice) -> Iterator[threading.Event]:
    """Downloads wait until it is set."""
    come = threading.Event()
    device._down.submit(lambda: come.wait(LIMIT_S))
    yield come
    come.set()


def host(value: float) -> Tensor:
    return torch.full((COUNT,), value)


def arrives(transfer: Transfer) -> bool:
    """In time?"""
    until_s = time.monotonic() + LIMIT_S / 2
    while not transfer.done() and time.monotonic() < until_s:
        time.sleep(0.001)
    return transfer.done()


def test_weights_overtake_a_sum_that_waits_for_its_way_home(
    device: CpuDevice, come: threading.Event
) -> None:
    home, back, weights = host(0.0), host(0.0), host(0.0)
    down = device.download(home, host(3.0))
    behind = device.upload(back, home, None, None, [down])
    assert arrives(device.upload(weights, host(5.0), None, None))
    assert torch.equal(weights, host(5.0)) and not behind.done()
    come.set()
    behind.wait_host()
    assert torch.equal(back, host(3.0))


def test_an_upload_behind_one_that_failed_fails_too(
    device: CpuDevice, come: threading.Event
) -> None:
    begins = threading.Event()
    device._up.submit(lambda: begins.wait(LIMIT_S))
    too_small = device.upload(host(0.0)[:1], host(1.0), None, None)
    behind = device.upload(host(0.0), host(1.0), None, None, [too_small])
    begins.set()
    with pytest.raises(AssertionError):
        behind.wait_host()
    assert behind.failed()
    device.upload(host(0.0), host(1.0), None, None).wait_host()


@pytest.mark.parametrize("seed", range(6))
def test_sums_are_right_however_late_their_copies_come(seed: int) -> None:
    """Passes over groups in any order, some of which raise, and weights between them."""
    drawn, told = random.Random(seed), Told()
    device = SlowDevice(seed)
    gradients = Gradients(device, told.sent, told.brought)
    handed: list[object] = []
    submit = device._behind.submit
    device._behind.submit = lambda work: (handed.append(work), submit(work))[1]  # type: ignore
    groups = [group(torch.bfloat16) for _ in range(4)]
    totals: dict[Group, list[Tensor]] = {}
    slot, weights = torch.zeros(COUNT), [host(float(i)) for i in range(50)]
    for number in range(20):
        g = drawn.choice(groups)
        if drawn.random() < 0.2 and g in totals:
            gradients.prefetch(g)
            gradients.discard()
        taken = device.upload(slot, weights[number], None, device.mark())
        values = one_pass(gradients, g, number)
        before = totals.get(g)
        totals[g] = (
            [value.bfloat16().float() for value in values]
            if before is None
            else [a + b for a, b in zip(before, values, strict=True)]
        )
        taken.wait_compute("weights")
        assert torch.equal(slot, weights[number])
    for g, total in totals.items():
        for found, wanted in zip(of(gradients, g), total, strict=True):
            assert torch.equal(found, wanted if found.dtype == torch.float32 else wanted.bfloat16())
    assert handed
    device.close()
