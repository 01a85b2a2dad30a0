"""The queue: starts trainers, adopts the ones of an earlier server, and judges how each ended.

What is decided is committed before it is done, so a server may be killed at any instruction: the
next one reads intents from the database and the rest from the run directories.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from fluxtrain.errors import (
    EXIT_BAD_INPUT,
    EXIT_BUG,
    EXIT_DEVICE_FAILED,
    EXIT_DISAGREES,
    EXIT_DIVERGED,
    EXIT_DOES_NOT_FIT,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_NO_SPACE,
    EXIT_READ_FAILED,
    EXIT_TERMINATED,
    FluxTrainError,
)
from fluxtrain.events.answers.asking import FLUXTRAIN
from fluxtrain.events.run_folder.run_dir import RunSummary, runs_root
from fluxtrain.files.atomic import free_bytes, replace_file, storage_error
from fluxtrain.files.parent import environment_of_child
from fluxtrain.serve.backend import Backend, End, State
from fluxtrain.serve.jobs import config_path, run_of, summary_of, trained_tokens
from fluxtrain.serve.refusal import without_folders
from fluxtrain.serve.registry import version_of
from fluxtrain.serve.retention import delete_old
from fluxtrain.serve.settings import ServeSettings
from fluxtrain.serve.store import Store, jobs, versions
from fluxtrain.serve.uploads import remove_unused
from fluxtrain.units import bytes_text

TICK_S = 0.5
STOP_AGAIN_S = 5.0  # between two requests to a trainer that has not stopped yet
SILENT_S = 30.0
WHY_PERIOD_S = 5.0  # between two questions why a trainer does not run
RETAIN_PERIOD_S = 3600.0
EXAMINE_PERIOD_S = 600.0
LONGEST_S = 120.0  # that a job waits to be tried again; a longer time is of a clock that was set
RELAUNCH_S = 10.0  # until a start that was refused is tried again
MONTH_S = 30 * 86400.0
# How often an end is tried again while no new step was made, and the first pause, which doubles.
TRIES = {
    "memory": (1, 5.0),
    "card": (1, 0.0),
    "read": (3, 10.0),
    "bug": (1, 2.0),
    "crash": (5, 1.0),
}
KINDS = {
    EXIT_DOES_NOT_FIT: "memory",
    EXIT_DEVICE_FAILED: "card",
    EXIT_READ_FAILED: "read",
    EXIT_BUG: "bug",
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
    if end.code == EXIT_FINISHED:
        return Verdict(status="succeeded")
    if wanted == "cancel" or end.stopped_by_app:
        return Verdict(status="cancelled")
    if wanted == "pause":
        return Verdict(status="queued", because="paused")
    if end.code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        return Verdict(status="queued", because="its trainer was stopped from outside")
    for_good = (EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_DISAGREES)
    if end.code in for_good or (end.code == EXIT_DOES_NOT_FIT and end.refused):
        return Verdict(status="failed", because=end.message)
    if end.code == EXIT_NO_SPACE:
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


class Queue:
    """A thread that starts and stops trainers as their jobs require."""

    def __init__(self, store: Store, settings: ServeSettings, backend: Backend) -> None:
        """Prepare the queue; backend: where trainers run."""
        self._store, self._settings, self._backend = store, settings, backend
        self._told_stop_s: dict[str, float] = {}
        self._asked_why_s: dict[str, float] = {}
        self._silent: set[str] = set()
        self._bad_cards: dict[int, _Examined] = {}
        self._lacking: set[str] = set()  # jobs that wait for disk space
        self._wake, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="queue", daemon=True)
        self._retained_s = -RETAIN_PERIOD_S
        self.running: frozenset[str] = frozenset()  # ids of the jobs whose trainers run
        self.held = ""  # what the trainers that run hold, in words; "" while none runs

    def start(self) -> None:
        """Begin; trainers that an earlier server started are adopted."""
        self._backend.open(self.wake)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether jobs are looked after."""
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Return whether a trainer takes memory of this machine."""
        return self._backend.shares_machine and bool(self.running)

    @property
    def cards_aside(self) -> frozenset[int]:
        """Return the cards that failed and get no jobs."""
        return frozenset(self._bad_cards)

    def wake(self) -> None:
        """Look now, as something else is wanted."""
        self._wake.set()

    def close(self) -> None:
        """End the thread; trainers go on."""
        self._ends.set()
        self._wake.set()
        self._thread.join()
        self._backend.close()

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                self.tick()
            except Exception:  # noqa: BLE001 - a fault of one look must not end the queue
                traceback.print_exc()
            self._wake.wait(TICK_S)
            self._wake.clear()

    def tick(self) -> None:
        """Look at every job that has not ended, once."""
        is_open = sa.select(jobs).where(jobs.c.outcome.is_(None)).order_by(jobs.c.number)
        rows = self._store.rows(is_open)
        states = {row["id"]: self._backend.state(row) for row in rows}
        running = [row for row in rows if states[row["id"]] in ("waits", "runs")]
        for row in running:
            self._steer(row, states[row["id"]])
        if time.monotonic() - self._retained_s > RETAIN_PERIOD_S:
            self._retained_s = time.monotonic()
            delete_old(self._store, self._settings.retention_days)
        self._note_running(running)
        for row in rows:
            if row not in running:
                self._take_up(row, states[row["id"]], running)

    def _take_up(
        self, row: Mapping[str, Any], state: State, running: list[Mapping[str, Any]]
    ) -> None:
        """Judge a job whose trainer has ended, or start it where it may run now."""
        due = not 0 < row["not_before_s"] - time.time() < LONGEST_S
        if row["tries"].get("started", 0) > row["tries"].get("judged", 0):
            if state != "unmade" or row["wanted"] != "run":
                self._judge(row)
            elif due:
                self._launch(row)
        elif row["wanted"] == "cancel":
            self._end(row, "cancelled", run=summary_of(run_of(row["id"])))
        elif row["wanted"] == "run" and due:
            lane = self._free_lane(running, row["project"])
            if lane is not None and self._has_space(row):
                self._start(row, lane)
                running.append({**row, "card": lane})
                self._note_running(running)

    def _note_running(self, rows: list[Mapping[str, Any]]) -> None:
        self.held = _held(rows)
        self.running = frozenset(row["id"] for row in rows)

    # -- running jobs

    def _steer(self, row: Mapping[str, Any], state: State) -> None:
        """Stop a trainer whose job should not run; tell of one that is silent, or waits."""
        if row["wanted"] == "run":
            self._account(row, state)
            self._tell_of_silence(row, state)
            return
        if time.monotonic() - self._told_stop_s.get(row["id"], -STOP_AGAIN_S) < STOP_AGAIN_S:
            return
        self._told_stop_s[row["id"]] = time.monotonic()
        if row["tries"].get("told") != row["tries"].get("started"):
            self._change(row, tries={**row["tries"], "told": row["tries"].get("started")})
        self._backend.stop(row)

    def _account(self, row: Mapping[str, Any], state: State) -> None:
        """Note that a trainer is there, and since when it computes; charge for what it computed
        where it stopped for a while."""
        tries = {**row["tries"], "made": row["tries"].get("started")}
        if state == "runs":
            tries.setdefault("started_s", time.time())
        elif tries.pop("started_s", None) is not None:
            self._charge(row, summary_of(run_of(row["id"])))
        if tries != row["tries"]:
            self._change(row, tries=tries)

    def _charge(self, row: Mapping[str, Any], run: RunSummary | None) -> None:
        began_s = row["tries"].get("started_s", time.time())
        until_s = min(time.time(), run.updated_s) if run is not None else began_s
        served = row["request"]["model"]
        self._store.note_usage(row["project"], served, card_s=max(0.0, until_s - began_s))

    def _tell_of_silence(self, row: Mapping[str, Any], state: State) -> None:
        if state == "waits":
            if time.monotonic() - self._asked_why_s.get(row["id"], 0.0) > WHY_PERIOD_S:
                self._asked_why_s[row["id"]] = time.monotonic()
                why = self._backend.why_waits(row)
                if why and why not in (text for _, _, text in row["notes"][-1:]):
                    self._note(row, "info", why)
            return
        run, began_s = summary_of(run_of(row["id"])), row["tries"].get("started_s", time.time())
        quiet_s = time.time() - max(run.updated_s, began_s) if run is not None else 0.0
        if quiet_s > SILENT_S and row["id"] not in self._silent:
            self._silent.add(row["id"])
            self._note(row, "warn", f"its trainer has been silent for {quiet_s:.0f} s")
        elif quiet_s <= SILENT_S:
            self._silent.discard(row["id"])

    # -- jobs that begin or go on

    def _free_lane(self, running: list[Mapping[str, Any]], project: str) -> int | None:
        """Return the card for the next job, -1 for all; None where none is free."""
        quotas = self._settings.quotas
        if sum(row["project"] == project for row in running) >= quotas.running_jobs:
            return None
        used_s = self._store.used(project, ("card_s",), time.time() - MONTH_S)
        if used_s >= quotas.card_hours * 3600:
            return None
        if not self._backend.shares_machine:
            return -1
        lanes = self._settings.cards or (-1,)
        taken = {row["card"] for row in running}
        for card in [one for one, found in self._bad_cards.items() if found.is_well()]:
            del self._bad_cards[card]
        return next((one for one in lanes if one not in taken and one not in self._bad_cards), None)

    def _has_space(self, row: Mapping[str, Any]) -> bool:
        """Return whether the disk has room for what the job's plan still needs."""
        if row["tries"].get("started"):
            return True  # its checkpoints are there; the trainer looks itself
        needed, free = int(row["plan"].get("disk_bytes") or 0), free_bytes(runs_root())
        if free is None or free >= needed:
            self._lacking.discard(row["id"])
            return True
        if row["id"] not in self._lacking:
            self._lacking.add(row["id"])
            lacks = f"{bytes_text(needed)} needed, {bytes_text(free)} free"
            self._note(row, "warn", f"waits for disk space: {lacks}")
        return False

    def _start(self, row: Mapping[str, Any], lane: int) -> None:
        """Start or resume a job's trainer; that it was meant to is on the disk before."""
        tries = {**row["tries"], "started": row["tries"].get("started", 0) + 1}
        if self._backend.shares_machine:
            tries["started_s"] = time.time()
        self._change(row, tries=tries, card=lane)
        self._launch({**row, "tries": tries, "card": lane})

    def _launch(self, row: Mapping[str, Any]) -> None:
        path = config_path(self._store, row["id"])
        arguments = [str(path), "--resume", "auto"]
        if row["card"] >= 0:
            arguments += ["--set", f"parallel.cards=[{row['card']}]"]
        try:
            try:
                replace_file(path, json.dumps(row["config"]).encode())
            except OSError as error:
                raise storage_error(path, error) from error
            self._backend.start(row, arguments)
        except FluxTrainError as error:
            self._note(row, "error", str(error))
            self._change(row, not_before_s=time.time() + RELAUNCH_S)

    # -- jobs that ended

    def _judge(self, row: Mapping[str, Any]) -> None:
        run = summary_of(run_of(row["id"]))
        step = run.step if run is not None else None
        finished = run is not None and run.state == "finished"
        end = End(code=EXIT_FINISHED) if finished else self._backend.collect(row, run)
        verdict = judge(end, row["wanted"], row["tries"], step)
        self._charge(row, run)
        if verdict.leaves_card and row["card"] is not None and row["card"] >= 0:
            self._bad_cards[row["card"]] = _Examined(row["card"])
        if verdict.status != "queued":
            self._end(row, verdict.status, verdict.because, run)
            return
        started = row["tries"]["started"]
        tries = {**(verdict.tries or row["tries"]), "started": started, "judged": started}
        tries.pop("started_s", None)
        again_s = time.time() + verdict.again_s
        self._change(row, tries=tries, not_before_s=again_s)
        if verdict.because != "paused":
            self._note(row, "warn", f"queued again: {verdict.because}")

    def _end(
        self, row: Mapping[str, Any], status: str, because: str = "", run: RunSummary | None = None
    ) -> None:
        """Record how a job ended, with its model where it succeeded."""
        folder = run_of(row["id"])
        outcome: dict[str, Any] = {
            "status": status,
            "at_s": time.time(),
            "code": None if run is None else run.exit_code,
            "message": without_folders(because),
            "step": None if run is None else run.step,
            "total_steps": None if run is None else run.total_steps,
            "loss": None if run is None else run.loss,
            "trained_tokens": None if run is None else trained_tokens(folder),
        }
        version = version_of(self._store, row, folder) if status == "succeeded" else None
        if version is not None:
            facts = version["facts"]
            outcome |= {"version": version["id"], "measured": facts["measured"], **facts["metrics"]}
        with self._store.write() as connection:
            if version is not None:
                connection.execute(sa.insert(versions), version)
            ended = sa.update(jobs).where(jobs.c.id == row["id"]).values(outcome=outcome)
            connection.execute(ended)
        for blob in row["blobs"].values():
            remove_unused(self._store, blob)
        config_path(self._store, row["id"]).unlink(missing_ok=True)
        self._told_stop_s.pop(row["id"], None)
        self._asked_why_s.pop(row["id"], None)

    def _change(self, row: Mapping[str, Any], **values: Any) -> None:
        with self._store.write() as connection:
            connection.execute(sa.update(jobs).where(jobs.c.id == row["id"]).values(**values))

    def _note(self, row: Mapping[str, Any], level: str, text: str) -> None:
        """Add events to a job that its run does not report."""
        with self._store.write() as connection:
            query = sa.select(jobs.c.notes).where(jobs.c.id == row["id"])
            notes = connection.execute(query).scalar_one()
            changed = [*notes, [time.time(), level, without_folders(text)]]
            connection.execute(sa.update(jobs).where(jobs.c.id == row["id"]).values(notes=changed))


