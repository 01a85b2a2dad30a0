"""Image runs killed with SIGKILL: the next start loses nothing and encodes nothing twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.events import events as ev
from fluxtrain.train.checkpoint.checkpoint import list_checkpoints
from tests.engine.forked import LIMIT_S, running
from tests.engine.images import PAIRS, Images
from tests.engine.runs import of, run, told

Image = pytest.importorskip("PIL.Image")

ENCODED = 2 * PAIRS + 5  # the pictures; four prompts and the empty one


def losses_by_step(events: list[Any]) -> dict[int, float]:
    return {event.step: event.loss for event in of(ev.StepFinished, events)}


def samples_in(run_dir: Path) -> dict[str, bytes]:
    found = {}
    for path in (run_dir / "samples").glob("*.png"):
        with Image.open(path) as picture:  # whole, or not there at all
            found[path.name] = picture.convert("RGB").tobytes()
    return found


def is_encoding(run_dir: Path, cache: Path) -> bool:
    return len(list(cache.rglob("*.safetensors"))) >= 7


def is_training(run_dir: Path, cache: Path) -> bool:
    return (run_dir / "checkpoints" / "step-00000003").is_dir() and any(
        step.step == 5 for step in told(run_dir, ev.StepFinished)
    )


def is_sampling(run_dir: Path, cache: Path) -> bool:
    made = run_dir / "samples"
    first, second = (made / f"step-00000004-{number}.png" for number in (1, 2))
    return first.exists() and not second.exists()


@pytest.mark.slow
@pytest.mark.parametrize("reached", [is_encoding, is_training, is_sampling])
def test_a_killed_run_loses_nothing_and_encodes_nothing_twice(
    images: Images, tmp_path: Path, reached: Callable[[Path, Path], bool]
) -> None:
    cache, killed = tmp_path / "cache", tmp_path / "killed"
    settings: dict[str, Any] = {
        "data__held_out": 0.2, "image__samples": 2, "image__sample_steps": 12,
        "samples__every": 4, "train__checkpoint_every": 3, "train__steps": 8,
    }  # fmt: skip
    whole = run(images.config(tmp_path, **settings), tmp_path / "whole")
    config = images.config(tmp_path, **settings, image__cache=str(cache))
    with running(run, config, killed) as process:
        deadline_s = time.monotonic() + LIMIT_S
        while not reached(killed, cache):
            assert process.is_alive() and time.monotonic() < deadline_s
            time.sleep(0.002)
        process.kill()
        process.join()
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    saved = list_checkpoints(killed / "checkpoints")
    again = str(killed) if saved else None
    place = killed if saved else tmp_path / "again"
    events = run(config, place, resume=again)
    assert losses_by_step(events) == losses_by_step(whole)
    assert samples_in(place) == samples_in(tmp_path / "whole") != {}
    after = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    assert {path: after[path] for path in before} == before
    assert len(after) == ENCODED and (len(before) < ENCODED) == (reached is is_encoding)
