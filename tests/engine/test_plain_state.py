"""Moments of a wrapped model's optimizer go on in torch's own AdamW; a broken state is named."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fluxtrain
from fluxtrain.errors import BadInput, MisusedModel
from tests.engine.plain_models import Pair, adamw, net, train, trained


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses 20 to 25 of torch alone."""
    model = net()
    optimizer = adamw(model)
    train(model, optimizer, 0, 20)
    return train(model, optimizer, 20, 26)


# -- the ways out of a wrapped model ---------------------------------------------------------------


def _loaded_from_a_file(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = net()
    other.load_state_dict(weights)
    again = adamw(other)
    again.load_state_dict(state)
    return other, again


def _unwrapped_and_loaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
    state = copy.deepcopy(optimizer.state_dict())
    again = adamw(fluxtrain.unwrap(model))
    again.load_state_dict(state)
    return model, again


def _copied(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
    made: Pair = copy.deepcopy((model, optimizer))
    return made


def _pickled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
    made: Pair = pickle.loads(pickle.dumps((model, optimizer)))
    return made


def _unwrapped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
    return fluxtrain.unwrap(model), optimizer


def _unwrapped_and_saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
    fluxtrain.unwrap(model)
    assert "fluxtrain" not in optimizer.state_dict()["state"]
    return _loaded_from_a_file(model, optimizer)


def _by_the_function(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
    state = fluxtrain.plain_optimizer_state(optimizer.state_dict())
    assert "fluxtrain" not in state["state"]
    other = net()
    other.load_state_dict(model.state_dict())
    again = adamw(other)
    again.load_state_dict(copy.deepcopy(state))
    return other, again


WAYS = [
    _loaded_from_a_file, _unwrapped_and_loaded, _copied, _pickled, _unwrapped,
    _unwrapped_and_saved, _by_the_function,
]  # fmt: skip
EACH_WAY = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))


@EACH_WAY
@pytest.mark.parametrize("overlap", [False, True], ids=["waiting", "overlapped"])
@pytest.mark.thinned(3)
def test_plain_training_goes_on_with_the_moments_of_the_wrapped_one(
    way: Callable[..., Pair], overlap: bool, expected: list[float]
) -> None:
    model, optimizer = way(*trained(overlap=overlap))
    assert train(model, optimizer, 20, 26) == pytest.approx(expected, rel=1e-5)
    weight = model.blocks[0].a.weight
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[weight]["step"] == 26
    assert "fluxtrain" not in optimizer.state
    assert not optimizer.state.get(model.blocks[1].unused.weight)


@EACH_WAY
@pytest.mark.parametrize(("states", "limit"), [("bf16", 2e-3), ("8bit", 2e-2)])
@pytest.mark.thinned(3)
def test_low_bit_moments_go_on_in_fp32(
    way: Callable[..., Pair], states: str, limit: float, expected: list[float]
) -> None:
    model, optimizer = way(*trained(states))
    assert train(model, optimizer, 20, 26) == pytest.approx(expected, rel=limit)
    state = optimizer.state[model.blocks[0].a.weight]
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}


@pytest.mark.parametrize("way", [_copied, _unwrapped], ids=["copied", "unwrapped"])
@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.thinned(3)
def test_moments_of_bf16_weights_get_their_dtype_as_torchs_do(
    way: Callable[..., Pair], kind: dict[str, bool]
) -> None:
    model, optimizer = trained(dtype=torch.bfloat16)
    for group in optimizer.param_groups:
        group.update(kind)
    model, optimizer = way(model, optimizer)
    assert train(model, optimizer, 20, 22)[-1] < 2
    state = optimizer.state[model.blocks[0].a.weight]
    assert state["exp_avg_sq"].dtype == torch.bfloat16 and state["step"] == 22


def test_one_optimizer_over_a_wrapped_and_an_unwrapped_model_keeps_both_moments(
    expected: list[float],
) -> None:
    pair = [fluxtrain.wrap(net(), device="cpu", offload="weights") for _ in range(2)]
    optimizer = torch.optim.AdamW([p for model in pair for p in model.parameters()], lr=1e-3)

    def both(start: int, stop: int) -> list[float]:
        losses = []
        for seed in range(start, stop):
            x = torch.randn(8, 96, generator=torch.Generator().manual_seed(seed))
            each = [(model(x) - x.flip(1)).square().mean() for model in pair]
            sum(each).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            losses.append([loss.item() for loss in each])
        assert all(a == pytest.approx(b, rel=1e-5) for a, b in losses)
        return [a for a, _ in losses]

    both(0, 20)
    fluxtrain.unwrap(pair[1])
    assert both(20, 26) == pytest.approx(expected, rel=1e-5)


