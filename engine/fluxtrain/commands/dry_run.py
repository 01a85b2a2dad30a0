"""`fluxtrain dry-run`: train a few real steps and compare them with the plan's prediction.

The trainer runs in a temporary run directory: it reads the weights, takes the batch size of the
run, and updates. No checkpoint is written, nothing is evaluated and no model is saved.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from fluxtrain.commands.options import DRY_STEPS
from fluxtrain.commands.processes import is_follower, launched
from fluxtrain.config.cadence import Cadence
from fluxtrain.config.choices import choose_schedule
from fluxtrain.config.schema import RunConfig, validate
from fluxtrain.errors import EXIT_INTERRUPTED, Interrupted
from fluxtrain.events.answers.answers import DryRunAnswer, PeakBytes, RunSeconds, StepSeconds
from fluxtrain.events.events import AnyEvent, PhaseChanged, Planned, StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.atomic import read_json
from fluxtrain.files.temporary import temporary_folder
from fluxtrain.machine.machine import read_machine
from fluxtrain.methods.method import usual_rate
from fluxtrain.plan.guard import UNKNOWN_DISK, DiskCapacity
from fluxtrain.train.checkpoint.recovery import Target
from fluxtrain.train.checkpoint.writer import CheckpointWriter
from fluxtrain.train.ranks import ComputingRun, FollowingRun, train_as_rank
from fluxtrain.train.run import Run, train
from fluxtrain.train.sharded_run import ShardedRun
from fluxtrain.units import duration_text

if TYPE_CHECKING:
    from fluxtrain.methods.engine import TrainingEngine
    from fluxtrain.methods.objective import BoundTask, Cursor
    from fluxtrain.methods.optimizer import Optimizer
    from fluxtrain.train.checkpoint.run_state import RunState
    from fluxtrain.train.session import Session

_LEFT_NOTHING = "the dry run was stopped and left nothing"


class NoCheckpoints(CheckpointWriter):
    """A checkpoint writer that never writes."""

    def is_due(self, step: int) -> bool:
        """Return False always."""
        return False

    def write(self, state: RunState, engine: TrainingEngine, data: Cursor) -> NoReturn:
        """Raise Interrupted: a stop asks for a checkpoint, and a dry run leaves nothing behind."""
        raise Interrupted(_LEFT_NOTHING, EXIT_INTERRUPTED)


class DryRun(Run):
    """A run without checkpoints, evaluations and an exported model."""

    keeps_checkpoints = False

    @staticmethod
    def files(session: Session) -> DiskCapacity:
        """Name no disk to check, as no files are kept."""
        return UNKNOWN_DISK

    def make_checkpoint_writer(self, optimizer: Optimizer) -> CheckpointWriter:
        """Make a writer that writes no checkpoint."""
        return NoCheckpoints(
            self._session.run_dir.checkpoints,
            Cadence(every="end", total_steps=1, share=1.0),
            1,
            self._session.announcer,
            {},
            optimizer,
        )

    def _bind(self, rows: int) -> BoundTask[Any]:
        """Bind the task without held-out batches: nothing is evaluated."""
        return replace(super()._bind(rows), held_out=lambda: ())

    def finish(self) -> None:
        """Keep only the measurements."""
        self.measure()
        self._session.measured["steps_per_epoch"] = self._task.data.steps_per_epoch


class ShardedDryRun(DryRun, ShardedRun):
    """The dry run of rank 0 of a sharded model."""

    def train(self) -> None:
        """Make the steps; nothing is gathered to be saved."""
        Run.train(self)


class FollowingDryRun(FollowingRun, ShardedDryRun):
    """The dry run of another rank."""


class ComputingDryRun(ComputingRun, DryRun):
    """The dry run of another rank, which shares memory with rank 0."""


def dry_run(config: RunConfig, steps: int = DRY_STEPS) -> DryRunAnswer | None:
    """Train so many steps (two at least) as `config` says and compare; progress goes to standard
    error.

    Return None in a rank that keeps no records.

    Raises:
        FluxTrainError: as the run itself would in its first steps.
    """
    host_limit_bytes = read_machine().memory_available_bytes
    started_s = time.monotonic()
    with temporary_folder("dry-run", "the records of a dry run") as folder:
        run = RunDir(folder / "run")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                _train(_shortened(config, steps), Target(run_dir=run, resumes=False))
        except Interrupted as stopped:  # its message names the folder, which is deleted now
            raise Interrupted(_LEFT_NOTHING, stopped.exit_code) from None
        if is_follower():
            return None
        events = list(read_events(run.journal))
        ending = read_json(run.result) or {}
    schedule = choose_schedule(
        config.train,
        steps_per_epoch=ending["steps_per_epoch"],
        usual_rate=usual_rate(config),
    )
    return compared(
        events,
        ending,
        total_steps=schedule.total_steps,
        host_limit_bytes=host_limit_bytes,
        seconds=time.monotonic() - started_s,
    )


def _train(config: RunConfig, target: Target) -> None:
    kinds: tuple[type[DryRun], type[DryRun]] = (DryRun, ComputingDryRun)
    if config.is_sharded:
        kinds = (ShardedDryRun, FollowingDryRun)
    if launched():
        train_as_rank(config, lambda: target, contextlib.nullcontext, kinds=kinds)
    else:
        train(config, target, kind=kinds[0])


def compared(
    events: list[AnyEvent],
    ending: Mapping[str, Any],
    *,
    total_steps: int,
    host_limit_bytes: int | None,
    seconds: float,
) -> DryRunAnswer:
    """Compare the measured values with the predictions of the run's own plan.

    The first step also warms up caches and kernels. So the seconds of a step are the median of the
    other steps, and those of the run lie between the fastest and the slowest of them.
    """
    steps = [event for event in events if isinstance(event, StepFinished)]
    later_s = [step.step_s for step in steps[1:]]
    planned = next(event for event in events if isinstance(event, Planned))
    step_s = planned.step_s
    return DryRunAnswer(
        steps=len(steps),
        total_steps=total_steps,
        loading_s=_loading_s(events),
        steps_s=tuple(step.step_s for step in steps),
        losses=tuple(step.loss for step in steps),
        step_s=StepSeconds(predicted=step_s, measured=statistics.median(later_s)),
        eta_s=RunSeconds(
            predicted=None if step_s is None else step_s * total_steps,
            low=min(later_s) * total_steps,
            high=max(later_s) * total_steps,
        ),
        device_bytes=PeakBytes(
            predicted=ending.get("predicted_device_peak_bytes"),
            measured=ending.get("measured_device_peak_bytes"),
            limit=planned.device_budget_bytes,
        ),
        host_bytes=PeakBytes(
            predicted=ending.get("predicted_host_peak_bytes"),
            measured=ending.get("measured_host_peak_bytes"),
            limit=host_limit_bytes,
        ),
        seconds=seconds,
    )


def table(found: DryRunAnswer) -> str:
    """Format the answer of a dry run for people."""
    lines = [f"{'':<16} {'predicted':>12} {'measured':>12}"]
    lines += [f"{row.name:<16} {row.predicted:>12} {row.measured:>12}" for row in found.rows()]
    lines.append(f"{found.eta_text()} (predicted {duration_text(found.eta_s.predicted)})")
    lines.append(f"loading took {duration_text(found.loading_s)}; nothing was kept")
    return "\n".join(lines)


def _shortened(config: RunConfig, steps: int) -> RunConfig:
    """Return the configuration with so many steps and nothing between them."""
    raw = config.model_dump(mode="json")
    raw["train"] |= {
        "steps": steps, "warmup_steps": steps, "evaluate_every": "end", "checkpoint_every": "end",
        "final_model": "last", "early_stopping_patience": None,
    }  # fmt: skip
    raw["samples"]["prompts"], raw["trackers"]["report_to"] = [], []
    return validate(raw, "the dry run")


def _loading_s(events: list[AnyEvent]) -> float | None:
    """Return the seconds from the first event to the start of training."""
    begun = [
        event.t_s
        for event in events
        if isinstance(event, PhaseChanged) and event.phase == "training"
    ]
    return begun[0] - events[0].t_s if begun else None
