"""Models whose modules carry methods of their own on the instance, as fused kernels put there."""

from __future__ import annotations

import copy
import pickle
import types
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import MisusedModel


def _doubled(self: Any, hidden: Tensor) -> Tensor:
    return 2 * type(self).forward(self, hidden)


def _said(self: Any) -> str:
    return "doubled"


def patched(model: nn.Module) -> nn.Module:
    """Every norm, within and beside the blocks, gives twice what it gave."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.__dict__["forward"] = types.MethodType(_doubled, module)
            module.__dict__["extra_repr"] = types.MethodType(_said, module)
    return model


def test_methods_on_the_instances_are_run_and_come_back(tiny: Any, batch: Any) -> None:
    plain = patched(tiny("llama"))
    wrapped = fluxtrain.wrap(patched(tiny("llama")))
    loss = wrapped(**batch()).loss
    loss.backward()
    expected = plain(**batch()).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for (name, ours), theirs in zip(wrapped.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert not torch.equal(expected.detach(), tiny("llama")(**batch()).loss)
    fluxtrain.unwrap(wrapped)
    assert wrapped.model.norm.forward.__func__ is _doubled  # type: ignore[union-attr]
    again = wrapped(**batch()).loss
    torch.testing.assert_close(again, expected, rtol=1e-6, atol=0)


def test_a_copy_keeps_them_and_a_pickle_has_those_of_the_class(tiny: Any, batch: Any) -> None:
    wrapped = fluxtrain.wrap(patched(tiny("llama")))
    made = copy.deepcopy(wrapped)
    assert made.model.norm.forward.__self__ is made.model.norm  # type: ignore[union-attr]
    theirs, ours = made(**batch()).loss, wrapped(**batch()).loss
    torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=0)  # one in chunks, the other whole
    norm = pickle.loads(pickle.dumps(wrapped.model.norm))
    assert torch.equal(norm.weight, wrapped.model.norm.weight)
    assert engine_of(wrapped).groups


def test_other_replacements_are_refused(tiny: Any) -> None:
    model = tiny("llama")
    model.model.norm.forward = partial(type(model.model.norm).forward, model.model.norm)
    with pytest.raises(MisusedModel, match="wrap the model before that"):
        fluxtrain.wrap(model)
