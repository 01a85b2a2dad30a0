"""Telling transformers what is packed gives the mask that it would find by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fluxtrain.models.known_packing import known_packing

PACKED = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
WHOLE = torch.arange(6).expand(2, 6)


@pytest.mark.parametrize("positions", [PACKED, WHOLE], ids=["packed", "whole"])
def test_the_logits_are_those_of_transformers_own_search(tiny: Any, positions: Any) -> None:
    model = tiny("llama").eval()
    ids = torch.arange(12).view(2, 6)
    asked = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        expected = model(**asked).logits
        with known_packing(mixes=positions is PACKED):
            told = model(**asked).logits
        if positions is PACKED:
            with known_packing(mixes=False):
                assert not torch.equal(model(**asked).logits, expected)
    assert torch.equal(told, expected)
