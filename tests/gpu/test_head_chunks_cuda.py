"""A head in vocabulary chunks on a GPU: loss and gradients of the whole, less memory, no wait."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import fluxtrain
from fluxtrain.core.head.token_loss import (
    FusedLogits,
    PlainLogits,
    SoftmaxSums,
    VocabRange,
    logits_of,
    spans,
)
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.plan import heads
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOKENS, WIDTH = 37, 64
VOCABULARY, HIDDEN = 64_000, 256
CHUNK_ROWS = 4096  # of the weight


@pytest.fixture
def small_vocab_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", CHUNK_ROWS * HIDDEN * 2)


def passes(
    how: PlainLogits | FusedLogits, hidden: Tensor, weight: Tensor, bias: Tensor | None, words: int
) -> tuple[Tensor, Tensor]:
    """Losses (N,) and slopes (N, V) by vocabulary chunks of `words` rows, as `how` computes; in one
    walk where one chunk holds all of the vocabulary, else in two."""
    target = torch.randint(0, len(weight), (TOKENS,), device="cuda")
    target[::5] = -1
    sums, scale = SoftmaxSums.of(target), torch.tensor(1 / 29, device="cuda")
    chunks = [
        VocabRange(
            weight=weight[first : first + words],
            bias=None if bias is None else bias[first : first + words],
            first=first,
        )
        for first in range(0, len(weight), words)
    ]
    slopes = torch.empty(TOKENS, len(weight), device="cuda")
    for each in chunks if len(chunks) > 1 else ():
        for part in spans(TOKENS, how.tokens):
            how.compute(hidden[part], each, sums.cut(part), collect=True, scale=None)
    for each in reversed(chunks):
        for part in spans(TOKENS, how.tokens):
            found = how.compute(
                hidden[part], each, sums.cut(part), collect=len(chunks) == 1, scale=scale
            )
            assert found is not None
            slopes[part, each.columns] = found.float()
    return sums.losses(), slopes


@pytest.mark.parametrize("words", [7, 8192, 9001, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [None, 10])
def test_the_fused_loss_and_its_slope_equal_the_plain_ones(
    words: int, dtype: torch.dtype, bias: bool, tokens: int | None
) -> None:
    every = 20 if words == 7 else 20_000 if words < 20_000 else words
    torch.manual_seed(words)
    weight = torch.randn(every, WIDTH, device="cuda", dtype=dtype)
    offset = torch.randn(every, device="cuda", dtype=dtype) if bias else None
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=dtype)
    fused = logits_of(hidden, dtype, torch.float32, min(words, every), tokens)
    assert isinstance(fused, FusedLogits)
    found = []
    for how in (fused, PlainLogits(torch.float32, words, tokens)):
        torch.manual_seed(1)
        found.append(passes(how, hidden, weight, offset, words))
    (losses, slopes), (plain_losses, plain_slopes) = found
    torch.testing.assert_close(losses, plain_losses, rtol=2e-5, atol=5e-5)
    assert bool((losses[::5] == 0).all()) and bool((slopes[::5] == 0).all())
    step = 1e-4 if dtype == torch.float32 else 2**-7  # one place of bf16
    torch.testing.assert_close(slopes, plain_slopes, rtol=step, atol=1e-7)


@pytest.mark.parametrize("words", [3, 8193, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_walk_over_the_whole_vocabulary_has_the_bits_of_two(
    words: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(words)
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=dtype)
    every = VocabRange(weight=torch.randn(words, WIDTH, device="cuda", dtype=dtype), bias=None)
    target = torch.randint(0, words, (TOKENS,), device="cuda")
    target[::5] = -1
    scale, how = torch.tensor(1 / 29, device="cuda"), FusedLogits(dtype, words, None, TOKENS)
    once, twice = SoftmaxSums.of(target), SoftmaxSums.of(target)
    slope = how.compute(hidden, every, once, collect=True, scale=scale)
    assert slope is not None
    slope = slope.clone()
    how.compute(hidden, every, twice, collect=True, scale=None)
    again = how.compute(hidden, every, twice, collect=False, scale=scale)
    assert again is not None and torch.equal(again, slope)
    assert torch.equal(once.losses(), twice.losses())


def build(dtype: torch.dtype, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=HIDDEN, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=1024,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype).train()


def batch(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (8, 64), generator=draw).pin_memory()


def wrapped(
    head: str, dtype: torch.dtype = torch.bfloat16, *, tied: bool = False, **options: Any
) -> Engine:
    model = build(dtype, tied=tied)
    wrap_with(
        model, device="cuda", offload="weights", device_groups=0, resident_blocks=0, chunk_rows=4,
        overlap=True, embedding="rows", head=head, **options,
    )  # fmt: skip
    engine = engine_of(model)
    engine.model = model  # type: ignore[attr-defined]  # an engine does not hold its model
    unit = next(unit for unit in engine.units if unit.is_head)
    assert (unit.vocab_chunks is not None) == (head == "chunks")
    return engine


def trained(
    head: str, dtype: torch.dtype, *, steps: int = 4, passes: int = 1, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of some steps, clipped where they do not update in backward, and the weights
    after."""
    in_backward = options.get("optimizer_in_backward", False)
    engine = wrapped(head, dtype, **options)
    model = engine.model  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told = []
    for step in range(steps):
        for part in range(passes):
            ids = batch(step * passes + part)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if in_backward:
                engine.begin_step_in_backward(optimizer, loss)
            loss.backward()
            told.append(float(loss.detach()))
        told.append(engine.clip_grad_norm(None if in_backward else 0.3).value())
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    fluxtrain.unwrap(model)
    gc.collect()
    return told, weights


@pytest.mark.usefixtures("small_vocab_chunks")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"passes": 2},
        {"optimizer_in_backward": True},
        {"states": "8bit"},
        {"deferred_moments": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_vocab_chunks_train_as_the_whole_head_does(tied: bool, options: dict[str, Any]) -> None:
    losses, weights = trained("whole", torch.float32, tied=tied, **options)
    others, theirs = trained("chunks", torch.float32, tied=tied, **options)
    assert others == pytest.approx(losses, rel=1e-3)  # products in TF32 or fp32 round otherwise
    for name, values in weights.items():
        torch.testing.assert_close(theirs[name], values, rtol=0.0, atol=2e-3, msg=name)
