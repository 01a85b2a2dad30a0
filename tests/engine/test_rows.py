"""An embedding by rows gives what the whole of it gives, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
        {"deferred_moments": True},
        {"activations": "host"},
        {"offload": "max"},
        {"offload": "optimizer"},
        {"overlap": False},
        {"device_groups": 0, "resident_blocks": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.thinned(6)
def test_rows_give_the_bits_of_the_whole_table(
    dtype: torch.dtype, tied: bool, options: dict[str, Any]
) -> None:
    whole, rows = (
        trained(llama(dtype, tie_word_embeddings=tied, pad_token_id=7), embedding, **options)
        for embedding in ("whole", "rows")
    )
    equal(whole, rows)


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
