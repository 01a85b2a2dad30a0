"""AdamW's state under our key: saved, restored uncast, imported; and the engine's own shards."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import BadInput, MisusedModel
from tests.wrap_with import wrap_with

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
Wrapped = Callable[..., Any]


@pytest.fixture
def wrapped(new_model: Callable[..., Any]) -> Iterator[Wrapped]:
    """`wrapped(dtype, family)`: a wrapped tiny model, each time with the same weights."""
    made: list[nn.Module] = []

    def make(dtype: torch.dtype = torch.bfloat16, family: str = "qwen2", **options: Any) -> Any:
        made.append(wrap_with(new_model(family, dtype), device="cpu", **options))
        return made[-1]

    yield make
    for model in made:
        fluxtrain.unwrap(model)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})


def train(model: Any, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    losses = []
    for at in range(start, stop):
        torch.manual_seed(at)  # for dropout too
        ids = torch.randint(0, 320, (2, 8))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def through_a_file(value: Any) -> Any:
    """What torch.save writes and a load of nothing but weights gives back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def shards(model: Any) -> dict[str, dict[str, Tensor]]:
    return {
        name: {key: tensor.clone() for key, tensor in tensors.items()}
        for name, tensors in engine_of(model).state_shards()
    }


def same_shards(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> None:
    """Bit for bit: weights, lower halves, moments and step counts."""
    assert a.keys() == b.keys()
    for name, tensors in a.items():
        assert tensors.keys() == b[name].keys()
        for key, tensor in tensors.items():
            other = b[name][key]
            assert tensor.dtype == other.dtype and torch.equal(tensor, other), f"{name}.{key}"


def test_there_is_no_state_before_the_first_step(wrapped: Wrapped) -> None:
    model = wrapped()
    optimizer = adamw(model)
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer, 0, 1)
    assert list(optimizer.state_dict()["state"]) == ["fluxtrain"]


@pytest.mark.parametrize("overlap", [False, True], ids=["waiting", "overlapped"])
@BOTH
@pytest.mark.thinned(2)
def test_a_saved_run_goes_on_bit_for_bit(
    wrapped: Wrapped, dtype: torch.dtype, overlap: bool
) -> None:
    whole = wrapped(dtype, overlap=overlap)
    optimizer = adamw(whole)
    train(whole, optimizer, 0, 3)
    state, weights = optimizer.state_dict(), whole.state_dict()
    saved = through_a_file({"optimizer": state, "model": weights})
    rest = train(whole, optimizer, 3, 6)

    second = wrapped(dtype, overlap=overlap)
    train(second, adamw(second), 50, 52)  # whatever was in its arenas is replaced
    again = adamw(second)
    second.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert train(second, again, 3, 4) == rest[:1]
    assert train(second, again, 4, 6) == rest[1:]
    same_shards(shards(second), shards(whole))


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_run_rolled_back_to_an_earlier_state_repeats_itself(wrapped: Wrapped, order: str) -> None:
    model = wrapped()
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    first = train(model, optimizer, 2, 5)
    end = shards(model)
    loads = [lambda: model.load_state_dict(weights), lambda: optimizer.load_state_dict(state)]
    for load in loads if order == "model first" else reversed(loads):
        load()
    assert train(model, optimizer, 2, 5) == first
    same_shards(shards(model), end)


def test_a_lower_half_is_not_restored_beside_other_weights(wrapped: Wrapped) -> None:
    model = wrapped()
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    state = copy.deepcopy(optimizer.state_dict())
    target = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        target.fill_(0.5)
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 2, 3)
    tensors = shards(model)["model.layers.0"]
    assert not tensors["mlp.up_proj.weight.lo"].any()
    assert tensors["mlp.gate_proj.weight.lo"].any()
    assert bool((target == 0.5).all())