def test_a_subclass_of_adamw_takes_over_the_moments_of_a_wrapped_model(
    expected: list[float],
) -> None:
    class Other(torch.optim.AdamW):
        pass

    model, optimizer = trained()
    other = Other(model.parameters(), lr=1e-3)
    other.load_state_dict(optimizer.state_dict())
    assert train(model, other, 20, 26) == pytest.approx(expected, rel=1e-5)


# -- what cannot go on -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW with amsgrad"])
def test_an_optimizer_that_cannot_use_the_moments_says_so(kind: str, wrapped: bool) -> None:
    model, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    if kind == "SGD":
        other: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state["param_groups"] = other.state_dict()["param_groups"]
    else:
        other = adamw(model)
        state["param_groups"][0]["amsgrad"] = True
    if not wrapped:
        fluxtrain.unwrap(model)
    other.load_state_dict(state)
    with pytest.raises(MisusedModel, match=rf"{kind} was given .*use torch\.optim\.AdamW"):
        train(model, other, 0, 1)
    del other.state["fluxtrain"]
    train(model, other, 0, 1)


def _garbage(held: dict[Any, Any]) -> None:
    held[0] = "x"


def _no_second_moment(held: dict[Any, Any]) -> None:
    del held[0]["exp_avg_sq"]


def _another_shape(held: dict[Any, Any]) -> None:
    held[0]["exp_avg_sq"] = torch.zeros(3)


def _no_steps(held: dict[Any, Any]) -> None:
    held[0]["step"] = "many"


def _no_scales(held: dict[Any, Any]) -> None:
    del held[0]["exp_avg_scale"]


BROKEN: dict[Callable[[dict[Any, Any]], None], str] = {
    _garbage: "is of type str, not a dict",
    _no_second_moment: "has no 'exp_avg_sq'",
    _another_shape: r"has \(3,\) for 'exp_avg_sq', and the parameter is \(96, 96\)",
    _no_steps: "counts 'many' steps",
    _no_scales: "'exp_avg' in 8 bits without its 36 scales",
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__.strip("_"))
@pytest.mark.thinned(5)
def test_a_broken_state_is_named_with_its_parameter(
    broken: Callable[[dict[Any, Any]], None], wrapped: bool
) -> None:
    model, optimizer = trained("8bit" if broken is _no_scales else "fp32")
    state = copy.deepcopy(optimizer.state_dict())
    whole = copy.deepcopy(state)
    broken(state["state"]["fluxtrain"])
    if broken is not _another_shape:
        with pytest.raises(MisusedModel, match=BROKEN[broken]):
            fluxtrain.plain_optimizer_state(state)
    if not wrapped:
        fluxtrain.unwrap(model)
    again = adamw(model)
    del optimizer
    again.load_state_dict(state)
    with pytest.raises(MisusedModel, match=BROKEN[broken]) as caught:
        train(model, again, 20, 21)
    name = "blocks.0.a.weight" if wrapped else r"parameter 0, (96, 96)"
    assert name in str(caught.value)
    again.load_state_dict(whole)
    model.zero_grad()
    train(model, again, 20, 21)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_something_else_under_our_key_is_named(wrapped: bool) -> None:
    model = net()
    if wrapped:
        fluxtrain.wrap(model, device="cpu")
    optimizer = adamw(model)
    state = optimizer.state_dict()
    state["state"]["fluxtrain"] = "x"
    optimizer.load_state_dict(state)
    with pytest.raises(MisusedModel, match="has str under 'fluxtrain'"):
        train(model, optimizer, 0, 1)


def test_the_function_leaves_torchs_own_states_alone_and_refuses_anything_else() -> None:
    model = net()
    optimizer = adamw(model)
    train(model, optimizer, 0, 1)
    state = optimizer.state_dict()
    assert fluxtrain.plain_optimizer_state(state) is state
    with pytest.raises(BadInput, match=r"state_dict\(\)"):
        fluxtrain.plain_optimizer_state(optimizer)  # type: ignore[arg-type]
