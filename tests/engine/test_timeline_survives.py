"""The timeline of a run that is killed, resumed, and read while it trains."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fluxtrain.cli import main
from fluxtrain.events.trace.export import recorded_steps, write_trace
from fluxtrain.events.trace.ring import RingReader, read_ring
from tests.engine import forked


def traced_steps(folder: Path, run: Path) -> list[int]:
    path = folder / "trace.json.gz"
    _, steps = recorded_steps(run)
    write_trace(path, steps, run.name)
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["args"]["step"] for event in events if event.get("cat") == "step"]


def test_a_run_that_is_killed_in_a_step_leaves_a_whole_trace_and_goes_on_in_the_same_ring(
    run_config: Callable[..., Path], tmp_path: Path, fluxtrain: Callable[..., Any]
) -> None:
    run, config = tmp_path / "run", run_config(train__steps=100_000, train__checkpoint_every=20)
    reader = RingReader(run / "timeline.ring")
    with forked.running(main, ["train", str(config), "--run-dir", str(run)]) as process:
        until_s = time.monotonic() + forked.LIMIT_S
        while len(reader.steps) < 10 and time.monotonic() < until_s and process.is_alive():
            reader.poll()
            time.sleep(0.01)
        seen = [one.head.step for one in reader.steps]
        process.kill()
    assert len(seen) >= 10
    assert seen == list(range(seen[0], seen[-1] + 1))  # read while it was written
    killed = traced_steps(tmp_path, run)
    assert killed[-1] >= seen[-1] and killed == list(range(killed[0], killed[-1] + 1))

    last = killed[-1] + 20
    resumed = fluxtrain("train", "--resume", run, "--steps", last)
    assert resumed.returncode == 0, resumed.stderr
    steps = read_ring(run / "timeline.ring")
    first, second = ([step.step for step in steps if step.process == n] for n in (1, 2))
    assert len(first) + len(second) == len(steps)
    assert second == list(range(second[0], last + 1))
    if first:  # the steps before the kill, but for those that were not written yet
        assert first == list(range(first[0], first[-1] + 1)) and first[-1] < second[0]
    assert traced_steps(tmp_path, run)[-1] == last
