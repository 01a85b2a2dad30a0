"""What the GPU's tests train with follows the trainer's loop: here it runs on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import loops
from tests.gpu.loops import STREAMED, Training


@pytest.mark.parametrize("more", [{}, {"max_grad_norm": None}, {"accumulation": 2}], ids=str)
def test_the_loop_of_the_gpu_tests_runs(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "WIDTH", 128)
    monkeypatch.setattr(loops, "LAYERS", 3)
    given = {**STREAMED, **more}
    # in bf16 it takes minutes on a processor without AVX-512
    told = Training(2, device="cpu", dtype=torch.float32, **given).run()
    assert [step.step for step in told] == [1, 2]
    assert told[-1].loss < told[0].loss
