"""Ranks for the tests of this folder: processes cost seconds to start, so they are shared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.rank_pool import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks of a gloo group."""
    pool = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks of a gloo group, for slow tests."""
    pool = Ranks(4, tmp_path_factory.mktemp("four-ranks"))
    yield pool
    pool.close()
