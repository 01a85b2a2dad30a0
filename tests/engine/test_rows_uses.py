"""How embeddings are used: hooks, several calls, evaluation, writes from outside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.row_models import (
    Twice,
    by_rows,
    equal,
    inputs,
    llama,
    squares,
    trained,
    wrapped,
)


def test_an_embedding_may_be_called_twice_in_a_forward() -> None:
    equal(trained(Twice(), "whole", loss_of=squares), trained(Twice(), "rows", loss_of=squares))


def test_two_forwards_before_one_backward() -> None:
    def both(model: nn.Module, seed: int) -> Tensor:
        return squares(model, seed) + squares(model, seed + 100)

    equal(trained(Twice(), "whole", loss_of=both), trained(Twice(), "rows", loss_of=both))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_the_embedding(reentrant: bool) -> None:
    def within(model: Any, seed: int) -> Tensor:
        ids = inputs(seed)["input_ids"]
        dummy = torch.zeros(1, requires_grad=True)

        def part(dummy: Tensor) -> Tensor:
            found: Tensor = model.embed(ids) + dummy
            return found

        hidden = checkpoint(part, dummy, use_reentrant=reentrant)
        for layer in model.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.float().square().mean()

    equal(trained(Twice(), "whole", loss_of=within), trained(Twice(), "rows", loss_of=within))


def test_a_weight_that_is_also_read_by_itself_gets_both_gradients() -> None:
    def both(model: Any, seed: int) -> Tensor:
        return squares(model, seed) + 0.1 * model.embed.weight[:50].float().square().sum()

    equal(trained(Twice(), "whole", loss_of=both), trained(Twice(), "rows", loss_of=both))


def test_embeddings_given_in_place_of_ids() -> None:
    def given(model: Any, seed: int) -> Tensor:
        batch = inputs(seed)
        hidden = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        loss: Tensor = model(inputs_embeds=hidden, labels=batch["labels"]).loss
        return loss

    equal(trained(llama(), "whole", loss_of=given), trained(llama(), "rows", loss_of=given))


def test_generation_and_evaluation_give_what_the_plain_model_gives() -> None:
    model = llama(torch.float32).eval()
    ids = inputs(1)["input_ids"][:1]
    plain = copy.deepcopy(model)
    expected = plain.generate(ids, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    engine = wrapped(model, "rows")
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)  # type: ignore[operator]
    with torch.inference_mode(), engine.evaluating():
        evaluated = model(**inputs(1)).loss.item()
    assert by_rows(engine)
    assert evaluated == pytest.approx(plain(**inputs(1)).loss.item(), rel=1e-6)
    model.train()
    model(**inputs(2)).loss.backward()
    assert model.get_input_embeddings().weight.grad.any()  # type: ignore[operator]


def test_hooks_on_the_module_and_after_the_gradient_are_called() -> None:
    seen: list[str] = []
    model = llama()
    embed: Any = model.get_input_embeddings()  # type: ignore[operator]
    engine = wrapped(model, "rows")
    embed.register_forward_pre_hook(lambda *_: seen.append("before"))
    embed.register_forward_hook(lambda *_: seen.append("after"))
    embed.register_full_backward_hook(lambda *_: seen.append("backward"))
    norms: list[float] = []
    embed.weight.register_post_accumulate_grad_hook(
        lambda weight: norms.append(float(weight.grad.float().norm()))
    )
    model(**inputs(0)).loss.backward()
    assert seen == ["before", "after", "backward"]
    assert norms == [pytest.approx(float(embed.weight.grad.float().norm()))]
    assert by_rows(engine)


@pytest.mark.parametrize(
    ("trained_too", "rows"), [({}, True), ({"modules_to_save": ["embed_tokens"]}, False)], ids=str
)
def test_adapters_beside_a_frozen_embedding(trained_too: dict[str, Any], rows: bool) -> None:
    peft = pytest.importorskip("peft")
    results = []
    for embedding in ("whole", "rows"):
        model = llama(torch.float32)
        torch.manual_seed(1)
        wanted = peft.LoraConfig(r=4, target_modules=["q_proj"], **trained_too)
        model = peft.get_peft_model(model, wanted).train()
        engine = wrapped(model, embedding)
        assert by_rows(engine) == (rows and embedding == "rows")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for step in range(3):
            loss = model(**inputs(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        results.append(losses)
    assert results[0] == results[1]


@pytest.mark.parametrize("fails", [False, True])
def test_ids_on_the_host_are_not_looked_at_after_the_forward(fails: bool) -> None:
    model = Twice()
    engine = wrapped(model, "rows")
    ids = inputs(0)["input_ids"]
    engine.host_ids.note(((ids,), {}), ((ids,), {}))
    seen: list[bool] = []
    model.layers[0].register_forward_pre_hook(
        lambda *_: seen.append(engine.host_ids.of(ids) is ids)
    )
    if fails:
        model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids)
    else:
        model(ids)
    assert seen == [True]
    assert engine.host_ids.of(ids) is None


# -- where rows will not do ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
def test_exotic_embeddings_stay_whole_and_that_is_said(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert not by_rows(wrapped(Twice(**options), "auto"))
    assert not caplog.messages
    assert not by_rows(wrapped(Twice(**options), "rows"))
    assert "embedding='rows' has no effect: no embedding" in caplog.text


def test_a_table_with_hooks_stays_whole_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Twice()
    model.embed.weight.register_hook(lambda gradient: gradient)
    assert not by_rows(wrapped(model, "rows"))
    assert "its weight has hooks" in caplog.text


def test_a_tied_table_falls_back_to_the_slot_of_the_head() -> None:
    results = []
    for embedding in ("whole", "rows"):
        model: Any = llama(tie_word_embeddings=True)
        engine = wrapped(model, embedding)
        ids = inputs(0)["input_ids"]
        embed = model.get_input_embeddings()
        embed.weight.register_hook(lambda gradient: gradient * 1)
        slots = len(engine.cards[0].window.slots)
        embed(ids).float().square().mean().backward()
        assert len(engine.cards[0].window.slots) == slots
        assert not by_rows(engine)
        results.append(embed.weight.grad.detach().clone())
    assert torch.equal(*results)
