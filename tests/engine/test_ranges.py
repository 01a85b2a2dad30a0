"""Which parameters of a block one kernel steps, and that it steps each as it would be by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import fluxtrain
from fluxtrain.memory.group import Group
from fluxtrain.optim.fused_device import update_resident_
from fluxtrain.optim.hyper import Hyper, Turns
from fluxtrain.optim.split_adamw import (
    encode,
    update_,
    update_f32_,
    update_moments_,
    update_weights_,
    update_weights_f32_,
)
from fluxtrain.plan.group_placement import GroupPlacement
from fluxtrain.plan.states import StateFormat
from fluxtrain.stream.ranges import MOST_BORDERS, ranges, same_steps, stretches
from fluxtrain.train.parameter_groups import parameter_groups

N, BORDERS = 1000, (64, 256, 640)
TURNS = Turns(BORDERS, 0.0)
DECAYED, NOT = Hyper(lr=1e-2, weight_decay=0.1), Hyper(lr=1e-2, weight_decay=0.0)


def group(count: int, states: StateFormat = "fp32", width: int = 40) -> Group:
    made = Group("block", "block", states)
    for i in range(count):
        made.add(nn.Parameter(torch.zeros(width, dtype=torch.bfloat16)), f"p{i}")
    made.settle(GroupPlacement.on("device"), torch.device("cpu"), pin=False)
    made.ensure_state()
    made.ensure_gradient()
    return made


def taken(g: Group, hypers: list[Hyper | None]) -> list[list[tuple[int, int]]]:
    """[start, stop) of each part, by stretch."""
    by_index = {i: hyper for i, hyper in enumerate(hypers) if hyper is not None}
    return [[(p.start, p.stop) for p in parts] for parts in stretches(same_steps(g, by_index))]


def test_matrices_and_biases_between_them_are_one_stretch() -> None:
    found = taken(group(6), [DECAYED, NOT, DECAYED, DECAYED, NOT, NOT])
    assert found == [[(0, 40), (64, 104), (128, 232), (256, 360)]]


def test_a_parameter_without_a_gradient_ends_a_stretch() -> None:
    assert taken(group(4), [DECAYED, None, NOT, DECAYED]) == [[(0, 40)], [(128, 168), (192, 232)]]


def test_a_parameter_with_another_step_ends_a_stretch() -> None:
    g = group(4)
    g.members[2].step = 5
    assert taken(g, [DECAYED, NOT, DECAYED, NOT]) == [
        [(0, 40), (64, 104)], [(128, 168)], [(192, 232)],
    ]  # fmt: skip


def test_a_third_weight_decay_or_another_rate_ends_a_stretch() -> None:
    third, faster = Hyper(lr=1e-2, weight_decay=0.3), Hyper(lr=1.0, weight_decay=0.0)
    assert len(taken(group(3), [DECAYED, NOT, third])) == 2
    assert len(taken(group(2), [DECAYED, faster])) == 2


def test_a_stretch_has_at_most_so_many_borders() -> None:
    count = 2 * MOST_BORDERS + 4
    found = taken(group(count), [(DECAYED, NOT)[i % 2] for i in range(count)])
    assert [len(parts) for parts in found] == [MOST_BORDERS + 1, MOST_BORDERS + 1, 2]


def test_states_in_8_bits_are_stepped_range_by_range() -> None:
    g = group(3, "8bit", width=1 << 13)
    assert g.members[0].segment.format == "8bit"
    assert len(taken(g, [DECAYED, NOT, DECAYED])) == 3


def in_turn(gradient: Tensor, step: int, *flats: Tensor) -> None:
    """Each part by itself."""
    for i, (start, stop) in enumerate(zip((0, *BORDERS), (*BORDERS, N), strict=True)):
        update = update_ if len(flats) == 4 else update_f32_
        parts = [flat[start:stop] for flat in (*flats, gradient)]
        update(*parts, hyper=(DECAYED, NOT)[i % 2], step=step, grad_scale=0.25)


def at_once(gradient: Tensor, step: int, *flats: Tensor) -> None:
    update = update_ if len(flats) == 4 else update_f32_
    update(*flats, gradient, hyper=DECAYED, step=step, grad_scale=0.25, turns=TURNS)


def weights_then_moments(gradient: Tensor, step: int, *flats: Tensor) -> None:
    update = update_weights_ if len(flats) == 4 else update_weights_f32_
    update(*flats, gradient, hyper=DECAYED, step=step, grad_scale=0.25, turns=TURNS)
    update_moments_(*flats[-2:], gradient, hyper=DECAYED, step=step, grad_scale=0.25)


def as_on_a_device(gradient: Tensor, step: int, *flats: Tensor) -> None:
    weights, lo = flats[0], flats[1] if len(flats) == 4 else None
    update_resident_(
        weights, lo, *flats[-2:], gradient,
        hyper=DECAYED, step=step, scale=0.5, clip=torch.tensor(0.5), turns=TURNS,
    )  # fmt: skip


@pytest.mark.parametrize("way", [at_once, weights_then_moments, as_on_a_device])
@pytest.mark.parametrize("split", [True, False])
def test_parts_that_take_turns_have_the_bits_of_parts_by_themselves(split: bool, way: Any) -> None:
    drawn = torch.randn(N, generator=torch.Generator().manual_seed(1))
    one = [*(encode(drawn) if split else [drawn]), torch.zeros(N), torch.zeros(N)]
    other = [flat.clone() for flat in one]
    for step in (1, 2):
        gradient = torch.randn(N, generator=torch.Generator().manual_seed(step + 1))
        way(gradient, step, *one)
        in_turn(gradient, step, *other)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


def test_a_block_of_matrices_norms_and_biases_is_one_range() -> None:
    g = group(6)
    hypers = dict(enumerate([DECAYED, NOT, DECAYED, DECAYED, NOT, NOT]))
    (whole,) = ranges(g, hypers)
    assert whole.turns == Turns((64, 128, 256), NOT.weight_decay)
    assert (whole.start, whole.stop) == (0, 360)


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
