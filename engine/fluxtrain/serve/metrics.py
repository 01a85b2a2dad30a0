"""Metrics of the service: the one table of them, and a collector that reads them at a scrape.

What a job does is read from the end of its journal, so that a scrape is right after any restart;
only answers are counted in this process. Board and alert rules (`monitoring`) are made of this
table.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fluxtrain.errors import EXIT_DIVERGED
from fluxtrain.events.answers.generation import Answered
from fluxtrain.events.events import Event, MemorySampled, StepFinished, TrafficSampled
from fluxtrain.events.journal import newest_events
from fluxtrain.events.run_folder.run_dir import runs_root
from fluxtrain.files.atomic import disk_usage
from fluxtrain.serve.jobs import run_of
from fluxtrain.serve.queue import Queue
from fluxtrain.serve.refusal import Refusal
from fluxtrain.serve.settings import ServeSettings
from fluxtrain.serve.store import Store, files, jobs, keys
from fluxtrain.serve.worker import Said

RECENT_S = 120.0  # how long an ended job is still shown, so that its last values are scraped
MONTH_S = 30 * 86400.0
READ_KINDS: tuple[type[Event], ...] = (StepFinished, MemorySampled, TrafficSampled)
STATES = ("queued", "paused", "running")
ENDS = ("succeeded", "failed", "diverged", "cancelled")
COUNT = sa.func.count().label("count")
SECONDS_EDGES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One metric: a row of the table."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the name of its samples, for expressions."""
        return self.name + {"gauge": "", "counter": "_total", "histogram": "_bucket"}[self.kind]


TABLE: list[Row] = []
JOB_LABELS = ("job_id", "project", "card")  # `job` is Prometheus' own


def _gauge(name: str, told: str, *labels: str) -> Row:
    TABLE.append(Row(name=f"fluxtrain_{name}", kind="gauge", help=told, labels=labels))
    return TABLE[-1]


def _counter(name: str, told: str, *labels: str) -> Row:
    TABLE.append(Row(name=f"fluxtrain_{name}", kind="counter", help=told, labels=labels))
    return TABLE[-1]


JOBS = _gauge("jobs", "Jobs that have not ended: queued, paused, running", "project", "state")
ENDED = _counter(
    "jobs_ended", "Jobs that ended: succeeded, failed, diverged, cancelled", "project", "how"
)
OLDEST = _gauge("queue_oldest_seconds", "Age of the oldest job that waits for a card", "project")
QUEUE_ALIVE = _gauge("queue_alive", "Whether jobs are looked after: 1 or 0")

STEP = _gauge("job_step", "Newest step of a job", *JOB_LABELS)
STEPS = _gauge("job_steps", "Steps that a job will make", *JOB_LABELS)
STEP_S = _gauge("job_step_seconds", "Duration of the newest step", *JOB_LABELS)
PHASE_S = _gauge(
    "job_step_phase_seconds", "Share of a phase in the newest step", *JOB_LABELS, "phase"
)
STALL_S = _gauge(
    "job_step_stall_seconds", "Waiting in the newest step, by cause", *JOB_LABELS, "cause"
)
TOKENS = _counter("job_tokens", "Tokens that a job has trained on", *JOB_LABELS)
SPEED = _gauge("job_tokens_per_second", "Trained tokens of the newest step", *JOB_LABELS)
LOSS = _gauge("job_loss", "Loss of the newest step", *JOB_LABELS)
NORM = _gauge("job_gradient_norm", "Norm of the gradients of the newest step", *JOB_LABELS)
DEVICE = _gauge("job_device_bytes", "Memory of the device, by category", *JOB_LABELS, "category")
HOST = _gauge(
    "job_host_bytes", "Memory of the host: rss, arena, pinned (they overlap)",
    *JOB_LABELS, "category",
)  # fmt: skip
MOVED = _counter(
    "job_moved_bytes", "Bytes moved by the engine: h2d, d2h, disk_read, disk_written",
    *JOB_LABELS, "direction",
)  # fmt: skip
PLAN_ERROR = _gauge(
    "job_plan_error_ratio", "Predicted over measured, minus 1: device_bytes, host_bytes, step_s",
    *JOB_LABELS, "quantity",
)  # fmt: skip
CHECKPOINT_AGE = _gauge("job_checkpoint_age_seconds", "Age of the newest checkpoint", *JOB_LABELS)
SILENT = _gauge("job_silent_seconds", "Time since a job's trainer last wrote", *JOB_LABELS)

PUT_ASIDE = _gauge("card_put_aside", "Whether a card failed and gets no jobs: 1 or 0", "card")
DISK_FREE = _gauge("disk_free_bytes", "Free space, of runs and of the service's folder", "place")
DISK_SIZE = _gauge("disk_size_bytes", "Size of the disk behind it", "place")
QUOTA = _gauge(
    "quota_used_ratio",
    "Share of a quota that a project uses: queued_jobs, running_jobs, card_hours, stored_bytes, "
    "tokens_per_minute",
    "project", "quota",
)  # fmt: skip

