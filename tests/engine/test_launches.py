"""Kernels are launched on their tensors' GPU, whichever is torch's current one; without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from fluxtrain.core.adamw import dynamic_map, triton_adamw
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, Hyper
from fluxtrain.core.adamw.kernels import step_
from fluxtrain.core.adamw.reference import Rounding
from fluxtrain.core.device.current_gpu import launching_on
from fluxtrain.core.head import token_loss

TENSORS_ON = 1
ONE = torch.tensor(1.0)


class Gpus:
    """Which of some GPUs is current, how often that was changed, and where kernels went."""

    def __init__(self) -> None:
        self.current, self.changes = 0, 0
        self.launches: list[int] = []

    @contextmanager
    def made_current(self, index: int) -> Iterator[None]:
        before, self.current, self.changes = self.current, index, self.changes + 1
        try:
            yield
        finally:
            self.current = before

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """As a Triton kernel's launch."""
        return lambda *_, **__: self.launches.append(self.current)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """All tensors seem to be on the second of two GPUs; kernels are launched and do nothing."""
    found = Gpus()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: found.current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", found.made_current)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: TENSORS_ON)
    kernels = {
        triton_adamw: ["_adamw", "_adamw8", "_adamw16"],
        token_loss: ["_row"],
    }
    for module, names in kernels.items():
        monkeypatch.setattr(module, "triton", object())
        for name in names:
            monkeypatch.setattr(module, name, found, raising=False)
    return found


def step(flat: Flat) -> None:
    step_(flat, AdamWUpdate(hyper=Hyper(), step=1, clip=ONE), backend="triton")


def update() -> None:
    step(Flat(**{name: torch.ones(4) for name in ("weights", "m", "v", "gradient")}))


def update_with_8_bits() -> None:
    ones = torch.ones(dynamic_map.BLOCK)
    codes, scales = ones.to(torch.uint8), torch.ones(1)
    step(Flat(weights=ones, m=codes, v=codes, m_scale=scales, v_scale=scales, gradient=ones))


def update_with_bf16() -> None:
    ones = torch.ones(4)
    halves = ones.to(torch.bfloat16)
    step(Flat(weights=ones, m=halves, v=halves, gradient=ones, rounding=Rounding(0, 0, 0)))


def loss_of_a_chunk() -> None:
    words = token_loss.VocabRange(weight=torch.ones(5, 3), bias=None)
    sums = token_loss.SoftmaxSums.of(torch.zeros(2, dtype=torch.int64))
    logits = token_loss.FusedLogits(torch.float32, 5, None, 2)
    logits.compute(torch.ones(2, 3), words, sums, collect=True, scale=ONE)


LAUNCHES = (update, update_with_8_bits, update_with_bf16, loss_of_a_chunk)


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.__name__)
def test_a_kernel_goes_to_its_tensors_gpu(launch: Callable[[], None], gpus: Gpus) -> None:
    launch()
    assert gpus.launches == [TENSORS_ON]
    assert (gpus.current, gpus.changes) == (0, 1)


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.__name__)
def test_where_that_is_the_current_one_nothing_is_changed(
    launch: Callable[[], None], gpus: Gpus
) -> None:
    gpus.current = TENSORS_ON
    launch()
    assert gpus.launches == [TENSORS_ON]
    assert gpus.changes == 0


def test_without_a_gpu_no_driver_is_asked() -> None:
    with launching_on(ONE):
        assert not ONE.is_cuda
