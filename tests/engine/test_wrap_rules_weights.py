"""Reading, writing, copying and moving the weights of a wrapped model."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import MisusedModel, UnsupportedModel

Grads = Callable[[nn.Module], dict[str, Tensor]]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> float:
    loss = model(**inputs).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


# -- reads -----------------------------------------------------------------------------------------

READS: dict[str, Callable[[nn.Module, nn.Parameter], Tensor]] = {
    "data": lambda model, p: p.data.clone(),
    "detach": lambda model, p: p.detach().clone(),
    "arithmetic": lambda model, p: (p * 1).detach(),
    "keyword": lambda model, p: torch.mul(input=p, other=1).detach(),
    "foreach": lambda model, p: torch._foreach_mul([p.detach(), p], 1)[1].detach(),
    "stack": lambda model, p: torch.stack(tensors=[p, p])[0].detach(),
    "numpy": lambda model, p: torch.from_numpy(p.detach().numpy().copy()),
    "tolist": lambda model, p: torch.tensor(p.tolist()),
    "deepcopy": lambda model, p: copy.deepcopy(p).detach(),
    "pickle": lambda model, p: pickle.loads(pickle.dumps(p)).detach(),
    "state_dict": lambda model, p: model.state_dict()["model.layers.2.mlp.up_proj.weight"].clone(),
    "model deepcopy": lambda model, p: copy.deepcopy(model).model.layers[2].mlp.up_proj.weight.data,
    "out": lambda model, p: torch.mul(p.detach(), 1, out=torch.empty(p.shape)),
    "pointer": lambda model, p: (p.data_ptr(), engine_of(model).owners and p.detach().clone())[1],
}


@pytest.mark.parametrize("read", READS, ids=str)
def test_a_read_right_after_a_background_step_sees_the_new_weight(
    read: str, tiny: Any, batch: Any
) -> None:
    """The update is held back until the read is under way."""
    expected_model = fluxtrain.wrap(tiny("llama"))
    expected_optimizer = torch.optim.AdamW(expected_model.parameters(), lr=0.1)
    step(expected_model, expected_optimizer, batch())
    expected = expected_model.model.layers[2].mlp.up_proj.weight.detach().clone()

    model = fluxtrain.wrap(tiny("llama"), overlap=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    gate = threading.Event()
    engine_of(model).updates._worker.submit(partial(gate.wait, 60))
    step(model, optimizer, batch())
    threading.Timer(0.02, gate.set).start()
    assert torch.equal(READS[read](model, model.model.layers[2].mlp.up_proj.weight), expected)


def test_shapes_and_types_are_answered_without_waiting(tiny: Any, batch: Any) -> None:
    model = fluxtrain.wrap(tiny("llama"), overlap=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    gate = threading.Event()
    engine_of(model).updates._worker.submit(partial(gate.wait, 60))
    try:
        step(model, optimizer, batch())
        for p in model.parameters():
            assert (p.shape, p.dtype, p.device, p.requires_grad, p.numel()) and p.grad is None
        assert not gate.is_set()
    finally:
        gate.set()
    fluxtrain.sync(model)


def test_an_alias_taken_before_the_step_is_current_after_sync(tiny: Any, batch: Any) -> None:
    model = fluxtrain.wrap(tiny("llama"), overlap=True)
    weight = model.lm_head.weight
    alias, before = weight.data, weight.detach().clone()
    step(model, torch.optim.AdamW(model.parameters(), lr=0.1), batch())
    fluxtrain.sync(model)
    assert torch.equal(alias, weight.detach())
    assert not torch.equal(alias, before)


# -- writes ----------------------------------------------------------------------------------------

VALUE = 0.1875


def write_through_a_detached_alias(model: nn.Module, p: nn.Parameter) -> None:
    p.detach().fill_(VALUE)


def write_under_no_grad(model: nn.Module, p: nn.Parameter) -> None:
    with torch.no_grad():
        p.copy_(torch.full_like(p, VALUE))


def write_data(model: nn.Module, p: nn.Parameter) -> None:
    p.data.fill_(VALUE)


def replace_data(model: nn.Module, p: nn.Parameter) -> None:
    p.data = torch.full_like(p.data, VALUE)


def load(model: nn.Module, p: nn.Parameter) -> None:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    name = next(n for n, q in model.named_parameters() if q is p)
    state[name].fill_(VALUE)
    model.load_state_dict(state)


def initialise(model: nn.Module, p: nn.Parameter) -> None:
    nn.init.constant_(p, VALUE)


def write_an_alias_and_sync(model: nn.Module, p: nn.Parameter) -> None:
    alias = p.data
    model(input_ids=torch.ones(1, 4, dtype=torch.long))  # the look at `.data` is over by now
    alias.fill_(VALUE)
    fluxtrain.sync(model, written=True)


WRITES = (
    write_through_a_detached_alias, write_under_no_grad, write_data, replace_data, load, initialise,
    write_an_alias_and_sync,
)  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.thinned(7)
def test_a_write_from_outside_is_used_and_then_trained_from_its_exact_value(
    write: Callable[[nn.Module, nn.Parameter], None], overlap: bool, tiny: Any, batch: Any
) -> None:
    """Also the lower halves of the masters: a stale one would move or freeze the weight."""
    model = fluxtrain.wrap(tiny("llama", torch.bfloat16), overlap=overlap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for seed in range(3):
        step(model, optimizer, batch(seed=seed))
    weight = model.model.layers[1].mlp.up_proj.weight
    write(model, weight)
    plain = copy.deepcopy(model)
    assert torch.equal(plain.model.layers[1].mlp.up_proj.weight, torch.full_like(weight, VALUE))
    with torch.no_grad():
        assert torch.equal(model(**batch()).logits, plain(**batch()).logits)
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer, batch())
    engine = engine_of(model)
    engine.flush()
    owner = engine.owners[next(g for g in engine.groups if g.name == "model.layers.1")]
    member = next(o.member for o in owner.values() if o.member.parameter is weight)
    assert bool((member.slice(member.segment.lo) == 0).all())
    assert torch.equal(weight.detach(), torch.full_like(weight, VALUE))


def test_replaced_parameters_and_storage_are_refused(tiny: Any, batch: Any) -> None:
    def assign(model: nn.Module) -> None:
        state = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    def another_object(model: nn.Module) -> None:
        model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(48, 32))

    def another_size(model: nn.Module) -> None:
        model.model.layers[0].mlp.up_proj.weight.data = torch.zeros(4, 32)

    for change in (assign, another_object, another_size):
        model = fluxtrain.wrap(tiny("llama"))
        change(model)
        with pytest.raises(MisusedModel, match="unwrap"):
            model(**batch())


# -- moves and conversions -------------------------------------------------------------------------


def test_moves_do_nothing_and_say_so_once(tiny: Any, batch: Any, caplog: Any) -> None:
    model = fluxtrain.wrap(tiny("llama"))
    before = float(model(**batch()).loss.detach())
    pointers = [p.data_ptr() for p in model.parameters()]
    assert model.to("cpu").cpu().to(torch.float32) is model
    assert model.model.layers[0].to("cpu") is model.model.layers[0]
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert float(model(**batch()).loss.detach()) == before
    assert caplog.text.count("do nothing on a wrapped model") == 1


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double"])
def test_conversions_are_refused_and_change_nothing(convert: str, tiny: Any, batch: Any) -> None:
    model = fluxtrain.wrap(tiny("llama"))
    for part in (model, model.model, model.model.layers[0]):
        with pytest.raises(MisusedModel, match="cannot be converted"):
            getattr(part, convert)()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model(**batch()).loss.backward()


# -- copies ----------------------------------------------------------------------------------------


def pickled(model: nn.Module) -> nn.Module:
    made: nn.Module = pickle.loads(pickle.dumps(model))
    return made


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    made: nn.Module = torch.load(buffer, weights_only=False)
    return made


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved], ids=lambda f: f.__name__)
def test_a_copy_is_plain_and_runs_its_own_weights(
    duplicate: Callable[[nn.Module], nn.Module], tiny: Any, batch: Any, weights: Any, same: Any
) -> None:
    model = fluxtrain.wrap(tiny("qwen2"), overlap=True)
    step(model, torch.optim.AdamW(model.parameters(), lr=0.1), batch())
    copied = duplicate(model)
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    assert not [k for m in copied.modules() for k in m.__dict__ if "fluxtrain" in k]
    same(weights(model), weights(copied))
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    untouched = float(model(**batch()).loss.detach())
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert float(model(**batch()).loss.detach()) == untouched
    assert float(copied(**batch()).loss.detach()) == pytest.approx(4.5643, abs=1e-3)  # ln 96
    again = fluxtrain.wrap(copied)
    again(**batch()).loss.backward()
    assert engine_of(again) is not engine_of(model)


def test_safetensors_saves_and_loads_a_wrapped_model(
    tiny: Any, batch: Any, tmp_path: Path, weights: Any, same: Any
) -> None:
    model = fluxtrain.wrap(tiny("llama", torch.bfloat16), overlap=True)
    step(model, torch.optim.AdamW(model.parameters(), lr=0.1), batch())
    safetensors.torch.save_model(model, str(tmp_path / "weights.safetensors"))
    fresh = tiny("llama", torch.bfloat16)
    safetensors.torch.load_model(fresh, str(tmp_path / "weights.safetensors"))
    same(weights(model), weights(fresh))
    safetensors.torch.save_file(model.state_dict(), str(tmp_path / "state.safetensors"))


# -- life ------------------------------------------------------------------------------------------


def test_wrapping_twice_is_wrapping_once(tiny: Any, batch: Any) -> None:
    model = tiny("llama")
    assert fluxtrain.wrap(model) is model
    engine = engine_of(model)
    assert fluxtrain.auto_wrap(model, offload="max") is model
    assert engine_of(model) is engine
    with pytest.raises(UnsupportedModel, match="wrapped already"):
        fluxtrain.wrap(nn.ModuleList([model, tiny("llama")]))


def test_unwrap_gives_back_a_plain_model_with_the_trained_weights(
    tiny: Any, batch: Any, grads: Grads, same: Any
) -> None:
    model = fluxtrain.wrap(tiny("llama"), overlap=True)
    step(model, torch.optim.AdamW(model.parameters(), lr=0.1), batch())
    copied = copy.deepcopy(model)
    assert fluxtrain.unwrap(model) is model
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not [k for m in model.modules() for k in m.__dict__ if "fluxtrain" in k]
    for each in (model, copied):
        each(**batch()).loss.backward()
    same(grads(model), grads(copied))
    assert fluxtrain.wrap(model.to(torch.bfloat16)) is model


@pytest.mark.parametrize("offload", ["none", "weights", "max"])
def test_a_dropped_model_is_freed_with_its_threads(offload: str, tiny: Any, batch: Any) -> None:
    before = {t.ident for t in threading.enumerate()}
    model = fluxtrain.wrap(tiny("llama"), offload=offload, overlap=True)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, batch())
    step(model, optimizer, batch())
    optimizer.state_dict()
    left = [weakref.ref(model), weakref.ref(engine_of(model)), weakref.ref(model.lm_head)]
    left += [weakref.ref(group) for group in engine_of(model).groups]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)
    for thread in threading.enumerate():
        if thread.ident not in before:
            thread.join(60)
            assert not thread.is_alive(), thread.name
