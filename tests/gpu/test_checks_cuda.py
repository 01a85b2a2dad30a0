"""Comparing what is computed again takes next to no memory of the GPU."""

from __future__ import annotations

import pytest
import torch

from fluxtrain.core.block.recompute import checksum

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_checksum_makes_no_copy(dtype: torch.dtype) -> None:
    results = torch.randn(64 << 20, device="cuda").to(dtype)
    expected = float(results.double().abs().sum())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = float(checksum([results]))
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    assert found == pytest.approx(expected, rel=1e-4)
