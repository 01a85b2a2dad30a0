"""The head's logits stay uncomputed until they are read, and the loss is fused in token chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fluxtrain
from fluxtrain.core.head.lazy_logits import LazyLogits
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import MisusedModel
from fluxtrain.plan import heads
from tests.engine.head_models import (
    FUSED,
    LENGTH,
    REAL,
    ROWS,
    SHAPES,
    WIDTH,
    WORDS,
    Tower,
    agree,
    batch,
    cross_entropy,
    loss_and_gradients,
)
from tests.wrap_with import wrap_with

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

Pair = Callable[..., tuple[Any, Any]]


@pytest.fixture(params=["whole", "chunks"])
def head(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the head is copied; chunks are of 16 words of 50, or 32 in bf16."""
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", 16 * WIDTH * 4)
    monkeypatch.setattr(heads, "MULTIPLE_ROWS", 8)
    found: str = request.param
    return found


@pytest.fixture
def pair(head: str) -> Iterator[Pair]:
    """`pair(dtype, **shape)`: the plain model and the same one wrapped."""
    wrapped: list[nn.Module] = []

    def make(dtype: torch.dtype = torch.float32, **shape: bool) -> tuple[Any, Any]:
        wrapped.append(wrap_with(Tower(**shape).to(dtype), device="cpu", head=head))
        return Tower(**shape).to(dtype), wrapped[-1]

    yield make
    for model in wrapped:
        fluxtrain.unwrap(model)


@pytest.mark.parametrize("loss", [*FUSED, *REAL])
@pytest.mark.parametrize("shape", SHAPES)
@BOTH
@pytest.mark.thinned(40)
def test_a_loss_over_lazy_logits_equals_torchs(
    pair: Pair, shape: str, loss: str, dtype: torch.dtype
) -> None:
    plain, wrapped = pair(dtype, **SHAPES[shape])
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    agree(plain, wrapped, (FUSED | REAL)[loss], ignored=4, rtol=rtol)


@pytest.mark.parametrize("loss", FUSED)
def test_the_fused_losses_never_compute_all_logits(
    pair: Pair, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, wrapped = pair()
    monkeypatch.setattr(LazyLogits, "computed", lambda self: pytest.fail("they were computed"))
    loss_and_gradients(wrapped, FUSED[loss], ignored=4)


@pytest.mark.parametrize(
    "targets",
    [
        torch.full((ROWS * LENGTH,), WORDS),
        torch.full((ROWS * LENGTH,), -1),
        torch.zeros(ROWS * LENGTH + 1, dtype=torch.long),
        torch.zeros(ROWS * LENGTH - 1, dtype=torch.long),
        torch.zeros(ROWS * LENGTH, dtype=torch.int32),
        torch.zeros(ROWS * LENGTH, 1, dtype=torch.long),
    ],
    ids=["too large", "negative", "too many", "too few", "int32", "two-dimensional"],
)
def test_targets_that_torch_refuses_are_refused_with_its_words(pair: Pair, targets: Tensor) -> None:
    refusals = []
    for model in pair():
        with pytest.raises((IndexError, RuntimeError, ValueError)) as refused:
            cross_entropy()(model(batch()[0]), targets)
        refusals.append((refused.type, str(refused.value)))
    assert refusals[0] == refusals[1]


def test_whoever_asks_for_the_gradient_of_the_logits_is_given_it(pair: Pair) -> None:
    found = []
    for model in pair():
        seen: list[Tensor] = []
        ids, targets = batch()
        logits = model(ids)
        logits.retain_grad()
        logits.register_hook(seen.append)
        cross_entropy()(logits, targets).backward()
        found.append((logits.grad, *seen))
    assert [len(each) for each in found] == [2, 2]
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_with_all_tokens_ignored_the_loss_is_torchs(pair: Pair, reduction: str) -> None:
    plain, wrapped = pair()
    agree(plain, wrapped, cross_entropy(reduction=reduction), ignored=ROWS * LENGTH)


@pytest.mark.parametrize("shape", SHAPES)
@BOTH
def test_chunks_of_tokens_give_what_one_chunk_gives(
    pair: Pair, shape: str, dtype: torch.dtype
) -> None:
    _, wrapped = pair(dtype, **SHAPES[shape])
    results = []
    for head_tokens in (None, 4, 1):
        engine_of(wrapped).head_tokens = head_tokens
        results.append(loss_and_gradients(wrapped, cross_entropy(), ignored=4))
        wrapped.zero_grad()
    rtol = 1e-5 if dtype == torch.float32 else 8e-3  # one rounding to bf16
    for loss, gradients in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-6, atol=0.0)
        for name, gradient in gradients.items():
            expected = results[0][1][name]
            limit = rtol * float(expected.abs().max())
            torch.testing.assert_close(gradient, expected, rtol=rtol, atol=limit)


