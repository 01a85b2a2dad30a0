"""One GPU and two, for tests that compute the same on either."""

from __future__ import annotations

import pytest
import torch

_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
NUMBERS_OF_CARDS = [1, pytest.param(2, marks=_TWO)]
