"""Offloaded inputs that are still on the device in the backward pass are not uploaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.memory.activation_offload import MOST_DOWNLOADS, ActivationOffload
from fluxtrain.core.wrap.engine import engine_of
from tests.wrap_with import wrap_with


class Uploads:
    """Inputs that were uploaded again, and downloads that were waited for."""

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


def offloaded(offload: ActivationOffload, count: int) -> list[tuple[Tensor, Any]]:
    tensors = [torch.full((8,), float(at)) for at in range(count)]
    return [(tensor, offload.offload([tensor], [True])[0]) for tensor in tensors]


def test_the_last_ones_come_back_as_they_are_when_their_copies_are_made(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, offload = Uploads(device, monkeypatch), ActivationOffload(device)
    all_of_them = offloaded(offload, 5)
    for at, (tensor, one) in reversed(list(enumerate(all_of_them))):
        found = offload.fetch(one)
        assert bool((found == at).all())
        stayed = at >= 5 - MOST_DOWNLOADS
        assert (found.data_ptr() == tensor.data_ptr()) == stayed
        assert uploads.waited == min(5 - at, MOST_DOWNLOADS)  # its memory may be reused from now on
    assert uploads.back == 5 - MOST_DOWNLOADS


def test_one_that_was_written_to_comes_from_the_host(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, offload = Uploads(device, monkeypatch), ActivationOffload(device)
    (_, first), (written, last) = offloaded(offload, 2)
    last.download.wait_host()
    written.add_(9.0)
    assert bool((offload.fetch(last) == 1.0).all())
    assert bool((offload.fetch(first) == 0.0).all())
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
        inputs_of_a_step = 5  # of four blocks and the last norm
        assert engine.cards[0].activation_offload.offloaded_count == (
            0 if boundaries == "device" else 3 * inputs_of_a_step
        )
        assert uploads.back == max(
            0, engine.cards[0].activation_offload.offloaded_count - 3 * MOST_DOWNLOADS
        )
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


class TwoStreams(nn.Module):
    """A block with two inputs that ask for gradients, as image models have."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        mixed = (image + text.mean(1, keepdim=True)).tanh()
        return image + self.own(mixed), text + self.other(mixed.mean(1, keepdim=True))


class ImageModel(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.enter = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(TwoStreams() for _ in range(depth))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image, text = self.enter(image), self.enter(text)
        for block in self.blocks:
            image, text = block(image, text)
        mean: Tensor = image.square().mean() + text.square().mean()
        return mean


@pytest.mark.parametrize("cards", [1, 2])
def test_each_input_of_a_block_comes_back_once_and_is_let_go(
    cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth, away = 8, list[Any]()
    offload = ActivationOffload.offload

    def noted(self: ActivationOffload, *arguments: Any) -> Any:
        found = offload(self, *arguments)
        away.extend(found.values())
        return found

    monkeypatch.setattr(ActivationOffload, "offload", noted)
    model = ImageModel(depth)
    request = fluxtrain.PlacementRequest(offload="weights", activations="host")
    fluxtrain.wrap(model, device="cpu", cards=cards, chunk_rows=2, placement=request)
    uploads = [Uploads(card.device, monkeypatch) for card in engine_of(model).cards]
    loss = model(torch.randn(4, 6, 16), torch.randn(4, 3, 16))
    assert len(away) == 2 * depth
    loss.backward()
    assert not [one for one in away if one.on_device is not None], "held until the loss is gone"
    assert sum(one.back for one in uploads) == 2 * depth - cards * MOST_DOWNLOADS


class Joined(TwoStreams):
    """Its results are parts of one tensor."""

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([text, image], 1)
        both = both + self.own(both).tanh() + self.other(both)
        return both[:, text.shape[1] :], both[:, : text.shape[1]]


@pytest.mark.parametrize("chunk_rows", [1, 2])
def test_parts_of_one_result_wait_on_the_host(chunk_rows: int) -> None:
    model = ImageModel(6)
    model.blocks = nn.ModuleList(Joined() for _ in range(6))
    request = fluxtrain.PlacementRequest(offload="weights", activations="host")
    fluxtrain.wrap(model, device="cpu", cards=1, chunk_rows=chunk_rows, placement=request)
    card = engine_of(model).cards[0]
    loss = model(torch.randn(2, 6, 16), torch.randn(2, 3, 16))
    assert card.activation_offload.offloaded_count == 2 * 6
    assert card.counts.block_input_bytes == 0
    loss.backward()
