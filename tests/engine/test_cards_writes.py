"""Tensors that are written to in place while several cards compute."""

from __future__ import annotations

import pytest

from tests.written_arguments import MODES, what_is_written_reaches_other_cards


@pytest.mark.parametrize("chunk_rows", [8, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inside", [True, False], ids=["in blocks", "between them"])
@pytest.mark.thinned(6)
def test_what_is_written_to_an_argument_reaches_the_blocks_of_other_cards(
    inside: bool, mode: str, chunk_rows: int
) -> None:
    what_is_written_reaches_other_cards(inside=inside, mode=mode, chunk_rows=chunk_rows)
