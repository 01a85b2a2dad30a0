"""Rows of the next batch are computed before their table's update has its turn."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.errors import Diverged
from fluxtrain.stream.engine import Engine
from tests.engine.deferred_models import GIVEN_UP_S
from tests.engine.row_models import by_rows, equal, inputs, llama, trained, wrapped


class Held:
    """The thread of the updates does nothing until it is let go."""

    def __init__(self, engine: Engine) -> None:
        self._go = threading.Event()
        engine.updates._worker.submit(lambda: self._go.wait(GIVEN_UP_S))

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._go.set()


def stepped(model: nn.Module, engine: Engine, *, passes: int = 1, steps: int = 2) -> Any:
    """Some steps; the last one's optimizer step is left to the caller."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        for part in range(passes):
            model(**inputs(step * passes + part)).loss.backward()
        engine.clip_grad_norm(0.5)
        if step < steps - 1:
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def table_after(dtype: torch.dtype, **options: Any) -> Tensor:
    """The whole table after the same steps, without rows."""
    passes = options.pop("passes", 1)
    width = options.pop("hidden_size", 32)
    model = llama(dtype, hidden_size=width)
    engine = wrapped(model, "whole", **options)
    stepped(model, engine, passes=passes).step()
    engine.flush()
    weight: Tensor = model.get_input_embeddings().weight.detach().clone()  # type: ignore[operator]
    return weight


CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, {}),
    "fp32": (torch.float32, {}),
    "several passes": (torch.bfloat16, {"passes": 2}),
    "moments later": (torch.bfloat16, {"deferred_moments": True}),
    "moments in bf16": (torch.bfloat16, {"states": "bf16"}),
    "moments in 8 bits": (torch.bfloat16, {"states": "8bit", "hidden_size": 256}),
    "blocks of moments that rows cut": (torch.bfloat16, {"states": "8bit", "hidden_size": 96}),
    "moments of fp32 in bf16": (torch.float32, {"states": "bf16"}),
    "moments of fp32 in 8 bits": (torch.float32, {"states": "8bit", "hidden_size": 256}),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_have_their_new_weights_before_any_update_was_made(case: str) -> None:
    dtype, options = CASES[case]
    expected = table_after(dtype, **options)
    passes, width = options.pop("passes", 1), options.pop("hidden_size", 32)
    model = llama(dtype, hidden_size=width)
    engine = wrapped(model, "rows", **options)
    optimizer = stepped(model, engine, passes=passes)
    ids = inputs(9)["input_ids"]
    with Held(engine):
        optimizer.step()
        optimizer.zero_grad()
        embed: Any = model.get_input_embeddings()  # type: ignore[operator]
        found = embed(ids)
        assert engine.groups[0].under_way  # the table itself is as it was
        again = embed(ids[:1])
    options.update(passes=passes, hidden_size=width)
    assert torch.equal(found, expected[ids])
    assert torch.equal(again, expected[ids[:1]])
    engine.flush()
    assert torch.equal(embed(ids), expected[ids])
    assert torch.equal(embed.weight.detach(), expected)


def test_rows_of_fp16_wait_for_their_table() -> None:
    expected = table_after(torch.float16)
    model = llama(torch.float16)
    engine = wrapped(model, "rows")
    stepped(model, engine).step()
    ids = inputs(9)["input_ids"]
    assert torch.equal(model.get_input_embeddings()(ids), expected[ids])  # type: ignore[operator]
    assert by_rows(engine)
    assert engine.groups[0].pending is None or engine.groups[0].pending.done()


@pytest.mark.parametrize("deferred", [False, True])
def test_the_table_is_updated_after_all_others_and_its_moments_too(deferred: bool) -> None:
    model = llama(torch.bfloat16)
    engine = wrapped(model, "rows", deferred_moments=deferred)
    optimizer = stepped(model, engine)
    order: list[tuple[str, str]] = []
    recorder: Any = engine.device.recorder
    working = recorder.working

    def noted(lane: str, what: str, name: str) -> Any:
        order.append((what, name))
        return working(lane, what, name)

    recorder.working = noted
    optimizer.step()
    engine.flush()
    names = [group.name for group in engine.groups]
    assert [name for what, name in order if what == "update"] == [*names[1:], names[0]]
    later = [name for what, name in order if what == "moments"]
    assert later == (names[::-1] if deferred else [])


