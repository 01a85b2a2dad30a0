"""Uses of a wrapped model that cannot work are named, and do not hang or crash inside."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import BadInput, MisusedModel, UnsupportedModel
from tests.wrap_with import wrap_with


@pytest.mark.parametrize("thing", ["x", None, 3, torch.zeros(2)], ids=str)
def test_only_a_module_can_be_wrapped(thing: Any) -> None:
    with pytest.raises(BadInput, match=r"takes a torch\.nn\.Module"):
        fluxtrain.wrap(thing)


@pytest.mark.parametrize("name", ["chunk_rows", "prefetch", "resident_blocks", "device_groups"])
@pytest.mark.parametrize("value", [1.5, "4", True])
def test_counts_are_whole_numbers(name: str, value: Any, tiny: Any) -> None:
    with pytest.raises(BadInput, match=f"{name} is .*number"):
        wrap_with(tiny("llama"), **{name: value})


def test_an_unknown_device_is_refused(tiny: Any) -> None:
    with pytest.raises(BadInput, match="use 'cuda' or 'cpu'"):
        fluxtrain.wrap(tiny("llama"), device="toaster")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_that_is_wrapped_without_gradients_trains_all_the_same(
    mode: Any, tiny: Any, batch: Any
) -> None:
    expected = fluxtrain.wrap(tiny("llama"))(**batch()).loss
    model = tiny("llama")
    with mode():
        fluxtrain.wrap(model)
    loss = model(**batch()).loss
    loss.backward()
    assert float(loss.detach()) == float(expected.detach())
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_made_in_inference_mode_is_refused(tiny: Any) -> None:
    with torch.inference_mode():
        model = tiny("llama")
    with pytest.raises(UnsupportedModel, match="inference_mode"):
        fluxtrain.wrap(model)


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_sparse_gradients_are_refused_with_the_cure(kind: Any, tiny: Any, batch: Any) -> None:
    model = tiny("llama")
    model.model.extra = kind(9, 4, sparse=True)
    with pytest.raises(
        UnsupportedModel, match=r"model\.extra has sparse.*make it with sparse=False"
    ):
        fluxtrain.wrap(model)
    model.model.extra.weight.requires_grad_(False)
    fluxtrain.wrap(model)(**batch()).loss.backward()


def test_a_call_with_other_weights_is_refused_with_its_name(tiny: Any, batch: Any) -> None:
    model = fluxtrain.wrap(tiny("llama"))
    halves = {name: weight.detach() * 0.5 for name, weight in model.named_parameters()}
    with pytest.raises(MisusedModel, match=r"for this call alone \(torch\.func\.functional_call"):
        torch.func.functional_call(model, halves, kwargs=batch())
    model(**batch()).loss.backward()


class _Drawing(torch.nn.Module):
    """Drops elements by a random generator of its own; in `odd`, a whole product now and then."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.a, self.odd = torch.nn.Linear(8, 8), odd
        self.draw = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(8, generator=self.draw) + 0.5
        y = torch.tanh(self.a(x))
        if self.odd:
            for _ in range(int(torch.randint(1, 99, (), generator=self.draw))):
                y = y.sin()
            return x + y
        return x + y * drawn


@pytest.mark.parametrize("odd", [False, True], ids=["other values", "another graph"])
def test_a_random_generator_of_a_blocks_own_is_named_as_a_cause(odd: bool) -> None:
    model = torch.nn.Sequential(_Drawing(odd), _Drawing(odd))
    fluxtrain.wrap(model, device="cpu")
    with pytest.raises(MisusedModel, match=r"computed something else.*random generator of its own"):
        model(torch.ones(2, 8)).square().sum().backward()


def test_unwrapping_between_forward_and_backward_is_named(tiny: Any, batch: Any) -> None:
    model = fluxtrain.wrap(tiny("llama"))
    loss = model(**batch()).loss
    fluxtrain.unwrap(model)
    with pytest.raises(MisusedModel, match="unwrapped between forward and backward"):
        loss.backward()


def test_a_second_thread_is_refused_while_the_first_computes(tiny: Any, batch: Any) -> None:
    model = fluxtrain.wrap(tiny("llama"))
    inside, may_go_on = threading.Event(), threading.Event()

    def stop(*_: Any) -> None:
        inside.set()
        may_go_on.wait(60)

    hook = model.model.layers[0].mlp.register_forward_hook(stop)
    first = threading.Thread(target=lambda: model(**batch()))
    first.start()
    assert inside.wait(60)
    with pytest.raises(MisusedModel, match="two threads"):
        model(**batch())
    may_go_on.set()
    first.join(60)
    hook.remove()
    model(**batch()).loss.backward()


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_fork_is_refused_before_it_waits_for_threads_it_has_not(tiny: Any, batch: Any) -> None:
    model, here = fluxtrain.wrap(tiny("llama")), os.getpid()
    engine_of(model)
    given = batch()
    child = os.fork()
    if child == 0:  # nothing of the test's own process may end or be told of here
        said = ""
        try:
            model(**given)
        except MisusedModel as error:
            said = str(error)
        finally:
            os._exit(7 if f"wrapped in process {here}" in said and "spawn" in said else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    model(**given).loss.backward()  # the process that wrapped it goes on


def _compile_whole(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def _compile_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def _compile_blocks(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


COMPILED = [_compile_whole, _compile_in_place, _compile_blocks]


def _losses(model: Any, inputs: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("first", ["wrapped", "compiled"])
@pytest.mark.thinned(3)
def test_a_compiled_model_trains_as_one_that_is_not(
    compiled: Any, first: str, tiny: Any, batch: Any
) -> None:
    expected = _losses(fluxtrain.wrap(tiny("llama")), batch())
    model = tiny("llama")
    both = [fluxtrain.wrap, compiled] if first == "wrapped" else [compiled, fluxtrain.wrap]
    for change in both:
        model = change(model)
    assert _losses(model, batch()) == expected


def test_compiling_a_wrapped_model_is_told_to_do_nothing(
    tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fluxtrain.wrap(tiny("llama")).compile()
    assert "torch.compile does nothing on a wrapped model" in caplog.text


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.13",
    reason="torch before 2.13 computes it as if it were not compiled, without a word",
)
def test_a_wrapped_model_that_must_be_one_graph_is_refused(tiny: Any, batch: Any) -> None:
    model = torch.compile(fluxtrain.wrap(tiny("llama")), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="fullgraph=True"):
        model(**batch())
