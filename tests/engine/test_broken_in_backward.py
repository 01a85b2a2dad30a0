"""A run that updates in its backward pass names the block in which numbers were broken first."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from fluxtrain.config.schema import load_config
from fluxtrain.errors import Diverged
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.loop import TrainingLoop
from fluxtrain.train.run import train


@pytest.mark.parametrize("depth", [1, 3])  # 1: the pass waits for updates under it
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("where", ["output", "gradient"])
@pytest.mark.thinned(4)
def test_the_block_where_it_began_and_the_last_checkpoint_are_named(
    run_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    where: str, layer: int, depth: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("fluxtrain.core.gradients.host_gradients.ring_depth", lambda _: depth)
    compute, forward, step = TrainingLoop._compute, LlamaMLP.forward, 0

    def computed(loop: Any, clock: Any) -> Any:
        nonlocal step
        step = loop._step_number + 1
        loop._model.model.layers[layer].mlp.is_broken = True
        return compute(loop, clock)  # type: ignore[no-untyped-call]

    def spoilt(module: LlamaMLP, values: Tensor) -> Tensor:
        output: Tensor = forward(module, values)
        if step == 3 and getattr(module, "is_broken", False):
            if where == "output":
                return output * math.nan
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * math.nan)
        return output

    monkeypatch.setattr(TrainingLoop, "_compute", computed)
    monkeypatch.setattr(LlamaMLP, "forward", spoilt)
    config = run_config(train__max_grad_norm=None, train__checkpoint_every=1)
    made = load_config(config, [])
    words = rf"first in the {where} of model\.layers\.{layer}: .* checkpoint is .* \(step 2\)"
    with pytest.raises(Diverged, match=words):
        train(made, locate(None, tmp_path / "run", made))
