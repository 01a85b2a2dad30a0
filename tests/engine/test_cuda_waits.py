"""How often a GPU's driver is asked, without a GPU: streams and copies that were seen already."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fluxtrain.core.device.cuda_device import CudaTransfer
from fluxtrain.core.device.current_gpu import CurrentStream
from fluxtrain.core.device.recorder import Stalls


class FakeStream:
    def __init__(self, **numbers: int) -> None:
        self.numbers = numbers
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


class FakeEvent:
    def __init__(self, *, enable_timing: bool = False) -> None:
        self.passed, self.asked = False, 0

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        self.asked += 1
        return self.passed

    def synchronize(self) -> None:
        self.asked += 1
        self.passed = True


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The numbers of the stream that is current."""
    state = {"current": (0, 0, 1)}
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentStream", lambda index: state["current"], raising=False
    )
    return state


def issued(stream: CurrentStream) -> CudaTransfer:
    transfer = CudaTransfer(Stalls(), stream)
    transfer._issued.set()
    return transfer


def test_the_current_stream_is_that_of_the_moment(driver: dict[str, Any]) -> None:
    current = CurrentStream(torch.device("cuda", 0))
    first: Any = current()
    assert first.numbers == {"stream_id": 0, "device_index": 0, "device_type": 1}
    driver["current"] = (7, 0, 1)
    other: Any = current()
    assert other is not first and other.numbers["stream_id"] == 7
    driver["current"] = (0, 0, 1)
    assert current() is first


def test_a_copy_that_was_seen_to_have_arrived_is_not_asked_about_again(
    driver: dict[str, Any],
) -> None:
    transfer = issued(CurrentStream(torch.device("cuda", 0)))
    end: Any = transfer.end
    assert not transfer.done() and not transfer.done()
    assert end.asked == 2
    end.passed = True
    assert transfer.done()
    transfer.wait_host()
    transfer.wait_compute("weights")
    assert transfer.done() and end.asked == 3


def test_a_copy_that_failed_says_so_whoever_waits(driver: dict[str, Any]) -> None:
    transfer = CudaTransfer(Stalls(), CurrentStream(torch.device("cuda", 0)))
    transfer.fail(RuntimeError("the update failed"))
    assert transfer.failed() and not transfer.done()
    for wait in (transfer.wait_host, lambda: transfer.wait_compute("weights")):
        with pytest.raises(RuntimeError, match="the update failed"):
            wait()
