"""The answer of `fluxtrain compare`."""

from __future__ import annotations

import msgspec


class ComparedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that differ in their seeds alone: means over them, and changes against the base."""

    method: str
    ranks: int
    seeds: int
    tokens_per_s: float | None
    step_ms: float | None
    comm_share: float | None  # of a step
    exposed_ms: float | None
    compression: float | None  # times fewer bytes than bf16
    val_ppl: float | None
    val_ppl_spread: float | None  # standard deviation over seeds
    ppl_change: float | None  # against bf16 on as many ranks, as a share
    speed_change: float | None
    scaling: float | None  # tokens a second, against as many times those of one rank
    timing_valid: bool
