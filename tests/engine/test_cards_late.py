"""Chunks between cards that arrive as late as they may: only when the computation waits for them.

A card's memory holds NaN until then, so whatever reads a chunk without waiting for it is found.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.wrap import wrap as wrapping
from fluxtrain.core.wrap.engine import engine_of
from tests.between_blocks import BETWEEN, Model, assert_close, gradients
from tests.on_cards import ROWS, assert_same, batch, llama, trained, wrapped
from tests.written_arguments import MODES, what_is_written_reaches_other_cards


class Later:
    """A copy that is made when something waits for it, or for a later one on its way."""

    def __init__(self, copy_now: Callable[[], object], after: Sequence[Any]) -> None:
        self._copy_now: Callable[[], object] | None = copy_now
        self._after = list(after)

    def arrive(self) -> None:
        for point in self._after:
            if isinstance(point, Later):
                point.arrive()
        if self._copy_now is not None:
            self._copy_now()
        self._copy_now = None


class LateDevice(CpuDevice):
    """A processor's part to which copies from others come late."""

    made: ClassVar[list[int]] = []  # rows at which copied parts begin, in the order of copies
    waits_outside = True

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, Later] = {}  # the last copy of each way

    def landing(self, like: Tensor, way: int = 0) -> Tensor:
        made = super().landing(like, way)
        return made.fill_(torch.nan) if made.is_floating_point() else made.zero_()

    def land(
        self, to: Tensor, source: Tensor, after: Sequence[Any], sender: Any, way: int = 0
    ) -> Any:
        def copy_now() -> None:
            to.data.copy_(source.data)
            LateDevice.made.append(to.storage_offset() // max(1, math.prod(to.shape[1:])))

        before = [self._before[way]] if way in self._before else []
        self._before[way] = Later(copy_now, [*after, *before])
        return self._before[way]

    def wait_for(self, point: Any) -> None:
        if isinstance(point, Later):
            point.arrive()

    def wait_outside(self, point: Any) -> None:
        if self.waits_outside:
            self.wait_for(point)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapping, "open_device", lambda device, one_of_several=False: LateDevice())
    monkeypatch.setattr(LateDevice, "made", [])


@pytest.fixture
def blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let code outside of blocks wait for no gradient, so that each block has to."""
    monkeypatch.setattr(LateDevice, "waits_outside", False)


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("late", "blocks_alone")
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"activations": "host"},
        {"offload": "none"},
        {"resident_blocks": 3, "blocks_without_recompute": 2},
        {"embedding": "rows", "head": "chunks"},
    ],
    ids=str,
)
def test_nothing_is_read_before_it_arrives(how: dict[str, Any]) -> None:
    model = llama(6)
    other = copy.deepcopy(model)
    one, several = trained(model, None, **how), trained(other, 3, **how)
    assert LateDevice.made
    assert_same(one, several)


@pytest.mark.thinned(3)
@pytest.mark.usefixtures("late", "blocks_alone")
@pytest.mark.parametrize("chunk_rows", [1, ROWS])
@pytest.mark.parametrize("dealing", [(1, 1, 1, 0, 1, 1), (1, 0, 1, 0, 1, 0)], ids=str)
@pytest.mark.parametrize(
    "how", [{}, {"offload": "none"}, {"embedding": "rows", "head": "chunks"}], ids=str
)
def test_nothing_is_read_before_it_arrives_from_an_embedding_elsewhere(
    how: dict[str, Any], dealing: tuple[int, ...], chunk_rows: int
) -> None:
    model = llama(6)
    other = copy.deepcopy(model)
    given = {"chunk_rows": chunk_rows, **how}
    assert_same(trained(model, None, **given), trained(other, dealing, **given))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("chunk_rows", [8, 2])
@pytest.mark.parametrize("mode", MODES)
def test_blocks_that_write_to_arguments_wait_for_all_that_they_copy_of_them(
    mode: str, chunk_rows: int
) -> None:
    what_is_written_reaches_other_cards(inside=True, mode=mode, chunk_rows=chunk_rows)
    assert LateDevice.made


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.thinned(5)
def test_gradients_of_code_between_blocks_have_arrived_when_it_reads_them(
    between: Callable[[Tensor], Tensor],
) -> None:
    one, *others = (gradients(Model(between), cards) for cards in (1, 2, 3))
    for found in others:
        assert_close(found, one)
    assert LateDevice.made


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("cards", [2, 3])
def test_a_head_in_order_waits_for_what_it_reads(cards: int) -> None:
    model = llama(4)
    other = copy.deepcopy(model)
    wrapped(model, None)
    wrapped(other, cards)
    engine = engine_of(other)
    engine.plan = replace(engine.plan, head_dealing="in_order")
    for each in (engine_of(model), engine):
        each.head_tokens = 2  # more chunks than there are buffers
    for one in (model, other):
        one(**batch()).loss.backward()
        engine_of(one).flush()
    for (name, left), right in zip(model.named_parameters(), other.parameters(), strict=True):
        assert left.grad is not None and right.grad is not None
        assert torch.equal(left.grad, right.grad), name
    fluxtrain.unwrap(other)


class TwoResults(nn.Module):
    """A block of an image model: of words and of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.pixels = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, words: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(words) + pixels, self.pixels(pixels) + words


class Edited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoResults() for _ in range(5))

    def forward(self, words: Tensor, pixels: Tensor) -> Tensor:
        for block in self.blocks:
            words, pixels = block(words, pixels)
        return words + pixels


@pytest.mark.usefixtures("late", "blocks_alone")
def test_a_chunk_waits_for_no_later_chunk_of_another_result() -> None:
    model = Edited()
    wrapped(model, 2, chunk_rows=1)
    for _ in range(2):  # the first time chunks are tried on all rows
        LateDevice.made.clear()
        model(torch.randn(2, 8), torch.randn(2, 8)).sum().backward()
    assert LateDevice.made == [0, 0, 1, 1] * 8  # two results of four blocks, and their gradients
    fluxtrain.unwrap(model)
