"""A head in vocabulary chunks gives what the whole of it gives, in less memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.plan import heads
from tests.engine.placing_anew import turn_to
from tests.engine.row_models import HIDDEN, VOCABULARY, Result, inputs, trained
from tests.wrap_with import wrap_with

WORDS = 128  # of a chunk: five chunks, the last one shorter
EMBEDDING = "model.embed_tokens.weight"
TIED = pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])


@pytest.fixture(autouse=True)
def small_vocab_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", 1)
    monkeypatch.setattr(heads, "MULTIPLE_ROWS", WORDS)


def qwen(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "tie_word_embeddings": False, **changes}
    sizes = {"intermediate_size": 48, **sizes}
    config = Qwen2Config(
        hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **sizes,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype).train()


def in_vocab_chunks(model: nn.Module, head: str = "chunks", **options: Any) -> Engine:
    options = {"offload": "weights", "chunk_rows": 2, "overlap": True, **options}
    wrap_with(model, device="cpu", head=head, **options)
    return engine_of(model)


def head_of(engine: Engine) -> Any:
    return next(unit for unit in engine.units if unit.is_head)


def agree(one: Result, other: Result, *, loss: float, weights: float) -> None:
    """Losses and norms, and the weights after some steps, which AdamW makes of gradients' signs."""
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(other[0]), rtol=loss, atol=0.0)
    assert one[2].keys() == other[2].keys()
    for name, values in one[2].items():
        torch.testing.assert_close(other[2][name], values, rtol=0.0, atol=weights, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"passes": 3},
        {"in_backward": True},
        {"states": "8bit"},
        {"states": "bf16"},
        {"deferred_moments": True},
        {"activations": "host"},
        {"offload": "max"},
        {"offload": "optimizer"},
        {"overlap": False},
        {"chunk_rows": 1},
    ],
    ids=str,
)
@TIED
@pytest.mark.thinned(6)
def test_vocab_chunks_train_as_the_whole_head_does(options: dict[str, Any], tied: bool) -> None:
    whole, chunks = (
        trained(qwen(tie_word_embeddings=tied), "rows", head=head, **options)
        for head in ("whole", "chunks")
    )
    agree(whole, chunks, loss=2e-5, weights=2e-3)  # steps of 1e-2


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {n: p.grad.detach().double() for n, p in named if p.grad is not None}


@TIED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_are_as_close_to_exact_ones_as_those_of_the_whole(
    dtype: torch.dtype, tied: bool
) -> None:
    plain = qwen(dtype, tie_word_embeddings=tied).double()
    plain(**inputs(0)).loss.backward()
    exact, found = gradients(plain), {}
    for head in ("whole", "chunks"):
        model = qwen(dtype, tie_word_embeddings=tied)
        in_vocab_chunks(model, head, embedding="rows")
        model(**inputs(0)).loss.backward()
        found[head] = gradients(model)
    assert exact.keys() == found["chunks"].keys()
    if tied:  # whose two gradients are rounded once
        exact = {EMBEDDING: exact[EMBEDDING]}
    off = {head: relative_errors(exact, each) for head, each in found.items()}
    assert off["chunks"].norm() <= 1.1 * off["whole"].norm() + (1e-3 if tied else 0.0)
    # the error of a small vector is chance: it differs by processor and even by run
    assert bool((off["chunks"] <= 2 * off["whole"] + 1e-3).all())


def relative_errors(exact: dict[str, Tensor], found: dict[str, Tensor]) -> Tensor:
    """Of each parameter's gradient, (parameters,)."""
    each = [(found[name] - values).norm() / values.norm() for name, values in exact.items()]
    return torch.stack(each)