def test_a_tied_table_is_updated_early_enough_for_the_head() -> None:
    model = llama(torch.bfloat16, tie_word_embeddings=True)
    engine = wrapped(model, "rows", deferred_moments=True)
    optimizer = stepped(model, engine)
    order: list[tuple[str, str]] = []
    recorder: Any = engine.device.recorder
    working = recorder.working
    recorder.working = lambda lane, what, name: (
        order.append((what, name)) or working(lane, what, name)  # type: ignore[func-returns-value]
    )
    optimizer.step()
    engine.flush()
    table, *others = [group.name for group in engine.groups]
    updated = [name for what, name in order if what == "update"]
    assert updated == [*others[:3], table, *others[3:]]
    assert [name for what, name in order if what == "moments"] == [*others[::-1], table]


def test_rows_of_a_tied_table_have_their_new_weights_before_any_update_was_made() -> None:
    plain = llama(torch.bfloat16, tie_word_embeddings=True)
    engine = wrapped(plain, "whole")
    stepped(plain, engine).step()
    ids = inputs(9)["input_ids"]
    expected = plain.get_input_embeddings()(ids)  # type: ignore[operator]
    model = llama(torch.bfloat16, tie_word_embeddings=True)
    engine = wrapped(model, "rows")
    optimizer = stepped(model, engine)
    with Held(engine):
        optimizer.step()
        found = model.get_input_embeddings()(ids)  # type: ignore[operator]
        assert engine.groups[0].under_way
    assert torch.equal(found, expected)


@pytest.mark.parametrize("deferred", [False, True])
def test_rows_have_both_of_two_steps_without_a_forward_between(deferred: bool) -> None:
    ids, found = inputs(1)["input_ids"], []
    for embedding in ("whole", "rows"):
        model = llama(torch.bfloat16)
        engine = wrapped(model, embedding, deferred_moments=deferred)
        optimizer = stepped(model, engine)
        with Held(engine) as held:
            optimizer.step()
            threading.Timer(0.2, held.__exit__).start()
            optimizer.step()  # waits where a slot is to be filled anew that the first step fills
            found.append(model.get_input_embeddings()(ids).detach().clone())  # type: ignore[operator]
        engine.flush()
        found.append(model.get_input_embeddings()(ids).detach().clone())  # type: ignore[operator]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_step_that_is_refused_is_refused_in_the_forward() -> None:
    model = llama(torch.bfloat16)
    engine = wrapped(model, "rows")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model(**inputs(0)).loss * float("nan")
    loss.backward()
    engine.clip_grad_norm(0.5)
    optimizer.step()
    with pytest.raises(Diverged):
        model(**inputs(1))
    assert by_rows(engine)


def test_whoever_reads_the_table_itself_waits_for_it() -> None:
    expected = table_after(torch.bfloat16)
    model = llama(torch.bfloat16)
    engine = wrapped(model, "rows")
    stepped(model, engine).step()
    model(**inputs(9))
    assert torch.equal(model.get_input_embeddings().weight.detach(), expected)  # type: ignore[operator]
    fluxtrain.sync(model)


def test_an_update_that_was_waited_for_keeps_no_gradients_alive() -> None:
    """The table may move to the device then, where nobody asks for rows any more."""
    model = llama(torch.bfloat16)
    engine = wrapped(model, "rows")
    optimizer = stepped(model, engine)
    gradients = weakref.ref(engine.groups[0].trained[0].gradient)
    optimizer.step()
    optimizer.zero_grad()
    engine.flush()
    engine.groups[0].give_up_gradient_memory()
    gc.collect()
    assert gradients() is None


@pytest.mark.parametrize("tied", [False, True])
def test_a_training_keeps_its_bits(tied: bool) -> None:
    equal(
        trained(llama(tie_word_embeddings=tied), "whole"),
        trained(llama(tie_word_embeddings=tied), "rows"),
    )
