"""The fused loss on a GPU gives what the plain operations give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fluxtrain
from fluxtrain.core.head.token_loss import FusedLogits, VocabRange, WholeLoss, add_product_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def loss_of(weight: torch.Tensor) -> WholeLoss:
    torch.manual_seed(len(weight))
    target = torch.randint(0, len(weight), (37,), device="cuda")
    target[::5] = -1
    return WholeLoss(
        words=VocabRange(weight=weight, bias=None),
        target=target,
        scale=torch.tensor(1 / 29, device="cuda"),
        dtype=torch.float32,
    )


def by_chunks(
    loss: WholeLoss, hidden: torch.Tensor, tokens: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    losses = torch.full((len(hidden),), torch.nan, device="cuda")
    logits, slopes = loss.logits(hidden, tokens), []
    assert isinstance(logits, FusedLogits)
    for start in range(0, len(hidden), logits.tokens):
        rows = slice(start, start + logits.tokens)
        slope = loss.compute(logits, hidden[rows], rows, losses[rows])
        assert slope is not None
        slopes.append(slope.float().clone())
    return losses, torch.cat(slopes)


def test_chunks_of_any_size_give_the_same_bits() -> None:
    weight = torch.randn(20_000, 64, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(37, 64, device="cuda", dtype=torch.bfloat16)
    logits = hidden @ weight.t()  # products of other sizes may round otherwise
    loss = loss_of(torch.eye(20_000, device="cuda", dtype=torch.bfloat16))
    whole = by_chunks(loss, logits, 37)
    for tokens in (1, 5, 36):
        cut = by_chunks(loss, logits, tokens)
        assert torch.equal(cut[0], whole[0])
        assert torch.equal(cut[1], whole[1])


def test_logits_that_are_not_finite_give_a_loss_that_is_not() -> None:
    weight = torch.randn(9000, 64, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(37, 64, device="cuda", dtype=torch.bfloat16)
    for bad in (torch.nan, torch.inf):
        weight[17] = bad
        losses, _ = by_chunks(loss_of(weight), hidden, None)
        assert not bool(torch.isfinite(losses).all())


class Tower(nn.Module):
    """Four blocks and a head of 9000 words."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(64, 9000)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # (N, H) -> (N, V)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


@pytest.mark.parametrize("target", [-1, 9000])
def test_a_target_that_is_no_word_makes_the_loss_nan(target: int) -> None:
    """Torch's own loss ends the process's work on the GPU; nobody reads targets on the host."""
    model = fluxtrain.wrap(Tower(), cards=1)
    hidden = torch.randn(37, 64, device="cuda")
    targets = torch.arange(37, device="cuda")
    assert bool(torch.isfinite(nn.functional.cross_entropy(model(hidden), targets)))
    targets[5] = -100
    assert bool(torch.isfinite(nn.functional.cross_entropy(model(hidden), targets)))
    targets[7] = target
    assert bool(torch.isnan(nn.functional.cross_entropy(model(hidden), targets)))
    fluxtrain.unwrap(model)


def test_products_are_added_in_fp32() -> None:
    left = torch.randn(300, 50, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(50, 70, device="cuda", dtype=torch.bfloat16)
    total = torch.randn(300, 70, device="cuda")
    expected = total.double() + left.double() @ right.double()
    add_product_(total, left, right)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=2e-5)
