"""The user's own training loop on a wrapped model does what it does on the plain one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fluxtrain
from tests.wrap_with import wrap_with

ROWS, LENGTH, VOCABULARY = 4, 12, 320
TIGHT = {"rtol": 2e-5, "atol": 1e-7}  # fp32: another order of summation, nothing else
COARSE = {"rtol": 2e-2, "atol": 2e-4}  # bf16: a rounding at other places
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

Make = Callable[..., Any]


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed)
    )


@pytest.fixture
def pair(new_model: Make) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """`pair(dtype)`: the plain model and the same one wrapped."""
    wrapped: list[nn.Module] = []

    def make(dtype: torch.dtype = torch.float32, family: str = "llama", **options: Any) -> Any:
        options = {"device": "cpu", "chunk_rows": 2, **options}
        wrapped.append(wrap_with(new_model(family, dtype), **options))
        return new_model(family, dtype), wrapped[-1]

    yield make
    for model in wrapped:
        fluxtrain.unwrap(model)


def loss_of(model: Any, seed: int = 0) -> Tensor:
    ids = tokens(seed)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def same_gradients(plain: nn.Module, wrapped: nn.Module, **tolerance: float) -> None:
    """Each gradient within `rtol` of its own largest entry (a key bias has none but noise)."""
    for (name, a), (_, b) in zip(plain.named_parameters(), wrapped.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert b.grad is not None
            limit = tolerance["rtol"] * a.grad.abs().max().item() + tolerance["atol"]
            assert (a.grad.float() - b.grad.float()).abs().max().item() <= limit, name


def same_weights(plain: nn.Module, wrapped: nn.Module, **tolerance: float) -> None:
    for (name, a), (_, b) in zip(plain.named_parameters(), wrapped.named_parameters(), strict=True):
        torch.testing.assert_close(
            b.detach(), a.detach(), **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def train(model: nn.Module, steps: int, step: Callable[[nn.Module, Any, int], Any]) -> list[float]:
    """`steps` steps of AdamW over two parameter groups with a schedule; the losses."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}],
        lr=1e-2, weight_decay=0.0, eps=1e-5,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1.0 / (1 + at))
    losses = []
    for at in range(steps):
        losses.append(step(model, optimizer, at).item())
        schedule.step()
        optimizer.zero_grad()
    return losses


def plainly(model: nn.Module, optimizer: Any, at: int) -> Tensor:
    loss = loss_of(model, at)
    loss.backward()
    optimizer.step()
    return loss


def accumulating(model: nn.Module, optimizer: Any, at: int) -> Tensor:
    losses = [loss_of(model, 10 * at + part) / 3 for part in range(3)]
    for loss in losses:  # several forwards, then several backwards
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    return torch.stack([loss.detach() for loss in losses]).sum()


def over_two_forwards(model: nn.Module, optimizer: Any, at: int) -> Tensor:
    loss = loss_of(model, at) + 0.5 * loss_of(model, at + 100)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3, foreach=True)
    optimizer.step()
    return loss


def with_a_closure(model: nn.Module, optimizer: Any, at: int) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, at)
        loss.backward()
        return loss

    return optimizer.step(closure)


def with_edited_gradients(model: nn.Module, optimizer: Any, at: int) -> Tensor:
    loss = loss_of(model, at)
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)
    for i, parameter in enumerate(model.parameters()):
        assert parameter.grad is not None
        if i % 3 == 0:
            parameter.grad.mul_(0.5)
        elif i % 3 == 1:
            parameter.grad = parameter.grad.sign() * 1e-3
        else:
            parameter.grad += 1e-3
    optimizer.step()
    return loss


STEPS = [plainly, accumulating, over_two_forwards, with_a_closure, with_edited_gradients]


@pytest.mark.parametrize("overlap", [False, True], ids=["waiting", "overlapped"])
@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
@pytest.mark.thinned(5)
def test_fp32_training_follows_the_plain_model(pair: Make, step: Any, overlap: bool) -> None:
    plain, wrapped = pair(overlap=overlap)
    expected, got = train(plain, 3, step), train(wrapped, 3, step)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-5, atol=0)
    fluxtrain.sync(wrapped)
    same_weights(plain, wrapped, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
def test_bf16_training_stays_near_fp32_masters(pair: Make, step: Any) -> None:
    plain, wrapped = pair(torch.bfloat16)
    expected, got = train(plain.float(), 4, step), train(wrapped, 4, step)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-2, atol=0)


