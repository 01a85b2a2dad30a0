"""Autograd functions that take the logits below torch's Python calls train the model as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fluxtrain
from fluxtrain.errors import MisusedModel
from fluxtrain.plan import heads
from tests.engine.head_models import SHAPES, WIDTH, WORDS, Tower, agree, batch, cross_entropy
from tests.wrap_with import wrap_with

Loss = Callable[[Any, Tensor], Tensor]


class LogLoss(torch.autograd.Function):
    """A loss with a gradient of its own, as fused kernels have."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logs = logits.float().log_softmax(-1).view(-1, WORDS)
        ctx.save_for_backward(logs, targets)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return functional.nll_loss(logs, targets)

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[Tensor, None]:
        logs, targets = ctx.saved_tensors
        slope = logs.exp() - functional.one_hot(targets, WORDS)
        return (scale[0] * slope / len(targets)).view(ctx.shape).to(ctx.dtype), None


def log_loss(logits: Any, targets: Tensor) -> Tensor:
    found: Tensor = LogLoss.apply(logits, targets)  # type: ignore[no-untyped-call]
    return found


def checkpointed(logits: Any, targets: Tensor) -> Tensor:
    found: Tensor = checkpoint(cross_entropy(), logits, targets, use_reentrant=True)
    return found


LOSSES: dict[str, Loss] = {
    "own": log_loss,
    "own of a view": lambda logits, y: log_loss(logits.view(-1, WORDS), y),
    "own of fp32": lambda logits, y: log_loss(logits.float(), y),
    "own beside the fused one": lambda logits, y: log_loss(logits, y) + cross_entropy()(logits, y),
    "own of logits that were read": lambda logits, y: log_loss(logits, y) * logits.detach().mean(),
    "checkpointed": checkpointed,
}


def towers(monkeypatch: pytest.MonkeyPatch, head: str, **shape: bool) -> tuple[Tower, nn.Module]:
    """The plain model and the same one wrapped; chunks are of 16 words of 50."""
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", 16 * WIDTH * 4)
    monkeypatch.setattr(heads, "MULTIPLE_ROWS", 8)
    wrapped = wrap_with(Tower(**shape), device="cpu", head=head, embedding="rows")
    return Tower(**shape), wrapped


@pytest.mark.parametrize("head", ["whole", "chunks"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.thinned(18)
def test_a_loss_with_a_gradient_of_its_own_trains_the_model(
    monkeypatch: pytest.MonkeyPatch, loss: str, shape: str, head: str
) -> None:
    plain, wrapped = towers(monkeypatch, head, **SHAPES[shape])
    agree(plain, wrapped, LOSSES[loss])
    for model in (plain, wrapped):
        model.get_submodule("head").requires_grad_(False)
        model.zero_grad()
    agree(plain, wrapped, LOSSES[loss])
    fluxtrain.unwrap(wrapped)


@pytest.mark.parametrize("head", ["whole", "chunks"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", ["head", ""])
def test_a_backward_hook_on_the_head_or_the_model_changes_gradients_as_in_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, before: bool, head: str
) -> None:
    def twice(_: nn.Module, found: Any, *__: Any) -> Any:
        return tuple(None if gradient is None else 2 * gradient for gradient in found)

    plain, wrapped = towers(monkeypatch, head, bias=True)
    for model in (plain, wrapped):
        part = model.get_submodule(name)
        register = (
            part.register_full_backward_pre_hook if before else part.register_full_backward_hook
        )
        register(twice if before or name else lambda *_: None)
    agree(plain, wrapped, cross_entropy())
    fluxtrain.unwrap(wrapped)


@pytest.mark.parametrize("head", ["whole", "chunks"])
def test_such_a_loss_over_logits_that_were_changed_or_are_watched_is_refused(
    monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    def changed(logits: Any) -> None:
        logits[..., 5:] = -30.0

    ids, targets = batch()
    for does in (changed, lambda logits: logits.retain_grad()):
        _, wrapped = towers(monkeypatch, head)
        logits = wrapped(ids)
        does(logits)
        with pytest.raises(MisusedModel, match="clone"):
            log_loss(logits, targets).backward()
        wrapped.zero_grad()
        logits = wrapped(ids)
        log_loss(logits.clone(), targets).backward()
        assert all(parameter.grad is not None for parameter in wrapped.parameters())
        fluxtrain.unwrap(wrapped)
