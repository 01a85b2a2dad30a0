"""The fused loss on a GPU gives what the plain operations give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fluxtrain
from fluxtrain.edges.chunk_loss import FusedChunks, HeadLoss, PlainChunks, add_product_, chunks_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def head(words: int, dtype: torch.dtype, *, bias: bool = False, tokens: int = 37) -> HeadLoss:
    torch.manual_seed(words)
    target = torch.randint(0, words, (tokens,), device="cuda")
    target[::5] = -1
    return HeadLoss(
        weight=torch.randn(words, 64, device="cuda", dtype=dtype),
        bias=torch.randn(words, device="cuda", dtype=dtype) if bias else None,
        target=target,
        scale=torch.tensor(1 / 29, device="cuda"),
        dtype=torch.float32,
        wants_slope=True,
    )


def all_chunks(
    chunks: PlainChunks | FusedChunks, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    losses = torch.full((len(hidden),), torch.nan, device="cuda")
    slopes = []
    for start in range(0, len(hidden), chunks.tokens):
        rows = slice(start, start + chunks.tokens)
        slope = chunks.slope(hidden[rows], rows, losses[rows])
        assert slope is not None
        slopes.append(slope.float().clone())
    return losses, torch.cat(slopes)


@pytest.mark.parametrize("words", [3, 8192, 8193, 20_000, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_fused_loss_and_its_slope_equal_the_plain_ones(
    words: int, dtype: torch.dtype, bias: bool
) -> None:
    made = head(words, dtype, bias=bias)
    hidden = torch.randn(37, 64, device="cuda", dtype=dtype)
    assert isinstance(chunks_of(made, None), FusedChunks)
    losses, slopes = all_chunks(FusedChunks(made, None), hidden)
    plain_losses, plain_slopes = all_chunks(PlainChunks(made, None), hidden)
    torch.testing.assert_close(losses, plain_losses, rtol=2e-5, atol=2e-5)
    assert bool((losses[::5] == 0).all()) and bool((slopes[::5] == 0).all())
    step = 2**-8 if dtype == torch.bfloat16 else 1e-4  # one rounding of bf16
    torch.testing.assert_close(slopes, plain_slopes, rtol=step, atol=1e-7)


def test_chunks_of_any_size_give_the_same_bits() -> None:
    made = head(20_000, torch.bfloat16)
    hidden = torch.randn(37, 64, device="cuda", dtype=torch.bfloat16)
    logits = hidden @ made.weight.t()  # products of other sizes may round otherwise
    eye = replace(made, weight=torch.eye(20_000, device="cuda", dtype=torch.bfloat16))
    whole = all_chunks(FusedChunks(eye, 37), logits)
    for tokens in (1, 5, 36):
        cut = all_chunks(FusedChunks(eye, tokens), logits)
        assert torch.equal(cut[0], whole[0])
        assert torch.equal(cut[1], whole[1])


def test_logits_that_are_not_finite_give_a_loss_that_is_not() -> None:
    made = head(9000, torch.bfloat16)
    hidden = torch.randn(37, 64, device="cuda", dtype=torch.bfloat16)
    for bad in (torch.nan, torch.inf):
        made.weight[17] = bad
        losses, _ = all_chunks(FusedChunks(made, None), hidden)
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
