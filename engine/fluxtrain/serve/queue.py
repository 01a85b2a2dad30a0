"""The queue: starts trainers, adopts the ones of an earlier server, and judges how each ended.

What is decided is committed before it is done, so a server may be killed at any instruction: the
next one reads intents from the database and the rest from the run directories. A job is looked
after by the server that its row names, from its start until its end is judged.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from fluxtrain.errors import EXIT_FINISHED, FluxTrainError
from fluxtrain.events.run_folder.run_dir import RunSummary, runs_root
from fluxtrain.files.atomic import free_bytes, replace_file, storage_error
from fluxtrain.serve.backend import Backend, End, State
from fluxtrain.serve.cards import Cards
from fluxtrain.serve.held_jobs import HeldJobs, Taken, is_held
from fluxtrain.serve.jobs import config_path, remove_configs, run_of, summary_of, trained_tokens
from fluxtrain.serve.lease import Lease
from fluxtrain.serve.refusal import Refusal, without_folders
from fluxtrain.serve.registry import version_of
from fluxtrain.serve.retention import delete_old
from fluxtrain.serve.settings import ServeSettings
from fluxtrain.serve.store import Store, jobs, versions
from fluxtrain.serve.uploads import remove_unused
from fluxtrain.serve.verdict import judge
from fluxtrain.units import bytes_text

TICK_S = 0.5
STOP_AGAIN_S = 5.0  # between two requests to a trainer that has not stopped yet
SILENT_S = 30.0
WHY_PERIOD_S = 5.0  # between two questions why a trainer does not run
RETAIN_PERIOD_S = 3600.0
LONGEST_S = 120.0  # that a job waits to be tried again; a longer time is of a clock that was set
RELAUNCH_S = 10.0  # until a start that was refused is tried again
MONTH_S = 30 * 86400.0


class Queue:
    """A thread that starts and stops trainers as their jobs require."""

    def __init__(self, store: Store, settings: ServeSettings, backend: Backend) -> None:
        """Prepare the queue; backend: where trainers run. Raises as `Lease`."""
        self.lease = Lease(store)
        self._store, self._settings, self._backend = store, settings, backend
        self._told_stop_s: dict[str, float] = {}
        self._asked_why_s: dict[str, float] = {}
        self._silent: set[str] = set()
        self._held = HeldJobs(store, self.lease)
        self._cards = Cards(settings.cards)
        self._lacking: set[str] = set()  # jobs that wait for disk space
        self._wake, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="queue", daemon=True)
        self._retained_s = -RETAIN_PERIOD_S
        self.running: frozenset[str] = frozenset()  # ids of the jobs whose trainers run
        self.held = ""  # what the trainers that run hold, in words; "" while none runs

    def start(self) -> None:
        """Begin; trainers that an earlier server started are adopted."""
        self.lease.start()
        self._backend.open(self.wake)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether jobs are looked after."""
        return self._thread.is_alive() and self.lease.holds

    @property
    def busy(self) -> bool:
        """Return whether a trainer takes memory of this machine."""
        return self._backend.shares_machine and bool(self.running)

    @property
    def cards_aside(self) -> frozenset[int]:
        """Return the cards that failed and get no jobs."""
        return self._cards.aside

    def wake(self) -> None:
        """Look now, as something else is wanted."""
        self._wake.set()

    def close(self) -> None:
        """End the thread; trainers go on."""
        self._ends.set()
        self._wake.set()
        self._thread.join()
        self._backend.close()
        self.lease.close()

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                self.tick()
            except Exception as error:  # noqa: BLE001 - a fault of one look must not end the queue
                is_told = isinstance(error, Refusal) and error.status == 503  # by the store
                if not (is_told or isinstance(error, Taken)):
                    traceback.print_exc()
            self._wake.wait(TICK_S)
            self._wake.clear()

    def tick(self) -> None:
        """Look at every job that has not ended, once.

        Raises Taken where another server takes one meanwhile, and Refusal without a database.
        """
        if not self.lease.holds:
            return
        is_open = sa.select(jobs).where(jobs.c.outcome.is_(None)).order_by(jobs.c.number)
        rows = self._store.rows(is_open)
        mine, waiting = self._held.divided(rows, self._is_elsewhere)
        states = {row["id"]: self._backend.state(row) for row in mine}
        running = [row for row in mine if states[row["id"]] in ("waits", "runs")]
        for row in running:
            self._steer(row, states[row["id"]])
        if self.lease.leads and time.monotonic() - self._retained_s > RETAIN_PERIOD_S:
            self._retained_s = time.monotonic()
            delete_old(self._store, self._settings.retention_days)
        self._note_running(running)
        for row in mine:
            if row not in running:
                self._go_on(row, states[row["id"]])
        self._begin_waiting(
            waiting, running, Counter(row["project"] for row in rows if is_held(row))
        )

    def _is_elsewhere(self, row: Mapping[str, Any]) -> bool:
        """Return whether a trainer is a process of another machine: servers there stop it."""
        run = run_of(row["id"])
        user = run.user() if self._backend.shares_machine else None
        return user is not None and not user.is_local and run.liveness() == "running"

    def _go_on(self, row: Mapping[str, Any], state: State) -> None:
        """Judge a job whose trainer has ended, or start again what could not be started."""
        if state != "unmade" or row["wanted"] != "run":
            self._judge(row)
        elif self._is_due(row):
            self._launch(row, self._configure(row))

    def _begin_waiting(
        self,
        waiting: list[Mapping[str, Any]],
        running: list[Mapping[str, Any]],
        held: Counter[str],
    ) -> None:
        """Start what may begin; running: here; held: jobs by project that any server has."""
        for row in waiting:
            if row["wanted"] == "cancel":
                self._end(row, "cancelled", run=summary_of(run_of(row["id"])))
            elif row["wanted"] == "run" and self._is_due(row):
                lane = self._free_lane(running, row["project"], held)
                if lane is None or not self._has_space(row):
                    continue
                if (begun := self._start(row, lane)) is not None:
                    running.append(begun)
                    held[row["project"]] += 1
                    self._note_running(running)

    def _is_due(self, row: Mapping[str, Any]) -> bool:
        return not 0 < row["not_before_s"] - self._store.now_s() < LONGEST_S

    def _note_running(self, rows: list[Mapping[str, Any]]) -> None:
        self.held = _memory_of(rows)
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
            self._held.change(row, tries={**row["tries"], "told": row["tries"].get("started")})
        if self.lease.holds:
            self._backend.stop(row)

    def _account(self, row: Mapping[str, Any], state: State) -> None:
        """Note that a trainer is there, and since when it computes; charge for what it computed
        where it stopped for a while."""
        tries, used = {**row["tries"], "made": row["tries"].get("started")}, []
        if state == "runs":
            tries.setdefault("started_s", self._store.now_s())
        elif tries.pop("started_s", None) is not None:
            used = [self._used(row, summary_of(run_of(row["id"])))]
        if tries != row["tries"]:
            self._held.change(row, *used, tries=tries)

    def _used(self, row: Mapping[str, Any], run: RunSummary | None) -> sa.Insert:
        """Return the statement that adds the time of a trainer's card to the usage."""
        now_s = self._store.now_s()
        began_s = row["tries"].get("started_s", now_s)
        until_s = began_s if run is None else min(now_s, run.updated_s + self._store.ahead_s)
        served = row["request"]["model"]
        return self._store.usage_of(row["project"], served, card_s=max(0.0, until_s - began_s))

    def _tell_of_silence(self, row: Mapping[str, Any], state: State) -> None:
        if state == "waits":
            if time.monotonic() - self._asked_why_s.get(row["id"], 0.0) > WHY_PERIOD_S:
                self._asked_why_s[row["id"]] = time.monotonic()
                why = self._backend.why_waits(row)
                if why and why not in (text for _, _, text in row["notes"][-1:]):
                    self._held.note(row, "info", why)
            return
        run, now_s = summary_of(run_of(row["id"])), self._store.now_s()
        updated_s = now_s if run is None else run.updated_s + self._store.ahead_s
        quiet_s = now_s - max(updated_s, row["tries"].get("started_s", now_s))
        if quiet_s > SILENT_S and row["id"] not in self._silent:
            self._silent.add(row["id"])
            self._held.note(row, "warn", f"its trainer has been silent for {quiet_s:.0f} s")
        elif quiet_s <= SILENT_S:
            self._silent.discard(row["id"])

    # -- jobs that begin or go on

    def _free_lane(
        self, running: list[Mapping[str, Any]], project: str, held: Counter[str]
    ) -> int | None:
        """Return the card for the next job, -1 for all; None where none is free."""
        quotas, lane = self._settings.quotas, -1
        if self._backend.shares_machine:
            free = self._cards.free([row["card"] for row in running])
            if free is None:
                return None
            lane = free
        if held[project] >= quotas.running_jobs:
            return None
        used_s = self._store.used(project, ("card_s",), self._store.now_s() - MONTH_S)
        return lane if used_s < quotas.card_hours * 3600 else None

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
            self._held.note(row, "warn", f"waits for disk space: {lacks}")
        return False

    def _start(self, row: Mapping[str, Any], lane: int) -> Mapping[str, Any] | None:
        """Take a job and start or resume its trainer; that it was meant to is on the disk before.

        None where another server took it. The trainer reads a configuration of this server's own,
        which goes when the start is judged: should this server hang so long that another one
        judges it, what it starts afterwards finds none and ends.
        """
        failed = self._configure(row)
        most, counts = self._settings.quotas.running_jobs, self._backend.shares_machine
        taken = self._held.claim(row, lane, most, counts=counts)
        if taken is None:
            config_path(self._store, row["id"], self.lease.id).unlink(missing_ok=True)
        else:
            self._launch(taken, failed)
        return taken

    def _configure(self, row: Mapping[str, Any]) -> FluxTrainError | None:
        """Write the configuration for a trainer; return why it cannot be written."""
        path = config_path(self._store, row["id"], self.lease.id)
        try:
            replace_file(path, json.dumps(row["config"]).encode())
        except OSError as error:
            return storage_error(path, error, option="--folder")
        return None

    def _launch(self, row: Mapping[str, Any], failed: FluxTrainError | None) -> None:
        path = config_path(self._store, row["id"], self.lease.id)
        arguments = [str(path), "--resume", "auto"]
        if row["card"] >= 0:
            arguments += ["--set", f"parallel.cards=[{row['card']}]"]
        try:
            if failed is not None:
                raise failed
            if self.lease.holds:
                self._backend.start(row, arguments)
        except FluxTrainError as error:
            again_s = self._store.now_s() + RELAUNCH_S
            notes = self._held.noted(row, "error", str(error))
            self._held.change(row, notes=notes, not_before_s=again_s)

    # -- jobs that ended

    def _judge(self, row: Mapping[str, Any]) -> None:
        remove_configs(self._store, row["id"])  # a trainer that begins only now ends at once
        run = summary_of(run_of(row["id"]))
        step = run.step if run is not None else None
        finished = run is not None and run.state == "finished"
        end = End(code=EXIT_FINISHED) if finished else self._backend.collect(row, run)
        verdict = judge(end, row["wanted"], row["tries"], step)
        if verdict.status != "queued":
            self._end(row, verdict.status, verdict.because, run, self._used(row, run))
        else:
            started = row["tries"]["started"]
            tries = {**(verdict.tries or row["tries"]), "started": started, "judged": started}
            tries.pop("started_s", None)
            notes = row["notes"]
            if verdict.because != "paused":
                notes = self._held.noted(row, "warn", f"queued again: {verdict.because}")
            again = {"server": None, "not_before_s": self._store.now_s() + verdict.again_s}
            self._held.change(row, self._used(row, run), tries=tries, notes=notes, **again)
        if verdict.leaves_card:
            self._cards.put_aside(row["card"])

    def _end(
        self,
        row: Mapping[str, Any],
        status: str,
        because: str = "",
        run: RunSummary | None = None,
        *more: sa.Insert,
    ) -> None:
        """Record how a job ended, with its model where it succeeded, and run `more` with it."""
        folder = run_of(row["id"])
        outcome: dict[str, Any] = {
            "status": status,
            "at_s": self._store.now_s(),
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
            more = (*more, sa.insert(versions).values(version))
        self._held.change(row, *more, outcome=outcome)
        for blob in row["blobs"].values():
            remove_unused(self._store, blob)
        self._told_stop_s.pop(row["id"], None)
        self._asked_why_s.pop(row["id"], None)


def _memory_of(running: list[Mapping[str, Any]]) -> str:
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
