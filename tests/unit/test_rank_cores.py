"""The cores of each rank: neighbours share a NUMA node, and users may say otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.core.ranks.cores import cores_of, numa_nodes, share_of_rank, threads_of
from fluxtrain.errors import BadInput

TWO_NODES = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


def test_ranks_have_even_shares_of_their_nodes() -> None:
    shares = [cores_of(rank, 4, TWO_NODES, set(range(16))) for rank in range(4)]
    assert shares == [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]]
    three = [cores_of(rank, 3, TWO_NODES, set(range(16))) for rank in range(3)]
    assert not set(three[0]) & set(three[1]) and set(three[2]) == set(TWO_NODES[1])


def test_cores_that_may_not_be_used_are_left_out() -> None:
    assert cores_of(1, 2, TWO_NODES, {0, 1, 2, 3}) == [2, 3]
    assert cores_of(3, 4, [[0, 1]], {0, 1}) == [0, 1], "too few for each: all share them"


def test_variables_say_threads_and_nodes(tmp_path: Path) -> None:
    assert threads_of(16, {}) == 16
    assert threads_of(16, {"CONTROLLER_CORES_PER_RANK": "4"}) == 12
    assert threads_of(16, {"CONTROLLER_CORES_PER_RANK": "4", "THREADS_PER_RANK": "9"}) == 9
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{4 * node}-{4 * node + 3}\n")
    assert numa_nodes({}, tmp_path) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert numa_nodes({"CPU_LIST_NODE1": "4 6,8-9"}, tmp_path)[1] == [4, 6, 8, 9]
    assert share_of_rank({}) == 0


def test_odd_variables_are_refused_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="THREADS_PER_RANK is 'many': use a whole number"):
        threads_of(16, {"THREADS_PER_RANK": "many"})
    with pytest.raises(BadInput, match="CPU_LIST_NODE0 is 'a-b': use a list such as"):
        numa_nodes({"CPU_LIST_NODE0": "a-b"}, tmp_path)
