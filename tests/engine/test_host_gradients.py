"""Several backward passes a step: what is at home comes up, is added to, and goes home again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.gradients.gradients import Gradients
from fluxtrain.core.gradients.host_gradients import Arrival, HostGradients
from fluxtrain.core.memory.group import Group
from fluxtrain.core.ranks.exchange import Exchange
from fluxtrain.core.ranks.join import Ranks
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import MisusedModel
from fluxtrain.plan import heads
from fluxtrain.plan.group_placement import GroupPlacement
from tests.engine.row_models import inputs, llama, wrapped
from tests.wrap_with import wrap_with

CPU = torch.device("cpu")
SHAPES = ((33, 7), (5,), (64, 3))


class Told:
    """Bytes of the copies that were told, by their way."""

    def __init__(self) -> None:
        self.up = 0
        self.down = 0

    def sent(self, group: Group, transfer: object, size_bytes: int) -> None:
        self.down += size_bytes

    def brought(self, group: Group, transfer: object, size_bytes: int) -> None:
        self.up += size_bytes


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def gradients(told: Told) -> Iterator[Gradients]:
    device = CpuDevice()
    yield Gradients(device, told.sent, told.brought)
    device.close()


def group(dtype: torch.dtype, *, kind: Any = "block", shapes: Any = SHAPES) -> Group:
    made = Group("some", kind)
    made.users = 1
    for i, shape in enumerate(shapes):
        made.add(nn.Parameter(torch.zeros(shape, dtype=dtype)), f"p{i}")
    made.place(GroupPlacement.on("host"), CPU, pin=False)
    return made


def draws(g: Group, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(m.shape, generator=source) for m in g.members]


def one_pass(gradients: Gradients, g: Group, seed: int, members: Any = None) -> list[Tensor]:
    values = draws(g, seed)
    gradients.prefetch(g)
    for i in range(len(values)) if members is None else members:
        gradients.add(g, g.members[i], values[i])
    gradients.finish(g)
    return values


def of(gradients: Gradients, g: Group) -> list[Tensor]:
    gradients.host.wait(g)
    return [m.gradient.clone() for m in g.members]


def norms(gradients: Gradients, g: Group) -> list[float]:
    """As the device has them; none is asked for at home."""
    arrival = gradients.host.arrivals[g]
    assert arrival.norms is not None
    assert sorted(arrival.norm_of) == [m.index for m in g.members if m.has_gradient]
    return [float(arrival.norms[arrival.norm_of[i]]) for i in sorted(arrival.norm_of)]


@pytest.mark.parametrize("kind", ["block", "edge"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_have_the_bits_of_fp32_additions_after_the_first_rounding(
    gradients: Gradients,
    dtype: torch.dtype,
    kind: str,
    large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if large:  # of which one buffer alone is on the device
        monkeypatch.setattr("fluxtrain.plan.depths.LARGE_STAGING_BYTES", 1)
    g = group(dtype, kind=kind)
    total = [value.to(dtype).float() for value in one_pass(gradients, g, 0)]
    for seed in (1, 2, 3):
        total = [a + b for a, b in zip(total, one_pass(gradients, g, seed), strict=True)]
        for found, wanted in zip(of(gradients, g), total, strict=True):
            assert found.dtype == torch.float32
            assert torch.equal(found, wanted)
        told = norms(gradients, g)
        assert told == pytest.approx([float(t.double().norm()) for t in total], rel=1e-6)
    gradients.host.forget(g)
    again = one_pass(gradients, g, 4)
    for found, wanted in zip(of(gradients, g), again, strict=True):
        assert torch.equal(found, wanted.to(dtype))


def test_nobody_waits_for_what_is_on_its_way(
    gradients: Gradients, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [group(torch.bfloat16) for _ in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(Arrival, "wait", lambda self: pytest.fail("the host waits"))
        for _ in range(3):
            for g in groups:
                one_pass(gradients, g, 0)
    once = draws(groups[0], 0)
    for g in groups:
        for found, value in zip(of(gradients, g), once, strict=True):
            assert torch.equal(found, value.bfloat16().float() + value + value)


# -- an embedding by rows: its sums stay on the device ------------------------------------------


def passes_of(model: nn.Module, count: int) -> None:
    for seed in range(count):
        model(**inputs(seed)).loss.backward()


def gradient_of(model: nn.Module) -> Tensor:
    weight: Any = model.get_input_embeddings().weight  # type: ignore[operator]
    found: Tensor = weight.grad.detach().clone()
    return found


def test_rows_of_several_passes_come_home_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {embedding: llama() for embedding in ("whole", "rows")}
    told: list[float] = []
    for embedding, model in models.items():
        engine = wrapped(model, embedding)
        with monkeypatch.context() as patch:
            patch.setattr(Arrival, "wait", lambda self: pytest.fail("the host waits"))
            passes_of(model, 3)
            norm = engine.clip_grad_norm(0.5)
        told.append(norm.value())
    assert told[0] == told[1] > 0
    assert torch.equal(gradient_of(models["rows"]), gradient_of(models["whole"]))


def test_whoever_writes_to_rows_between_passes_is_heard() -> None:
    found = {}
    for embedding in ("whole", "rows"):
        model = llama()
        wrapped(model, embedding)
        passes_of(model, 2)
        weight: Any = model.get_input_embeddings().weight  # type: ignore[operator]
        weight.grad.mul_(0.5)
        passes_of(model, 1)
        found[embedding] = gradient_of(model)
    assert torch.equal(found["rows"], found["whole"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["whole", "chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.thinned(4)
def test_gradients_of_passes_are_those_of_everything_on_the_device(
    dtype: torch.dtype, head: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head, whole or in chunks, blocks and an embedding by rows."""
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", 1)
    monkeypatch.setattr(heads, "MULTIPLE_ROWS", 128)
    found = []
    for offload in ("none", "weights"):
        model = llama(dtype, tie_word_embeddings=tied)
        placed = {"embedding": "rows", "head": head} if offload == "weights" else {}
        wrap_with(model, device="cpu", offload=offload, **placed)
        engine = engine_of(model)
        assert any(unit.in_vocab_chunks for unit in engine.units) == (
            placed.get("head") == "chunks"
        )
        with monkeypatch.context() as patch:
            patch.setattr(Arrival, "wait", lambda self: pytest.fail("the host waits"))
            passes_of(model, 3)
            norm = engine.clip_grad_norm(0.5)
        gradients = {
            n: p.grad.detach().float() for n, p in model.named_parameters() if p.grad is not None
        }
        found.append((norm.value(), gradients))
    (expected, wanted), (told, gradients) = found
    exact = head == "whole"
    least = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert told == pytest.approx(expected, rel=0 if exact else least)
    for name, value in wanted.items():
        off = float((gradients[name] - value).norm() / value.norm())
        assert off <= (0 if exact else least), name


@pytest.mark.parametrize("sums", [True, False])
def test_a_sum_over_ranks_is_never_added_up_twice(told: Told, sums: bool) -> None:
    """Of a block that a forward pass calls twice; a mean of equal numbers stays what it is."""
    exchange, used = Exchange(Ranks(world=2), sums=sums), group(torch.float32)
    host = HostGradients(CpuDevice(), told.sent, told.brought, exchange=exchange)

    def backward(calls: int) -> None:
        out = torch.ones(1, requires_grad=True) * 1
        for _ in range(calls):
            out.register_hook(lambda _: host.exchanges(used) and None)
        out.backward()

    backward(1)
    backward(1)  # of the next step
    if sums:
        with pytest.raises(MisusedModel, match="some is used more than once in a forward pass"):
            backward(2)
    else:
        backward(2)