def test_of_weight_and_gradient_the_device_never_holds_more_than_two_vocab_chunks() -> None:
    peaks: dict[str, int] = {}
    for head in ("whole", "chunks"):
        model = qwen(torch.bfloat16, vocab_size=40_000, intermediate_size=2048)
        engine = in_vocab_chunks(model, head, embedding="rows")
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            model(**inputs(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.flush()
        peaks[head] = engine.memory().device_peak_bytes
        chunks = head_of(engine).vocab_chunks
        assert (chunks is None) == (head == "whole")
        if chunks is not None:
            one = WORDS * HIDDEN * 2
            assert chunks.device_bytes == 2 * one
    every = 40_000 * HIDDEN * 2
    assert peaks["whole"] - peaks["chunks"] > 1.8 * every  # weight, and gradient on its way home


def test_generation_gives_the_words_of_the_whole_head() -> None:
    prompt = inputs(0)["input_ids"][:1]
    words = []
    for head in ("whole", "chunks"):
        model: Any = qwen().eval()
        engine = in_vocab_chunks(model, head)
        words.append(model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0))
        assert (head_of(engine).vocab_chunks is None) == (head == "whole")
    assert torch.equal(*words)


@TIED
def test_a_weight_with_a_hook_is_copied_whole_and_its_hook_is_called(
    tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = (qwen(tie_word_embeddings=tied) for _ in range(2))
    engine = in_vocab_chunks(model, embedding="rows")
    assert head_of(engine).vocab_chunks is not None
    name = EMBEDDING if tied else "lm_head.weight"
    for each in (plain, model):
        each.get_parameter(name).register_hook(lambda gradient: 2 * gradient)
    with caplog.at_level(logging.WARNING, "fluxtrain"):
        for each in (plain, model):
            each(**inputs(0)).loss.backward()
    assert "is copied to the device whole" in caplog.text
    assert head_of(engine).vocab_chunks is None
    got, expected = gradients(model), gradients(plain)
    assert got.keys() == expected.keys()
    for each_name, values in expected.items():
        limit = 1e-5 * float(values.abs().max())
        torch.testing.assert_close(got[each_name], values, rtol=0.0, atol=limit, msg=each_name)


def test_the_norm_is_that_of_the_sum_of_both_gradients_of_a_tied_weight() -> None:
    model = qwen(torch.bfloat16, tie_word_embeddings=True)
    engine = in_vocab_chunks(model, embedding="rows")
    assert head_of(engine).vocab_chunks is not None
    model(**inputs(0)).loss.backward()
    measured = engine.clip_grad_norm(None).value()  # before anybody looks at the values
    norms = [found.norm() for found in gradients(model).values()]
    assert measured == pytest.approx(float(torch.stack(norms).norm()), rel=1e-6)


def test_a_head_used_under_autocast_is_copied_whole(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = qwen(), qwen()
    in_vocab_chunks(model)
    losses = []
    with caplog.at_level(logging.WARNING, "fluxtrain"):
        for each in (plain, model):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses.append(each(**inputs(0)).loss)
    assert "under autocast" in caplog.text
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0.0)


def test_a_head_that_moves_to_the_device_and_back_trains_on() -> None:
    def losses(*, moves: bool) -> list[float]:
        model = qwen()
        engine = in_vocab_chunks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        every = len(engine.groups)
        told = []
        for step, count in enumerate((0, every, 0)):
            if moves:
                turn_to(engine, device_groups=count, slots=0 if count else 3)
                chunks = head_of(engine).vocab_chunks
                assert chunks is not None and (count == 0 or chunks.device_bytes == 0)
            loss = model(**inputs(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(float(loss.detach()))
        return told

    assert losses(moves=True) == pytest.approx(losses(moves=False), rel=1e-6)


def test_a_tied_head_beside_a_whole_lookup_stays_whole_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = qwen(tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING, "fluxtrain"):
        engine = in_vocab_chunks(model, embedding="whole")
    assert head_of(engine).vocab_chunks is None
    assert "none is known" not in caplog.text  # once is enough, with the reason
    assert "head='chunks' has no effect" in caplog.text
    assert "embedding=rows" in caplog.text