ANSWER_ROWS = _gauge("answer_rows", "Questions that wait or are answered now", "project")
ANSWERS = _counter(
    "answers", "Questions by how they ended: answered, refused, left", "project", "model", "how"
)
ANSWER_TOKENS = _counter(
    "answer_tokens", "Tokens of prompts and answers", "project", "model", "kind"
)
ANSWER_WAIT = Row(
    name="fluxtrain_answer_wait_seconds",
    kind="histogram",
    help="Time from a question to the first piece of its answer",
    labels=("project",),
)
TABLE.append(ANSWER_WAIT)


class AnswerCounts:
    """Counts the answers of this process."""

    def __init__(self) -> None:
        self.registry = into = CollectorRegistry()
        self._rows = Gauge(ANSWER_ROWS.name, ANSWER_ROWS.help, ANSWER_ROWS.labels, registry=into)
        self._ended = Counter(ANSWERS.name, ANSWERS.help, ANSWERS.labels, registry=into)
        row = ANSWER_TOKENS
        self._tokens = Counter(row.name, row.help, row.labels, registry=into)
        row = ANSWER_WAIT
        self._wait = Histogram(row.name, row.help, row.labels, buckets=SECONDS_EDGES, registry=into)

    async def watched(
        self, project: str, model: str, said: AsyncIterator[Said]
    ) -> AsyncIterator[Said]:
        """Yield the pieces of an answer, and count it."""
        began_s, how, waits = time.monotonic(), "left", True
        self._rows.labels(project).inc()
        try:
            async for piece in said:
                if waits:
                    self._wait.labels(project).observe(time.monotonic() - began_s)
                    waits = False
                if isinstance(piece, Answered):
                    how = "answered"
                    self._tokens.labels(project, model, "prompt").inc(piece.prompt_tokens)
                    self._tokens.labels(project, model, "answer").inc(piece.tokens)
                yield piece
        except Refusal:
            how = "refused"
            raise
        finally:
            self._rows.labels(project).dec()
            self._ended.labels(project, model, how).inc()


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The parts of a service that metrics are read from."""

    store: Store
    settings: ServeSettings
    queue: Queue
    answers: AnswerCounts

    def exposition(self, project: str | None) -> bytes:
        """Return all metrics in Prometheus' text format; of one project, or None: of all and of
        the machine."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Scrape(self, project))
        return generate_latest(registry)


