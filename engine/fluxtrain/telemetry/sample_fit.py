"""How many samples of the data fit into rows, and what becomes of the others."""

from __future__ import annotations

import msgspec


class SampleFit(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over samples: texts, or answers with what stands before them."""

    samples: int
    longer: int  # than a row
    cut: int  # of these: conversations of which only the beginning is learnt
    divided: int  # of these: texts that are in several rows
    left_out: int  # nothing to learn is within a row
