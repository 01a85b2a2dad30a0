"""What follows from the end of a trainer: pure decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fluxtrain import errors
from fluxtrain.serve.backend import End
from fluxtrain.units import bytes_text

# How often an end is tried again while no new step was made, and the first pause, which doubles.
TRIES = {
    "memory": (1, 5.0),
    "card": (1, 0.0),
    "read": (3, 10.0),
    "bug": (1, 2.0),
    "crash": (5, 1.0),
}
KINDS = {
    errors.EXIT_DOES_NOT_FIT: "memory",
    errors.EXIT_DEVICE_FAILED: "card",
    errors.EXIT_READ_FAILED: "read",
    errors.EXIT_BUG: "bug",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows from an end."""

    status: Literal["succeeded", "failed", "cancelled", "queued"]
    because: str = ""
    again_s: float = 0.0  # from now, of a queued job
    tries: Mapping[str, Any] | None = None
    leaves_card: bool = False


def judge(end: End, wanted: str, tries: Mapping[str, Any], step: int | None) -> Verdict:
    """Decide what follows from the end of a trainer.

    Args:
        end: how it ended.
        wanted: of the job: run, pause, cancel.
        tries: the counts of earlier ends by kind, since the last one with a new `step`.
        step: the newest that the run has made.
    """
    if end.code == errors.EXIT_FINISHED:
        return Verdict(status="succeeded")
    if wanted == "cancel" or end.stopped_by_app:
        return Verdict(status="cancelled")
    if wanted == "pause":
        return Verdict(status="queued", because="paused")
    if end.code in (errors.EXIT_INTERRUPTED, errors.EXIT_TERMINATED):
        return Verdict(status="queued", because="its trainer was stopped from outside")
    for_good = (errors.EXIT_BAD_INPUT, errors.EXIT_DIVERGED, errors.EXIT_DISAGREES)
    if end.code in for_good or (end.code == errors.EXIT_DOES_NOT_FIT and end.refused):
        return Verdict(status="failed", because=end.message)
    if end.code == errors.EXIT_NO_SPACE:
        return _when_there_is_space(end)
    return _another_try(end, dict(tries) if tries.get("step") == step else {"step": step})


def _when_there_is_space(end: End) -> Verdict:
    if end.free_bytes is not None and end.free_bytes < end.needed_bytes:
        lacks = f"{bytes_text(end.needed_bytes)} needed, {bytes_text(end.free_bytes)} free"
        return Verdict(status="queued", because=f"waits for disk space: {lacks}", again_s=30.0)
    return Verdict(status="queued", because="the disk was full", again_s=5.0)


def _another_try(end: End, made: dict[str, Any]) -> Verdict:
    """Try again as often as `TRIES` says for the kind of end; `made` counts the tries so far."""
    kind = "crash" if end.code is None else KINDS.get(end.code, "crash")
    made[kind] = made.get(kind, 0) + 1
    most, pause_s = TRIES[kind]
    because = end.message or "its trainer was killed"
    if made[kind] > most:
        return Verdict(status="failed", because=f"{because} (after {made[kind]} tries)")
    again_s = pause_s * 2.0 ** (made[kind] - 1)
    return Verdict(
        status="queued", because=because, again_s=again_s, tries=made, leaves_card=kind == "card"
    )