def _held(running: list[Mapping[str, Any]]) -> str:
    """Tell what the plans of jobs that run take."""
    if not running:
        return ""
    jobs_text = "a job trains" if len(running) == 1 else f"{len(running)} jobs train"
    cards = ", ".join(sorted(str(row["card"]) for row in running if (row["card"] or 0) >= 0))
    where = f" on card {cards}" if cards else ""
    device, host = (
        sum(int(row["plan"].get(kind) or 0) for row in running)
        for kind in ("device_bytes", "host_bytes")
    )
    return (
        f"{jobs_text}{where} and, by plan, needs {bytes_text(device)} of device and "
        f"{bytes_text(host)} of host memory"
    )


class _Examined:
    """A card that failed, put aside until `fluxtrain doctor` finds nothing wrong with it."""

    def __init__(self, card: int) -> None:
        self._card, self._process = card, self._begin(card)
        self._begun_s = time.monotonic()

    def is_well(self) -> bool:
        """Return whether the examination has passed; begin one again from time to time."""
        if self._process.poll() == EXIT_FINISHED:
            return True
        if self._process.poll() is not None and self._is_due():
            self._process, self._begun_s = self._begin(self._card), time.monotonic()
        return False

    def _is_due(self) -> bool:
        return time.monotonic() - self._begun_s > EXAMINE_PERIOD_S

    @staticmethod
    def _begin(card: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*FLUXTRAIN, "doctor", "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**environment_of_child(), "CUDA_VISIBLE_DEVICES": str(card)},
        )