def test_a_loss_divided_afterwards_scales_bf16_gradients_without_a_bias(pair: Pair) -> None:
    """1/n rounded to bf16 would be off by up to 0.4 % for all but the head."""
    _, wrapped = pair(torch.bfloat16)
    gradients = []
    for divisor in (1.0, 3.0):  # bf16 has 0.3340 for 1 / 3
        _, found = loss_and_gradients(wrapped, lambda x, y, d=divisor: cross_entropy()(x, y) / d)
        wrapped.zero_grad()
        gradients.append(torch.cat([g.double().flatten() for g in found.values()]))
    ratio = float(gradients[1] @ gradients[0] / (gradients[0] @ gradients[0]))
    assert ratio == pytest.approx(1 / 3, rel=1e-3)


@BOTH
def test_logits_can_be_read_in_every_usual_way(pair: Pair, dtype: torch.dtype) -> None:
    plain, wrapped = pair(dtype)
    ids, _ = batch()
    expected, got = plain(ids), wrapped(ids)
    assert isinstance(got, LazyLogits) and "not computed" in repr(got)
    assert got.shape == expected.shape and got.dtype == dtype and got.requires_grad
    assert got.size(-1) == WORDS and got.ndim == 3 and len(got) == ROWS
    assert isinstance(got[:, -1], LazyLogits) and got[:, -1].shape == (ROWS, WORDS)
    reads: list[Callable[[Any], Tensor]] = [
        lambda x: x.softmax(-1),
        lambda x: torch.argmax(x, dim=-1),
        lambda x: x[:, -1].topk(3).values,
        lambda x: x[..., :-1, :].float().logsumexp(-1),
        lambda x: x[0, 2, 5:9],
        lambda x: x[ids == 7],
        lambda x: x.view(-1, WORDS).to(torch.float32) * 2 - 1,
        lambda x: x.transpose(1, 2).contiguous(),
        lambda x: torch.cat([x, x], dim=1),
        lambda x: x.detach().cpu().clone(),
        lambda x: torch.from_numpy(x.detach().float().numpy()),
        lambda x: torch.tensor(x.detach().tolist()),
        lambda x: x > 0,
        lambda x: torch.stack([row.sum() for row in x]),
        lambda x: x.reshape(ROWS, -1),
    ]
    for read in reads:
        torch.testing.assert_close(read(got), read(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [cross_entropy(), REAL["smoothed"]], ids=["fused", "real"])
def test_a_head_over_a_frozen_body_is_trained(pair: Pair, head: str, loss: Any) -> None:
    plain, _ = pair(bias=True)
    again, _ = pair(bias=True)
    for model in (plain, again):
        model.embedding.requires_grad_(False)
        model.blocks.requires_grad_(False)
    agree(plain, wrap_with(again, device="cpu", head=head), loss)


def test_logits_written_in_place_count_in_the_loss(pair: Pair) -> None:
    def masked(logits: Any, targets: Tensor) -> Tensor:
        logits[..., 5:] = -30.0
        logits[..., 0].add_(1.0)
        return functional.cross_entropy(logits.view(-1, WORDS), targets)

    agree(*pair(), masked)


def test_a_view_taken_before_logits_were_written_in_place_is_refused(pair: Pair) -> None:
    _, wrapped = pair()
    ids, targets = batch()
    logits = wrapped(ids)
    flat = logits.view(-1, WORDS)
    logits.mul_(2.0)
    with pytest.raises(MisusedModel, match="in place"):
        functional.cross_entropy(flat, targets)


def test_evaluation_gives_plain_logits_and_the_same_loss_fused_or_not(pair: Pair) -> None:
    plain, wrapped = pair()
    ids, targets = batch(ignored=4)
    with torch.no_grad():
        logits = wrapped(ids)
        assert type(logits) is Tensor
        torch.testing.assert_close(logits, plain(ids), rtol=1e-6, atol=1e-6)
        loss = cross_entropy()(logits, targets)
        with engine_of(wrapped).evaluating():
            lazy = wrapped(ids)
            assert isinstance(lazy, LazyLogits)
            fused = cross_entropy()(lazy, targets)
    assert not fused.requires_grad
    torch.testing.assert_close(fused, loss, rtol=1e-6, atol=0.0)
