"""What optimizer states and precisions do to a training: the demo, once a choice and seed.

    python bench/bench_states.py --steps 400 --seeds 2 --out DIR [--device cuda] [--dtypes bfloat16]

Every run is `fluxtrain train --demo` in a process of its own; all but the choice and the seed is
equal. Optimizers of other packages (`train.optimizer`) take part where they can be imported; they
have no fp32 masters beside weights in fp16 and bf16. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from children import Stopped, run_python, stoppable

from fluxtrain.core.optimizer.third_party import THIRD_PARTY
from fluxtrain.events.events import StepFinished
from fluxtrain.events.journal import read_events

FORMATS = ("fp32", "bf16", "8bit")
HALF = "float16"  # its fp32 masters are FluxTrain's own: no other optimizer takes it
LAST_STEPS = 20


@dataclass(frozen=True)
class Case:
    """One row: which optimizer keeps its states how, beside weights of which dtype."""

    dtype: str
    states: str  # a format of our own, or the name of another optimizer

    @property
    def settings(self) -> list[str]:
        """What a run of it sets."""
        dtype = f"model.dtype={self.dtype}"
        if self.states in FORMATS:
            return [dtype, f"train.states={self.states}"]
        return [dtype, f"train.optimizer={self.states}", "placement.offload=none"]


@dataclass(frozen=True)
class Outcome:
    """How one run ended: nats a token."""

    losses: list[float]
    held_out: float

    @property
    def last(self) -> float:
        """Mean of the last steps: one batch's loss is noise."""
        return statistics.mean(self.losses[-LAST_STEPS:])


def cases(dtypes: list[str], device: str) -> list[Case]:
    """Every choice that can be made here; the first is what the others are compared with."""
    others = [
        name
        for name, outside in THIRD_PARTY.items()
        if importlib.util.find_spec(outside.package) is not None
        and not (outside.needs_gpu and device == "cpu")
    ]
    found = [Case("float32", "fp32")]
    for dtype in dtypes:
        found += [Case(dtype, name) for name in (*FORMATS, *(() if dtype == HALF else others))]
    return list(dict.fromkeys(found))


def outcome(case: Case, seed: int, options: argparse.Namespace) -> Outcome:
    """Train in a process of its own and read what its run directory says."""
    run_dir = options.out / f"{case.dtype}-{case.states}-{seed}"
    if not (run_dir / "result.json").exists():
        set_all = [f"train.seed={seed}", f"data.seed={seed}", *case.settings, *options.set]
        command = [
            "-m", "fluxtrain", "train", "--demo", "--run-dir", str(run_dir),
            "--steps", str(options.steps), "--device", options.device,
            *(part for setting in set_all for part in ("--set", setting)),
        ]  # fmt: skip
        code = run_python(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
        if code:
            sys.exit(f"a training ended with {code}: {' '.join(command)}")
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
    parser.add_argument("--out", type=Path, required=True, help="finished runs in it are kept")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", HALF])
    parser.add_argument("--set", nargs="*", default=[], help="settings for every run")
    options = parser.parse_args()
    print(f"{options.steps} steps of the demo, {options.seeds} seeds, {options.device}\n")
    print("| weights | states | training loss, last 20 steps | held-out loss | against fp32 |")
    print("|---|---|---|---|---|", flush=True)
    base: list[Outcome] = []
    for case in cases(options.dtypes, options.device):
        with stoppable():
            runs = [outcome(case, seed, options) for seed in range(options.seeds)]
        base = base or runs
        apart = [run.held_out - other.held_out for run, other in zip(runs, base, strict=True)]
        print(
            f"| {case.dtype} | {case.states} | {' / '.join(f'{run.last:.4f}' for run in runs)} "
            f"| {' / '.join(f'{run.held_out:.4f}' for run in runs)} "
            f"| {' / '.join(f'{difference:+.4f}' for difference in apart)} |",
            flush=True,
        )


if __name__ == "__main__":
    try:
        main()
    except Stopped as error:
        sys.exit(error.exit_code)