def test_a_plain_torch_state_is_taken_over(wrapped: Wrapped, new_model: Callable[..., Any]) -> None:
    """A run that began without FluxTrain goes on with it as it would have without."""
    plain = new_model("qwen2", torch.float32)
    optimizer = adamw(plain, eps=1e-5)
    train(plain, optimizer, 0, 3)
    model = wrapped(torch.float32)
    model.load_state_dict(plain.state_dict())
    ours = adamw(model, eps=1e-5)
    ours.load_state_dict(through_a_file(optimizer.state_dict()))
    expected, got = train(plain, optimizer, 3, 6), train(model, ours, 3, 6)
    assert got == pytest.approx(expected, rel=1e-5)
    assert list(ours.state_dict()["state"]) == ["fluxtrain"]
    assert ours.state_dict()["state"]["fluxtrain"][0]["step"] == 6


def test_parameters_added_later_are_part_of_the_saved_state(wrapped: Wrapped) -> None:
    def made() -> tuple[Any, torch.optim.AdamW, list[nn.Parameter]]:
        model = wrapped()
        later = list(model.model.layers[1].parameters())
        ids = {id(p) for p in later}
        first = [p for p in model.parameters() if id(p) not in ids]
        return model, torch.optim.AdamW(first, lr=1e-2), later

    model, optimizer, later = made()
    train(model, optimizer, 0, 2)
    model.zero_grad()
    optimizer.add_param_group({"params": later, "lr": 1e-3})
    train(model, optimizer, 2, 4)
    saved = through_a_file([optimizer.state_dict(), model.state_dict()])
    rest = train(model, optimizer, 4, 6)

    other, again, later = made()
    again.add_param_group({"params": later, "lr": 1e-3})
    other.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    assert train(other, again, 4, 6) == rest
    same_shards(shards(other), shards(model))


def test_a_state_of_another_model_is_refused(wrapped: Wrapped) -> None:
    model, other = wrapped(), wrapped(family="gpt2")
    for one in (model, other):
        optimizer = adamw(one)
        train(one, optimizer, 0, 1)
    wrong = adamw(model)
    with pytest.raises((MisusedModel, ValueError)):
        wrong.load_state_dict(through_a_file(optimizer.state_dict()))
        train(model, wrong, 1, 2)


# -- the engine's shards ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@BOTH
@pytest.mark.thinned(3)
def test_shards_round_trip_and_training_goes_on_bit_for_bit(
    wrapped: Wrapped, dtype: torch.dtype, family: str
) -> None:
    model = wrapped(dtype, family, overlap=True)
    optimizer = adamw(model)
    train(model, optimizer, 0, 3)
    saved = through_a_file(shards(model))
    rest = train(model, optimizer, 3, 6)
    fresh = wrapped(dtype, family, overlap=True)
    for name, tensors in saved.items():
        engine_of(fresh).load_state_shard(name, tensors)
    same_shards(shards(fresh), saved)
    assert train(fresh, adamw(fresh), 3, 6) == rest
    same_shards(shards(fresh), shards(model))


def _of_another_family(model: Any, other: Any) -> dict[str, dict[str, Tensor]]:
    return shards(other)


def _short_of_a_tensor(model: Any, other: Any) -> dict[str, dict[str, Tensor]]:
    made = shards(model)
    del made["model.layers.1"]["mlp.up_proj.weight.m"]
    return made


def _of_another_dtype(model: Any, other: Any) -> dict[str, dict[str, Tensor]]:
    return {n: {k: t.float() for k, t in ts.items()} for n, ts in shards(model).items()}


def _with_a_parameter_too_many(model: Any, other: Any) -> dict[str, dict[str, Tensor]]:
    made = shards(model)
    made["model.layers.0"]["self_attn.gate.weight.weight_bits"] = torch.zeros(3)
    return made


@pytest.mark.parametrize(
    "wrong",
    [_of_another_family, _short_of_a_tensor, _of_another_dtype, _with_a_parameter_too_many],
    ids=lambda f: f.__name__.strip("_"),
)
def test_shards_of_another_model_are_refused(wrapped: Wrapped, wrong: Any) -> None:
    model, other = wrapped(), wrapped(family="gpt2")
    for one in (model, other):
        train(one, adamw(one), 0, 1)
    fresh = engine_of(wrapped())
    with pytest.raises(BadInput, match="another model|does not have"):
        for name, tensors in wrong(model, other).items():
            fresh.load_state_shard(name, tensors)
