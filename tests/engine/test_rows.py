"""An embedding by rows gives what the whole of it gives, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.core.gradients.row_sum import Scatter
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.plan import depths
from tests.engine.placing_anew import turn_to
from tests.engine.row_models import (
    HIDDEN,
    VOCABULARY,
    equal,
    inputs,
    llama,
    trained,
    wrapped,
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"passes": 3},
        {"in_backward": True},
        {"states": "8bit"},
        {"states": "bf16"},
        {"activations": "host"},
        {"offload": "max"},
        {"offload": "optimizer"},
        {"overlap": False},
        {"device_groups": 0, "resident_blocks": 1},
    ],
    ids=str,
)
@pytest.mark.thinned(4)
def test_rows_give_the_bits_of_the_whole_table(options: dict[str, Any]) -> None:
    equal(trained(llama(), "whole", **options), trained(llama(), "rows", **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"passes": 2},
        {"in_backward": True},
        {"states": "8bit"},
        {"deferred_moments": True},
        {"offload": "max"},
        {"offload": "optimizer"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.thinned(5)
def test_rows_of_a_tied_table_give_the_bits_of_the_whole(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    def tied() -> nn.Module:
        return llama(dtype, tie_word_embeddings=True, pad_token_id=7)

    equal(trained(tied(), "whole", **options), trained(tied(), "rows", **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("passes", [1, 2])
def test_rows_give_the_bits_of_the_whole_table_in_every_dtype(
    dtype: torch.dtype, passes: int
) -> None:
    whole = trained(llama(dtype), "whole", passes=passes)
    equal(whole, trained(llama(dtype), "rows", passes=passes))


def test_rows_give_the_bits_of_a_table_that_lives_on_the_device() -> None:
    there = trained(llama(), "whole", device_groups=1)
    equal(there, trained(llama(), "rows"))


def test_moving_the_table_to_the_device_and_back_keeps_the_bits() -> None:
    model = llama()
    engine = wrapped(model, "rows")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    told = []
    for step, device_groups in enumerate((0, 2, 0, 1)):
        turn_to(engine, device_groups=device_groups, resident_blocks=0, slots=3)
        rows = engine.groups[0].rows
        assert rows is not None
        if device_groups:
            assert not rows.device_bytes
        loss = model(**inputs(step)).loss
        loss.backward()
        told += [float(loss.detach()), engine.clip_grad_norm(0.5).value()]
        assert bool(rows.device_bytes) == (device_groups == 0)
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    assert told == trained(llama(), "whole")[0]


def test_a_resumed_run_goes_on_with_the_same_bits() -> None:
    whole = trained(llama(), "whole")
    first = llama()
    engine = wrapped(first, "rows")
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2, weight_decay=0.1)
    told = steps(first, optimizer, range(2))
    kept = [
        (name, {k: t.clone() for k, t in shard.items()}) for name, shard in engine.state_shards()
    ]
    second = llama()
    resumed = wrapped(second, "rows")
    for name, shard in kept:
        resumed.load_state_shard(name, shard)
    optimizer = torch.optim.AdamW(second.parameters(), lr=1e-2, weight_decay=0.1)
    assert told + steps(second, optimizer, range(2, 4)) == whole[0]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    told = []
    for step in numbers:
        loss = model(**inputs(step)).loss
        loss.backward()
        told += [float(loss.detach()), engine_of(model).clip_grad_norm(0.5).value()]
        optimizer.step()
        optimizer.zero_grad()
    return told


def test_rows_land_in_memory_that_the_heads_gradient_was_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(depths, "LARGE_GRADIENT_BYTES", 1)  # one buffer for both
    whole = trained(llama(), "whole", in_backward=True)
    equal(whole, trained(llama(), "rows", in_backward=True))


def test_memory_that_the_head_had_is_cleared_before_anybody_waits_for_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(depths, "LARGE_GRADIENT_BYTES", 1)
    done: list[str] = []
    zero, fill = Tensor.zero_, Scatter.fill

    def zeroed(tensor: Tensor) -> Tensor:
        if tensor.numel() == VOCABULARY * HIDDEN:
            done.append("cleared")
        return zero(tensor)

    def filled(*args: Any) -> None:
        done.append("filled")
        fill(*args)

    monkeypatch.setattr(Tensor, "zero_", zeroed)
    monkeypatch.setattr(Scatter, "fill", filled)
    trained(llama(), "rows", in_backward=True, steps=3)
    assert done == ["cleared", "filled"] * 3


def test_the_row_of_the_padding_gets_no_gradient() -> None:
    equal(trained(llama(pad_token_id=7), "whole"), result := trained(llama(pad_token_id=7), "rows"))
    gradient = result[1]["model.embed_tokens.weight"]
    assert not gradient[7].any()
    assert gradient.any()


def test_only_rows_cross_and_the_device_holds_no_whole_table() -> None:
    measured = {}
    for embedding in ("whole", "rows"):
        model = llama()
        engine = wrapped(model, embedding)
        up = []
        for step in range(3):
            before = engine.traffic().h2d_bytes
            model(**inputs(step)).loss.backward()
            up.append(engine.traffic().h2d_bytes - before)
            engine.forget_gradients()
        measured[embedding] = up[-1], engine.memory().device_by["weights"]
    table, most = VOCABULARY * HIDDEN * 2, 4 * 10 * HIDDEN * 2
    indices = (4 * 10 + 4 * 10) * 8
    assert measured["whole"][1] - measured["rows"][1] == table - most - indices
    assert measured["whole"][0] <= measured["rows"][0] <= measured["whole"][0] + most


def test_buffers_are_not_made_anew_once_they_hold_the_largest_batch() -> None:
    model = llama()
    engine = wrapped(model, "rows")
    rows = engine.groups[0].rows
    assert rows is not None
    for length in (3, 12):
        model(**inputs(0, length=length)).loss.backward()
        engine.forget_gradients()
    held = rows._on_device, rows._arenas, rows._landing
    assert rows.capacity == 4 * 12
    for step, length in enumerate((12, 5, 9)):
        model(**inputs(step, length=length)).loss.backward()
        engine.forget_gradients()
    assert (rows._on_device, rows._arenas, rows._landing) == held
    assert rows.host_bytes >= rows.device_bytes
