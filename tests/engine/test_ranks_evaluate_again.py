"""An evaluation that is begun again in every rank, since memory ran out in one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fluxtrain
from fluxtrain.core.ranks.join import joined
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.plan.request import PlacementRequest
from fluxtrain.train.loop import TrainingLoop
from tests.engine.ranks import together
from tests.engine.test_ranks import rows_of, share
from tests.on_cards import llama

BLOCKS = 6


class Losses:
    """An objective that only measures."""

    def count(self, _: object) -> int:
        return 1

    def metrics(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        return {"loss": float(model(**batch).loss)}


def evaluated(depth: int, broken: int) -> list[float]:
    """The losses of an evaluation in which the last rank runs out of memory in a block, and of
    one more."""
    ranks = joined()
    request = PlacementRequest(offload="weights", prefetch=depth)
    with pytest.MonkeyPatch.context() as patch:
        share(patch, "shard")
        model = fluxtrain.wrap(llama(BLOCKS, dtype=torch.float32), device="cpu", placement=request)
    engine, left = engine_of(model), [1 if ranks.rank == 1 else 0]
    engine.retries_blocks, engine.exchange.agrees = False, True

    def run_out(*_: object) -> None:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    blocks: Any = model.model.layers
    blocks[broken].mlp.register_forward_pre_hook(run_out)
    loop: Any = SimpleNamespace(
        _objective=Losses(), _model=model, _stopping=lambda: False, _ranks=ranks, _engine=engine,
        _held_out=lambda: [rows_of(step, 0) for step in range(4)], _make_room=lambda *_: None,
    )  # fmt: skip
    loop._can_be_done_again = lambda error: TrainingLoop._can_be_done_again(loop, error)
    found = [TrainingLoop._evaluated_until_it_fits(loop) for _ in range(2)]
    return [one.loss for one in found if one is not None]


@pytest.mark.parametrize("depth", [2, 4])
def test_it_has_the_loss_of_one_that_was_not_broken_off(tmp_path: Path, depth: int) -> None:
    with torch.no_grad():
        model = llama(BLOCKS, dtype=torch.float32)
        every = [float(model(**rows_of(step, 0)).loss) for step in range(4)]
    for found in together(2, evaluated, tmp_path, depth, 4):
        assert found == pytest.approx([sum(every) / 4] * 2, rel=1e-6)
