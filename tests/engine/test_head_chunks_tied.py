"""A tied head in vocabulary chunks beside an embedding by rows: where their gradients meet."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.core.wrap.engine import Engine
from fluxtrain.plan import heads
from tests.engine.row_models import inputs, trained
from tests.engine.test_head_chunks import WORDS, agree, head_of, in_vocab_chunks, qwen

NAME = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def small_vocab_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", 1)
    monkeypatch.setattr(heads, "MULTIPLE_ROWS", WORDS)


def tied(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    return qwen(dtype, tie_word_embeddings=True, **changes)


def chunked(model: nn.Module, **options: Any) -> Engine:
    engine = in_vocab_chunks(model, embedding="rows", **options)
    assert head_of(engine).vocab_chunks is not None
    return engine


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {n: p.grad.detach().double().clone() for n, p in named if p.grad is not None}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        limit = rtol * float(values.abs().max())
        torch.testing.assert_close(found[name], values, rtol=0.0, atol=limit, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"passes": 3},
        {"in_backward": True},
        {"states": "8bit"},
        {"deferred_moments": True},
        {"offload": "max"},
        {"offload": "optimizer"},
        {"overlap": False},
    ],
    ids=str,
)
def test_a_tied_head_in_vocab_chunks_trains_as_the_whole_does(options: dict[str, Any]) -> None:
    whole = trained(tied(), "rows", head="whole", **options)
    chunks = trained(tied(), "rows", head="chunks", **options)
    agree(whole, chunks, loss=2e-5, weights=2e-3)  # steps of 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_gradients_of_a_tied_weight_are_rounded_once(dtype: torch.dtype) -> None:
    ids = inputs(0)
    exact_model = tied(dtype).double()
    exact_model(**ids).loss.backward()
    exact, off = gradients(exact_model)[NAME], {}
    for head in ("whole", "chunks"):
        model = tied(dtype)
        in_vocab_chunks(model, head, embedding="rows")
        model(**ids).loss.backward()
        off[head] = float((gradients(model)[NAME] - exact).norm())
    assert off["chunks"] <= 1.1 * off["whole"] + 1e-3 * float(exact.norm())


def test_the_norm_is_that_of_the_sum_of_both_gradients() -> None:
    model = tied(torch.bfloat16)
    engine = chunked(model)
    model(**inputs(0)).loss.backward()
    measured = engine.clip_grad_norm(None).value()  # before anybody looks at the values
    norms = [found.norm() for found in gradients(model).values()]
    assert measured == pytest.approx(float(torch.stack(norms).norm()), rel=1e-6)


def test_a_lookup_that_turns_to_the_whole_takes_the_head_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, model = tied(), tied()
    engine = chunked(model)
    for each in (plain, model):
        each.get_parameter(NAME).register_hook(lambda gradient: 2 * gradient)
    with caplog.at_level(logging.WARNING, "fluxtrain"):
        for each in (plain, model):
            each(**inputs(0)).loss.backward()
    assert "is copied to the device whole" in caplog.text
    assert head_of(engine).vocab_chunks is None
    same(gradients(model), gradients(plain))
