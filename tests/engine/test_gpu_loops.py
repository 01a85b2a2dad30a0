"""What the GPU's tests train with follows the trainer's loop: here it runs on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.loops import STREAMED, Training


@pytest.mark.parametrize("more", [{}, {"max_grad_norm": None}, {"accumulation": 2}], ids=str)
def test_the_loop_of_the_gpu_tests_runs(more: dict[str, Any]) -> None:
    told = Training(3, device="cpu", **{**STREAMED, **more}).run()
    assert [step.step for step in told] == [1, 2, 3]
    assert told[-1].loss < told[0].loss
