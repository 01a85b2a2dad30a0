"""Gradient accumulation divides every term of the loss; evaluation reports cross entropy alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import fluxtrain
from fluxtrain.data.batches import Batch
from fluxtrain.methods.text_task import CausalLM

Tiny = Callable[..., PreTrainedModel]


def batch_of(ids: torch.Tensor) -> Batch:
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    labels = ids.clone()
    labels[:, 0] = -100
    return Batch(
        input_ids=ids, labels=labels, position_ids=positions,
        predicted=int((labels != -100).sum()), tokens=ids.numel(),
    )  # fmt: skip


def gradients(model: PreTrainedModel, batches: list[Batch]) -> dict[str, torch.Tensor]:
    count = sum(batch.predicted for batch in batches)
    model.zero_grad()
    for batch in batches:
        CausalLM().loss(model, batch, count).backward()
    named = ((name, p.grad) for name, p in model.named_parameters())
    return {name: grad.clone() for name, grad in named if grad is not None}


@pytest.mark.parametrize("wrapped", [False, True])
def test_four_passes_of_one_row_have_the_gradient_of_one_pass_of_four(
    tiny: Tiny, wrapped: bool
) -> None:
    row = torch.randint(1, 96, (1, 12), generator=torch.Generator().manual_seed(3))
    one = batch_of(row)  # the balance of a router over equal rows is that of each
    model = tiny("mixtral").eval()
    expected = gradients(model, [batch_of(row.repeat(4, 1))])
    if wrapped:
        model = fluxtrain.wrap(tiny("mixtral").eval())
    found = gradients(model, [one] * 4)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-6), name


def test_evaluation_reports_the_cross_entropy_without_the_routers_loss(tiny: Tiny) -> None:
    model = tiny("mixtral", router_aux_loss_coef=50.0).eval()
    batch = batch_of(torch.randint(1, 96, (2, 12), generator=torch.Generator().manual_seed(3)))
    found = CausalLM().metrics(model, batch)["loss"]
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids).logits[:, :-1].flatten(0, 1)
        entropy = torch.nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten())
        whole = CausalLM().loss(model, batch, batch.predicted)
    assert found == pytest.approx(float(entropy), rel=1e-5)
    assert float(whole) > found + 40
    assert "_loss_function" not in model.__dict__


def test_a_model_that_adds_nothing_has_its_loss_bit_for_bit(tiny: Tiny) -> None:
    model = tiny("llama").eval()
    batch = batch_of(torch.randint(1, 96, (2, 12)))
    assert torch.equal(CausalLM().loss(model, batch, 22), model(**batch.inputs(22)).loss)
