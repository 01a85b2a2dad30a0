"""Boundaries that are still on the device when the backward pass comes need no way back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.device.cpu_device import CpuDevice
from fluxtrain.memory.boundary import LEAVING, BoundaryPark
from fluxtrain.wrapping.engine import engine_of
from tests.wrap_with import wrap_with


class Uploads:
    """Boundaries that were brought back to a device, and copies home that were waited for."""

    def __init__(self, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.back, self.waited = 0, 0
        upload, download = device.upload, device.download

        def counted(to: Tensor, source: Tensor, *args: Any, **options: Any) -> Any:
            self.back += "follows" in options
            return upload(to, source, *args, **options)

        def late(to: Tensor, source: Tensor) -> Any:
            transfer = download(to, source)
            wait = transfer.wait_compute

            def waited(cause: str) -> None:
                self.waited += 1
                wait(cause)

            transfer.wait_compute, transfer.done = waited, lambda: False
            return transfer

        monkeypatch.setattr(device, "upload", counted)
        monkeypatch.setattr(device, "download", late)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    one = CpuDevice()
    yield one
    one.close()


def parked(park: BoundaryPark, count: int) -> list[tuple[Tensor, Any]]:
    tensors = [torch.full((8,), float(at)) for at in range(count)]
    return [(tensor, park.park([tensor], [True])[0]) for tensor in tensors]


def test_the_last_ones_come_back_as_they_are_when_their_copies_are_made(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, park = Uploads(device, monkeypatch), BoundaryPark(device)
    all_of_them = parked(park, 5)
    for at, (tensor, one) in reversed(list(enumerate(all_of_them))):
        found = park.fetch(one)
        assert bool((found == at).all())
        stayed = at >= 5 - LEAVING
        assert (found.data_ptr() == tensor.data_ptr()) == stayed
        assert uploads.waited == min(5 - at, LEAVING)  # its memory may be reused from now on
    assert uploads.back == 5 - LEAVING


def test_one_that_was_written_to_comes_from_the_host(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, park = Uploads(device, monkeypatch), BoundaryPark(device)
    (_, first), (written, last) = parked(park, 2)
    last.transfer.wait_host()
    written.add_(9.0)
    assert bool((park.fetch(last) == 1.0).all())
    assert bool((park.fetch(first) == 0.0).all())
    assert uploads.back == 1


def test_a_training_brings_back_all_but_the_last_ones_and_keeps_its_bits(
    tiny: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[dict[str, Tensor]] = []
    for boundaries in ("device", "host"):
        model = tiny("llama", torch.bfloat16, num_hidden_layers=4)
        wrap_with(model, offload="weights", activations=boundaries, chunk_rows=2)
        engine = engine_of(model)
        uploads = Uploads(engine.device, monkeypatch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for seed in range(3):
            model(**batch(seed=seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.flush()
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        boundaries_of_a_step = 5  # of four blocks and the last norm
        assert engine.park.parked == (0 if boundaries == "device" else 3 * boundaries_of_a_step)
        assert uploads.back == max(0, engine.park.parked - 3 * LEAVING)
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name
