"""Record the runs that the app's tests and pictures replay: `python bench/record_runs.py [NAME]`.

Real trainings of this machine, for a few minutes; let nothing else run beside them, or the pictures
show what a busy machine does. Journals and timelines are written to tests/tui/recorded/, which says
how each was made. `changed` is not among them: advice that proves wrong does not come at will. A
signal that ends this ends the training.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from children import Stopped, run_python, started_python, stoppable

from fluxtrain.events import events as ev
from fluxtrain.events.reader import JournalFollower
from fluxtrain.events.run_folder.own_files import SAMPLES
from fluxtrain.events.trace.ring import RingWriter, read_ring

RECORDED = Path(__file__).parents[1] / "tests" / "tui" / "recorded"
RUNS = Path("/tmp/fluxtrain/runs")
# Parts of a run's time after which tests and pictures look at its timeline; others keep all steps.
LOOKED_AT = {
    "demo": (0.66, 1.0), "diverged": (1.0,), "resumed": (1.0,), "blocks": (0.66, 1.0),
    "advised": (0.42, 0.62), "killed": (), "images": (), "spilled": (1.0,), "processes": (1.0,),
}  # fmt: skip
BEFORE, AFTER = 7, 2  # steps that are kept around such a moment
LIMIT_S = 300.0
EVERY_20 = ("--set", "train.checkpoint_every=20", "--set", "train.evaluate_every=20")
STREAMED = ("--set", "placement.offload=weights")


def arguments(*words: str, folder: Path) -> list[str]:
    """Of Python: a command on a run in `folder`."""
    return ["-m", "fluxtrain", *words, "--run-dir", str(folder)]


def train(*settings: str, folder: Path) -> None:
    """To its end, whatever its exit code is. Raises TimeoutExpired after five minutes."""
    command = arguments("train", *settings, folder=folder)
    run_python(command, stdout=subprocess.DEVNULL, limit_s=LIMIT_S)


def events_of(folder: Path) -> list[ev.AnyEvent]:
    """What the run wrote so far."""
    journal = folder / "events.ndjson"
    return JournalFollower(journal).read_all() if journal.exists() else []


def wait_for(folder: Path, seen: Callable[[ev.AnyEvent], bool]) -> None:
    """Until the journal has such an event. Raises TimeoutError after five minutes."""
    end_s = time.monotonic() + LIMIT_S
    while not any(map(seen, events_of(folder))):
        if time.monotonic() > end_s:
            raise TimeoutError(f"{folder} did not come to what was waited for")
        time.sleep(0.05)


def step_done(step: int) -> Callable[[ev.AnyEvent], bool]:
    """Whether an event tells that this step, or a later one, is done."""
    return lambda event: isinstance(event, ev.StepFinished) and event.step >= step


def keep(run: Path, name: str) -> None:
    """Write what is replayed of a run to the recorded ones."""
    folder = RECORDED / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(run / "events.ndjson", folder / "events.ndjson")
    if (run / SAMPLES).is_dir():
        shutil.copytree(run / SAMPLES, folder / SAMPLES)
    events, wanted = events_of(folder), set[int]()
    began_s, lasted_s = events[0].wall_s, events[-1].wall_s - events[0].wall_s
    for share in LOOKED_AT.get(name, ()):
        until_s = began_s + share * lasted_s
        done = [
            one.step for one in events if isinstance(one, ev.StepFinished) and one.wall_s <= until_s
        ]
        wanted |= set(range(done[-1] - BEFORE, done[-1] + AFTER + 1))
    steps = [
        one
        for one in read_ring(run / "timeline.ring")
        if name not in LOOKED_AT or one.step in wanted
    ]
    if steps:
        writer = RingWriter(folder / "timeline.ring")
        for step in steps:
            writer.write(step)
        writer.close()
    print(name)


def record(name: str, *settings: str) -> None:
    """A demo training to its end."""
    train("--demo", *settings, folder=RUNS / name)


def killed_and_resumed() -> None:
    """`killed` ends in step 28 by `kill -9`; `resumed` goes on with it to its end."""
    settings = ("--demo", "--steps", "60", "--set", "train.checkpoint_every=10")
    folder = RUNS / "resumed"
    command = arguments("train", *settings, folder=folder)
    with started_python(command, stdout=subprocess.DEVNULL) as process:
        wait_for(folder, step_done(27))
        process.send_signal(signal.SIGKILL)
        process.wait()
    keep(folder, "killed")
    train(*settings, "--resume", "auto", folder=folder)


def advised() -> None:
    """Advice is applied as soon as it comes, and measured; then a change is asked for."""
    folder = RUNS / "advised"
    command = arguments(
        "train", "--demo", "--steps", "150", "--set", "train.batch_rows=8",
        "--set", "data.sequence_length=64", "--set", "placement.chunk_rows=2",
        "--set", "train.evaluate_every=end", folder=folder,
    )  # fmt: skip
    with started_python(command, stdout=subprocess.DEVNULL) as process:
        wait_for(folder, lambda event: isinstance(event, ev.AdviceGiven) and event.id == "chunk")
        apply(folder, "advice=chunk")
        wait_for(folder, lambda event: isinstance(event, ev.ChangeMeasured))
        apply(folder, "resident_blocks=6")
        process.wait(LIMIT_S)


def apply(folder: Path, change: str) -> None:
    """Ask the running trainer for a change. Raises CalledProcessError where it is refused."""
    command = ["-m", "fluxtrain", "apply", str(folder), change]
    code = run_python(command, stdout=sys.stdout, limit_s=LIMIT_S)
    if code:
        raise subprocess.CalledProcessError(code, command)


RECORDINGS: dict[str, Callable[[], None]] = {
    "demo": lambda: record("demo", "--steps", "300"),
    "killed": killed_and_resumed,
    "diverged": lambda: record(
        "diverged", "--steps", "60", "--set", "train.learning_rate=1e6",
        "--set", "train.max_grad_norm=null",
    ),
    "streamed": lambda: record(
        "streamed", "--steps", "40", *STREAMED, *EVERY_20, "--set", "train.batch_rows=1",
        "--set", "data.sequence_length=32",
    ),
    "advised": advised,
    "images": lambda: record("images", "image-edit"),
    "blocks": lambda: record("blocks", "--steps", "60", *STREAMED, *EVERY_20),
    "spilled": lambda: record(
        "spilled", "--steps", "24", "--set", "placement.disk=on",
        "--set", "placement.host_gib=0.09",
    ),
    "processes": lambda: record(
        "processes", "--steps", "24", "--set", "parallel.processes=2", "--set", "parallel.cards=2",
    ),
}  # fmt: skip


def main() -> None:
    """Record those named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECORDINGS))
    names = parser.parse_args().names or list(RECORDINGS)
    if os.getloadavg()[0] > 0.5:
        print(f"other programs run beside this: load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    try:
        with stoppable():
            for name in names:
                shutil.rmtree(RUNS, ignore_errors=True)
                RUNS.mkdir(parents=True)
                RECORDINGS[name]()
                for run in sorted(RUNS.iterdir()):
                    keep(run, run.name)
            shutil.rmtree(RUNS)
    except Stopped as error:
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
