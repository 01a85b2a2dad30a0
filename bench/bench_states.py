"""What the format of optimizer states does to a training: the demo, once a format and seed.

    python bench/bench_states.py --steps 400 --seeds 2 --out DIR

Every run is `fluxtrain train --demo` in a process of its own; all but `train.states` and the seed
is equal. Where bitsandbytes is installed, its 8-bit AdamW takes the place of the engine's optimizer
for comparison. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import fluxtrain.cli
from fluxtrain.telemetry.events import StepFinished
from fluxtrain.telemetry.journal import read_events

FORMATS = ("fp32", "bf16", "8bit")
THEIRS = "bitsandbytes"
LAST_STEPS = 20


@dataclass(frozen=True)
class Outcome:
    """How one run ended: nats a token."""

    losses: list[float]
    held_out: float

    @property
    def last(self) -> float:
        """Mean of the last steps: one batch's loss is noise."""
        return statistics.mean(self.losses[-LAST_STEPS:])


def train(states: str, arguments: list[str]) -> int:
    """In this process; bitsandbytes' optimizer stands in for torch's where it is asked for."""
    if states == THEIRS:
        import bitsandbytes

        # The engine takes over what torch.optim.AdamW is at its import.
        importlib.import_module("fluxtrain.stream.adoption")
        torch.optim.AdamW = bitsandbytes.optim.AdamW8bit  # type: ignore[misc]
    else:
        arguments = [*arguments, "--set", f"train.states={states}"]
    return int(fluxtrain.cli.main(["train", "--demo", *arguments]))


def outcome(states: str, seed: int, steps: int, out: Path, settings: list[str]) -> Outcome:
    """Train in a process of its own and read what its run directory says."""
    run_dir = out / f"{states}-{seed}"
    set_all = [f"train.seed={seed}", f"data.seed={seed}", *settings]
    sets = [part for setting in set_all for part in ("--set", setting)]
    command = [
        sys.executable, __file__, "--child", states, "--run-dir", str(run_dir),
        "--steps", str(steps), "--device", "cpu", *sets,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    events = read_events(run_dir / "events.ndjson")
    result = json.loads((run_dir / "result.json").read_text())
    return Outcome(
        losses=[event.loss for event in events if isinstance(event, StepFinished)],
        held_out=float(result["evaluation_loss"]),
    )


def main() -> None:
    """Parse the command line, train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="settings for every run")
    arguments = parser.parse_args()
    formats = [*FORMATS]
    if importlib.util.find_spec(THEIRS) is not None:
        formats.append(THEIRS)
    print(f"{arguments.steps} steps of the demo, {arguments.seeds} seeds\n")
    print("| states | training loss, last 20 steps | held-out loss | against fp32 |")
    print("|---|---|---|---|", flush=True)
    base: list[Outcome] = []
    for states in formats:
        runs = [
            outcome(states, seed, arguments.steps, arguments.out, arguments.set)
            for seed in range(arguments.seeds)
        ]
        base = base or runs
        apart = [run.held_out - other.held_out for run, other in zip(runs, base, strict=True)]
        print(
            f"| {states} | {' / '.join(f'{run.last:.4f}' for run in runs)} "
            f"| {' / '.join(f'{run.held_out:.4f}' for run in runs)} "
            f"| {' / '.join(f'{difference:+.4f}' for difference in apart)} |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(train(sys.argv[2], sys.argv[3:]))
    main()
