"""Which parameters of a block take one step together, and how a block lies for that."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import fluxtrain
from fluxtrain.core.adamw.hyper import Hyper
from fluxtrain.core.memory.group import Group
from fluxtrain.core.updates.updates import ranges
from fluxtrain.methods.optimizer import parameter_groups
from fluxtrain.plan.group_placement import GroupPlacement
from fluxtrain.plan.states import StateFormat

DECAYED, NOT = Hyper(lr=1e-2, weight_decay=0.1), Hyper(lr=1e-2, weight_decay=0.0)
MATRIX, VECTOR = (5, 8), (40,)


def group(shapes: list[tuple[int, ...]], states: StateFormat = "fp32") -> Group:
    made = Group("block", "block", states)
    for i, shape in enumerate(shapes):
        value = torch.full(shape, float(i), dtype=torch.bfloat16)
        made.add(nn.Parameter(value), f"p{i}")
    made.place(GroupPlacement.on("device"), torch.device("cpu"), pin=False)
    made.memory.ensure_state()
    made.memory.ensure_gradient()
    return made


def taken(g: Group, hypers: list[Hyper | None]) -> list[tuple[int, int]]:
    """[start, stop) of each range."""
    by_index = {i: hyper for i, hyper in enumerate(hypers) if hyper is not None}
    return [(part.start, part.stop) for part in ranges(g, by_index)]


def test_a_block_of_matrices_norms_and_biases_is_two_ranges() -> None:
    g = group([VECTOR, MATRIX, VECTOR, MATRIX, MATRIX, VECTOR])
    assert [m.offset for m in g.members] == [192, 0, 256, 64, 128, 320]
    assert taken(g, [NOT, DECAYED, NOT, DECAYED, DECAYED, NOT]) == [(0, 168), (192, 360)]


def test_a_parameter_with_another_step_ends_a_range() -> None:
    g = group([MATRIX] * 3)
    g.members[1].step = 5
    assert taken(g, [DECAYED] * 3) == [(0, 40), (64, 104), (128, 168)]


@pytest.mark.parametrize("offload", ["none", "weights"])
def test_norms_and_biases_are_not_decayed_where_matrices_are(offload: str) -> None:
    """A rate of which nothing is seen but the decay: what has one shrinks, the rest stays."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **heads))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=3.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fluxtrain.wrap(model, device="cpu", offload=offload)
    kinds = ("norms", "biases", "embeddings")
    groups = parameter_groups(model, learning_rate=1e-6, weight_decay=5e4, no_decay=kinds)
    optimizer = torch.optim.AdamW(groups)
    ids = torch.arange(32).view(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    fluxtrain.sync(model)
    decayed = [name for group in groups[:1] for name, p in model.named_parameters()
               if any(p is one for one in group["params"])]  # fmt: skip
    assert decayed and len(decayed) < len(before)
    for name, parameter in model.named_parameters():
        factor = 0.95 if name in decayed else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name], atol=1e-4, rtol=0)
