"""Gradients: summed in fp32 on the device, rounded once, sent home once, added up exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.gradients.gradients import Gradients
from fluxtrain.core.memory.group import Group
from fluxtrain.plan.group_placement import GroupPlacement

CPU = torch.device("cpu")


@pytest.fixture
def device() -> Any:
    made = CpuDevice()
    yield made
    made.close()


def nobody(*_: object) -> None:
    """Is told of copies."""


def group(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Group:
    made = Group("block", "block")
    made.users = 1
    for i, shape in enumerate(shapes):
        made.add(nn.Parameter(torch.zeros(shape, dtype=dtype)), f"p{i}")
    made.place(GroupPlacement.on("host"), CPU, pin=False)
    return made


def draws(shape: tuple[int, ...], count: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(count)
    return [torch.randn(shape, generator=source).bfloat16() for _ in range(count)]


def test_chunks_are_summed_in_fp32_and_rounded_once(device: Any) -> None:
    sent: list[int] = []
    gradients = Gradients(device, lambda g, transfer, size_bytes: sent.append(size_bytes), nobody)
    g = group((33, 7))
    parts = draws((33, 7), 64)
    for part in parts:
        gradients.add(g, g.members[0], part)
    gradients.finish(g)
    gradients.host.wait(g)
    total = torch.zeros(33, 7)
    for part in parts:
        total += part.float()
    assert torch.equal(g.members[0].gradient, total.bfloat16())
    assert sent == [g.segments[0].size_bytes]
    arrival = gradients.host.arrivals[g]
    assert arrival.norms is not None
    assert float(arrival.norms[0]) == pytest.approx(
        float(total.bfloat16().double().norm()), rel=1e-6
    )


def test_backward_passes_add_up_in_fp32_at_home(device: Any) -> None:
    """512 passes: a bf16 sum would be off by 3 %."""
    gradients = Gradients(device, nobody, nobody)
    g = group((64,))
    parts = draws((64,), 512)
    for part in parts:
        gradients.add(g, g.members[0], part)
        gradients.finish(g)
    gradients.host.wait(g)
    exact = torch.stack(parts).double().sum(0)
    found = g.members[0].gradient
    assert found.dtype == torch.float32
    assert float((found.double() - exact).norm() / exact.norm()) < 1e-5
    gradients.host.forget(g)
    gradients.add(g, g.members[0], parts[0])
    gradients.finish(g)
    gradients.host.wait(g)
    assert torch.equal(g.members[0].gradient, parts[0])  # a new step starts from nothing


def test_members_without_a_gradient_and_padding_are_zero(device: Any) -> None:
    """Whole ranges are updated at once: what lies between members must not be rubbish."""
    gradients = Gradients(device, nobody, nobody)
    g, other = group((3,), (5,), (7,)), group((200,))
    gradients.add(other, other.members[0], torch.full((200,), float("nan")))
    gradients.finish(other)  # fills the buffers that both use
    gradients.add(g, g.members[0], torch.ones(3))
    gradients.add(g, g.members[2], torch.ones(7))
    gradients.finish(g)
    gradients.host.wait(g)
    home = g.segments[0].gradient
    assert float(home.float().sum()) == 10.0
    assert not bool(home.isnan().any())
    assert [m.has_gradient for m in g.members] == [True, False, True]


def test_many_groups_in_flight_do_not_overwrite_each_other(device: Any) -> None:
    """More groups than staging buffers, of different sizes."""
    gradients = Gradients(device, nobody, nobody)
    groups = [group((50 + 37 * (i % 3), 11)) for i in range(12)]
    for i, g in enumerate(groups):
        gradients.add(g, g.members[0], torch.full(g.members[0].shape, float(i + 1)))
        gradients.finish(g)
    for i, g in enumerate(groups):
        gradients.host.wait(g)
        assert bool((g.members[0].gradient == i + 1).all())


def test_shared_groups_keep_a_sum_of_their_own_while_others_come_and_go(device: Any) -> None:
    gradients = Gradients(device, nobody, nobody)
    shared, other = group((16,)), group((16,))
    shared.users = 2
    gradients.add(shared, shared.members[0], torch.ones(16))
    gradients.add(other, other.members[0], torch.full((16,), 7.0))
    gradients.finish(other)
    gradients.add(shared, shared.members[0], torch.ones(16))
    assert gradients.open_groups() == [shared]
    gradients.finish(shared)
    for g, value in ((shared, 2.0), (other, 7.0)):
        gradients.host.wait(g)
        assert bool((g.members[0].gradient == value).all())
    gradients.add(shared, shared.members[0], torch.ones(16))
    gradients.discard()
    assert not gradients.is_open(shared)


def test_gradients_that_come_together_are_summed_as_one_by_one(device: Any) -> None:
    sums: list[list[Tensor]] = []
    for together in (True, False):
        gradients = Gradients(device, nobody, nobody)
        g = group((33, 7), (5,), (4, 4), (3,), dtype=torch.float32)
        chunks = [draws(tuple(m.shape), 3) for m in g.members[:3]]  # none for the last one
        for parts in zip(*chunks, strict=True):
            arrived = [(g, m, part) for m, part in zip(g.members, parts, strict=False)]
            if together:
                gradients.add_all(arrived)
            else:
                for one in reversed(arrived):
                    gradients.add(*one)
        gradients.finish(g)
        gradients.host.wait(g)
        sums.append([m.gradient.clone() for m in g.members])
        assert not bool(g.members[3].gradient.any())
        norms = gradients.host.arrivals[g].norms
        assert norms is not None
        for norm, member in zip(norms, g.members, strict=False):
            assert torch.equal(norm, torch.linalg.vector_norm(member.gradient))
    for one, other in zip(*sums, strict=True):
        assert torch.equal(one, other)