class _Scrape(Collector):
    """Reads every metric once."""

    def __init__(self, service: Watched, project: str | None) -> None:
        self._service, self._project = service, project
        found = self._rows(sa.select(keys.c.project).distinct(), keys.c.project)
        self._projects = [row["project"] for row in found]
        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            row.name: kinds[row.kind](row.name, row.help, labels=row.labels)
            for row in TABLE
            if row.kind in kinds and not row.name.startswith("fluxtrain_answer")
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the families of the table."""
        if self._project is None:
            self._add_machine()
        if self._project is not None or self._service.queue.lease.leads:  # of several, one tells
            self._add_jobs()
            self._add_ends()
            self._add_quotas()
        yield from self._families.values()
        for family in self._service.answers.registry.collect():
            if self._project is not None:
                mine = [one for one in family.samples if one.labels["project"] == self._project]
                family.samples = mine
            yield family

    def _add(self, row: Row, value: float | None, *labels: object) -> None:
        if value is not None:
            self._families[row.name].add_metric([str(one) for one in labels], value)

    def _rows(self, query: Any, column: sa.Column[str]) -> list[Mapping[str, Any]]:
        if self._project is not None:
            query = query.where(column == self._project)
        return self._service.store.rows(query)

    def _add_machine(self) -> None:
        queue, settings = self._service.queue, self._service.settings
        self._add(QUEUE_ALIVE, float(queue.is_alive))
        for card in settings.cards:
            self._add(PUT_ASIDE, float(card in queue.cards_aside), card)
        for place, folder in (("runs", runs_root()), ("service", self._service.store.folder)):
            if (disk := disk_usage(folder)) is not None:
                self._add(DISK_FREE, disk.free, place)
                self._add(DISK_SIZE, disk.total, place)

    def _add_jobs(self) -> None:
        """Add counts of jobs, and what those do that run or ended just now."""
        now_s = self._service.store.now_s()
        ended_s = jobs.c.outcome["at_s"].as_float()
        shown = sa.or_(jobs.c.outcome.is_(None), ended_s > now_s - RECENT_S)
        names = ("id", "project", "card", "plan", "wanted", "created_s", "outcome", "server")
        rows = self._rows(sa.select(*(jobs.c[name] for name in names)).where(shown), jobs.c.project)
        counts = {(name, state): 0 for name in self._projects for state in STATES}
        oldest_s = dict.fromkeys(self._projects, 0.0)
        for row in rows:
            project, trains = row["project"], row["outcome"] is None and row["server"] is not None
            if row["outcome"] is None:
                state = "running" if trains else "paused" if row["wanted"] == "pause" else "queued"
                counts[project, state] += 1
                if state == "queued":
                    oldest_s[project] = max(oldest_s[project], now_s - row["created_s"])
            if trains or row["outcome"] is not None:
                with suppress(OSError):  # its folder is deleted meanwhile
                    self._add_run(row, trains)
        for (project, state), count in counts.items():
            self._add(JOBS, count, project, state)
        for project, age_s in oldest_s.items():
            self._add(OLDEST, age_s, project)

    def _add_ends(self) -> None:
        status, code = jobs.c.outcome["status"].as_string(), jobs.c.outcome["code"].as_integer()
        told = sa.select(jobs.c.project, status.label("how"), code.label("code"), COUNT)
        ended = told.where(jobs.c.outcome.is_not(None)).group_by(jobs.c.project, "how", "code")
        # all begin at 0: what appears as 1 has no increase
        counts = {(name, how): 0 for name in self._projects for how in ENDS}
        for row in self._rows(ended, jobs.c.project):
            diverged = row["how"] == "failed" and row["code"] == EXIT_DIVERGED
            counts[row["project"], "diverged" if diverged else row["how"]] += row["count"]
        for (project, how), count in counts.items():
            self._add(ENDED, count, project, how)

    def _add_run(self, row: Mapping[str, Any], trains: bool) -> None:
        """Add what the end of a run's journal says. Raises OSError."""
        run = run_of(row["id"])
        card = "" if row["card"] in (None, -1) else row["card"]
        labels = (row["id"], row["project"], card)
        found = newest_events(run.journal, READ_KINDS)
        if isinstance(step := found.get(StepFinished), StepFinished):
            self._add_step(step, labels)
            self._add(PLAN_ERROR, _error(row["plan"].get("step_s"), step.step_s), *labels, "step_s")
        if isinstance(memory := found.get(MemorySampled), MemorySampled):
            for category, count in memory.device_by.items():
                self._add(DEVICE, count, *labels, category)
            for category in ("rss", "arena", "pinned"):
                self._add(HOST, getattr(memory, f"host_{category}_bytes"), *labels, category)
            for kind in ("device", "host"):
                planned, peak = (
                    row["plan"].get(f"{kind}_bytes"),
                    getattr(memory, f"{kind}_peak_bytes"),
                )
                self._add(PLAN_ERROR, _error(planned, peak), *labels, f"{kind}_bytes")
        if isinstance(moved := found.get(TrafficSampled), TrafficSampled):
            for direction in ("h2d", "d2h", "disk_read", "disk_written"):
                self._add(MOVED, getattr(moved, f"{direction}_bytes"), *labels, direction)
        if trains:
            now_s = time.time()
            self._add(SILENT, max(0.0, now_s - run.journal.stat().st_mtime), *labels)
            written = [path.stat().st_mtime for path in run.checkpoints.glob("step-*")]
            if written:
                self._add(CHECKPOINT_AGE, max(0.0, now_s - max(written)), *labels)

    def _add_step(self, step: StepFinished, labels: tuple[object, ...]) -> None:
        for row, value in (
            (STEP, step.step),
            (STEPS, step.total_steps),
            (STEP_S, step.step_s),
            (TOKENS, step.total_tokens),
            (SPEED, step.tokens_per_s),
            (LOSS, step.loss),
            (NORM, step.grad_norm),
        ):
            self._add(row, value, *labels)
        for phase, seconds in step.phases_s.items():
            self._add(PHASE_S, seconds, *labels, phase)
        for cause, seconds in step.stalls_s.items():
            self._add(STALL_S, seconds, *labels, cause)

    def _add_quotas(self) -> None:
        quotas, store = self._service.settings.quotas, self._service.store
        now_s = store.now_s()
        stored = sa.select(files.c.project, sa.func.sum(files.c.bytes).label("bytes"))
        found = self._rows(stored.group_by(files.c.project), files.c.project)
        stored_bytes = {row["project"]: int(row["bytes"]) for row in found}
        counts = {
            tuple(one.labels.values()): one.value for one in self._families[JOBS.name].samples
        }
        for name in self._projects:
            mine = {state: counts[name, state] for state in STATES}
            tokens = store.used(name, ("prompt_tokens", "answer_tokens"), now_s - 60)
            card_s = store.used(name, ("card_s",), now_s - MONTH_S)
            for quota, used, most in (
                ("queued_jobs", sum(mine.values()), quotas.queued_jobs),
                ("running_jobs", mine["running"], quotas.running_jobs),
                ("card_hours", card_s / 3600, quotas.card_hours),
                ("stored_bytes", stored_bytes.get(name, 0), quotas.stored_bytes),
                ("tokens_per_minute", tokens, quotas.tokens_per_minute),
            ):
                self._add(QUOTA, used / most, name, quota)


def _error(predicted: float | None, measured: float | None) -> float | None:
    """Return how far a prediction is from what was measured, as its share."""
    return predicted / measured - 1.0 if predicted and measured else None
