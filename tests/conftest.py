"""What every test starts from: one OpenMP thread, no hurry for hypothesis, no GPU pretended."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Before torch is imported. Test processes that each use every core only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared or slow machine is no failure; a failing example is printed so that it can be run again.
settings.register_profile("fluxtrain", deadline=None, print_blob=True)
settings.load_profile("fluxtrain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a GPU, with the reason, where torch can use none."""
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if not needy:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="torch can use no NVIDIA GPU here"))