@BOTH
def test_gradients_over_several_backward_passes_are_summed_in_fp32(
    pair: Make, dtype: torch.dtype
) -> None:
    """Off by one rounding of each term, where sums in bf16 would be off by every one of the sum."""
    plain, wrapped = pair(dtype)
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in plain.parameters()]
    for part in range(16):
        loss_of(plain, part).backward()
        for total, parameter in zip(exact, plain.parameters(), strict=True):
            total.add_(parameter.grad.double())
        plain.zero_grad()
        loss_of(wrapped, part).backward()
    limit = 1e-5 if dtype == torch.float32 else 8e-3
    for total, (name, parameter) in zip(exact, wrapped.named_parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad.double() - total).norm() / total.norm()
        assert error < limit, f"{name}: {error:.2e}"


@BOTH
def test_gradients_that_are_read_or_replaced_are_those_that_are_stepped_with(
    pair: Make, dtype: torch.dtype
) -> None:
    plain, wrapped = pair(dtype)
    for model in (plain, wrapped):
        loss_of(model).backward()
    same_gradients(plain, wrapped, **(TIGHT if dtype == torch.float32 else COARSE))
    weight = wrapped.model.layers[1].mlp.up_proj.weight
    before = weight.grad.clone()
    weight.grad.mul_(2.0)
    assert torch.equal(weight.grad, before * 2)
    weight.grad /= 2
    assert torch.equal(weight.grad, before)
    weight.grad = torch.ones_like(before)
    assert torch.equal(weight.grad, torch.ones_like(before))
    weight.grad = None
    assert weight.grad is None
    others = wrapped.model.layers[1].mlp.gate_proj.weight.detach().clone()
    kept = weight.detach().clone()
    torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.1).step()
    assert torch.equal(weight, kept)  # without a gradient a weight takes no step
    assert not torch.equal(wrapped.model.layers[1].mlp.gate_proj.weight, others)


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_returns_the_norm_and_scales_as_torch_does(
    pair: Make, foreach: bool | None, norm_type: float
) -> None:
    plain, wrapped = pair()
    norms = []
    for model in (plain, wrapped):
        loss_of(model).backward()
        norms.append(
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type, foreach=foreach)
        )
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
    same_gradients(plain, wrapped, **TIGHT)


def test_clipping_a_gradient_that_is_not_finite_raises_when_asked_to(pair: Make) -> None:
    _, wrapped = pair()
    loss_of(wrapped).backward()
    wrapped.model.norm.weight.grad[0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0, error_if_nonfinite=True)


def test_hooks_on_weights_see_and_change_their_gradients(pair: Make) -> None:
    plain, wrapped = pair(chunk_rows=ROWS)
    for model in (plain, wrapped):
        for weight in (model.model.layers[0].mlp.up_proj.weight, model.lm_head.weight):
            weight.register_hook(lambda g: g * 3)
        loss_of(model).backward()
    same_gradients(plain, wrapped, **TIGHT)


def test_evaluation_between_forward_and_backward_changes_nothing(pair: Make) -> None:
    plain, wrapped = pair()
    for model in (plain, wrapped):
        loss = loss_of(model, 1)
        with torch.no_grad():
            other = loss_of(model, 2)
        loss.backward()
        assert not other.requires_grad
    same_gradients(plain, wrapped, **TIGHT)


@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_checkpoints_around_blocks_change_nothing(pair: Make, reentrant: bool) -> None:
    _, wrapped = pair()
    gradients = []
    for with_checkpoint in (False, True):
        hidden = wrapped.model.embed_tokens(tokens())
        angles = wrapped.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
        for block in wrapped.model.layers:
            run = functools.partial(block, position_embeddings=angles)
            if with_checkpoint:
                hidden = checkpoint(run, hidden, use_reentrant=reentrant)
            else:
                hidden = run(hidden)
        hidden.square().sum().backward()
        gradients.append([p.grad.clone() for p in wrapped.model.layers.parameters()])
        wrapped.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
