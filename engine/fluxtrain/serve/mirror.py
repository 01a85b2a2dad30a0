"""Mirrors runs, versions and aliases into the MLflow of MLFLOW_TRACKING_URI, by its REST API.

What is to be sent is read from journals and database, so nothing is lost while MLflow is away, and
of each job no more than a piece of its journal waits in memory. What is sent twice is one metric to
MLflow: name, time, step and value are the same. Source: mlflow.org/docs/latest/rest-api.html.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import sqlalchemy as sa

from fluxtrain.events.events import AnyEvent
from fluxtrain.events.reader import JournalFollower
from fluxtrain.events.values import values_of
from fluxtrain.serve.jobs import run_of
from fluxtrain.serve.refusal import Refusal
from fluxtrain.serve.store import Store, aliases, jobs, versions

PERIOD_S, LONGEST_PAUSE_S, TIMEOUT_S, END_S = 5.0, 60.0, 10.0, 2.0
MOST_METRICS = 1000  # of a request, by MLflow's limits
MOST_JOBS = 1000  # read at once
ENDS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
THERE_IS_NONE, THERE_IS_ONE = "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"
Row = Mapping[str, Any]


class MlflowAway(Exception):
    """MLflow does not answer, is overloaded, or lets nobody in."""


class MlflowRefused(Exception):
    """MLflow cannot do what it was asked for."""


class Mirror:
    """A thread of the server; of several servers, the one that leads sends."""

    def __init__(self, store: Store, leads: Callable[[], bool], url: str) -> None:
        """Prepare; user and password, or token, are those of MLflow's own variables."""
        user, token = (os.environ.get(f"MLFLOW_TRACKING_{kind}") for kind in ("USERNAME", "TOKEN"))
        self._store, self._leads = store, leads
        self._client = httpx.Client(
            base_url=f"{url.rstrip('/')}/api/2.0/mlflow/",
            timeout=TIMEOUT_S,
            auth=(user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None,
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        self._runs: dict[str, str] = {}  # MLflow's, of jobs that are not all sent
        self._followed: dict[str, JournalFollower] = {}
        self._unsent: dict[str, list[AnyEvent]] = {}  # of each, a piece of its journal
        self._left_out: set[str] = set()
        self._aliased = 0  # number of the newest move of an alias that was sent
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; what MLflow has not taken by now, the next server sends."""
        self._ends.set()
        self._thread.join(END_S)

    def _run(self) -> None:
        pause_s, is_away = PERIOD_S, False
        while not self._ends.wait(pause_s):
            try:
                if self._leads():
                    self._send()
                    if is_away:
                        _say("is back")
                    pause_s, is_away = PERIOD_S, False
            except MlflowAway as error:
                if not is_away:
                    _say(f"is away ({error}): jobs go on, and it gets the rest when it is back")
                pause_s, is_away = min(LONGEST_PAUSE_S, pause_s * 2), True
            except Refusal:  # the database is away, as the store has said
                continue
            except Exception:  # noqa: BLE001 - a fault of one look must not end the mirror
                traceback.print_exc()
                pause_s = LONGEST_PAUSE_S

    def _ask(self, verb: str, path: str, but: str = "", **fields: Any) -> dict[str, Any]:
        """Return MLflow's answer; {} where it refuses with the code `but`.

        Raises MlflowAway and MlflowRefused.
        """
        params, body = (fields, None) if verb == "GET" else (None, fields)
        try:
            answer = self._client.request(verb, path, params=params, json=body)
            told = dict(answer.json())
        except (httpx.HTTPError, ValueError, TypeError) as error:
            raise MlflowAway(f"{type(error).__name__}: {error}") from error
        code = told.get("error_code")
        if answer.is_success or (code and code == but):
            return told if answer.is_success else {}
        if code is None or answer.status_code in (401, 403, 429) or answer.status_code >= 500:
            raise MlflowAway(f"{verb} {path}: {answer.status_code}")
        raise MlflowRefused(f"{code}: {told.get('message')}")

    def _send(self) -> None:
        """Send what is new."""
        unsent = jobs.c.outcome["mirrored"].as_boolean().is_(None)
        begun = sa.or_(jobs.c.outcome.is_not(None), jobs.c.server.is_not(None))
        query = sa.select(jobs).where(unsent, begun).order_by(jobs.c.number)
        for row in self._store.rows(query.limit(MOST_JOBS)):
            try:
                is_sent = row["id"] in self._left_out or self._send_run(row)
            except MlflowRefused as error:
                _say(f"refused the run of {row['id']} ({error}), which is left out")
                self._left_out.add(row["id"])
                continue
            if is_sent and row["outcome"]:
                outcome = {**row["outcome"], "mirrored": True}
                with self._store.write() as connection:
                    of_job = sa.update(jobs).where(jobs.c.id == row["id"])
                    connection.execute(of_job.values(outcome=outcome))
                for kept in (self._runs, self._followed, self._unsent):
                    kept.pop(row["id"], None)
        moves = sa.select(aliases).where(aliases.c.number > self._aliased)
        for row in self._store.rows(moves.order_by(aliases.c.number)):
            if not self._send_alias(row):
                break
            self._aliased = row["number"]

    def _send_run(self, row: Row) -> bool:
        """Send what a job's journal has; return whether that is all."""
        job, ending = row["id"], row["outcome"]
        run_id = self._runs.get(job) or self._begun(row)
        follower = self._followed.setdefault(job, JournalFollower(run_of(job).journal))
        while not self._ends.is_set() and (events := self._unsent.get(job) or follower.poll()):
            self._unsent[job] = events
            metrics = [one for event in events for one in _metrics(event)]
            for first in range(0, len(metrics), MOST_METRICS):
                some = metrics[first : first + MOST_METRICS]
                self._ask("POST", "runs/log-batch", run_id=run_id, metrics=some)
            del self._unsent[job]
        if ending is None or self._ends.is_set():
            return False
        if ending.get("version"):
            self._register(ending["version"], run_id)
        ended: dict[str, Any] = {
            "status": ENDS[ending["status"]],
            "end_time": int(ending["at_s"] * 1000),
        }
        self._ask("POST", "runs/update", run_id=run_id, **ended)
        return True

    def _begun(self, row: Row) -> str:
        """Find or make the run of a job; return MLflow's id for it."""
        name, job = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fluxtrain", row["id"]
        by_name = self._ask("GET", "experiments/get-by-name", THERE_IS_NONE, experiment_name=name)
        found = by_name.get("experiment") or self._ask("POST", "experiments/create", name=name)
        experiment = found["experiment_id"]
        wanted: dict[str, Any] = {
            "experiment_ids": [experiment],
            "filter": f"tags.`fluxtrain.job` = '{job}'",
        }
        runs = self._ask("POST", "runs/search", **wanted, max_results=1).get("runs")
        tags = {"project": row["project"], "job": job, "base": row["request"]["model"]}
        made = {"run": runs[0]} if runs else self._ask(
            "POST", "runs/create", experiment_id=experiment, tags=_tags(tags),
            run_name=row["request"].get("suffix") or job, start_time=int(row["created_s"] * 1000),
        )  # fmt: skip
        self._runs[job] = run_id = str(made["run"]["info"]["run_id"])
        return run_id

    def _register(self, version: str, run_id: str) -> None:
        """Make a job's version one of its project's model, where it was not deleted."""
        row = self._store.one(sa.select(versions).where(versions.c.id == version))
        if row is None:
            return
        model = f"fluxtrain-{row['project']}"
        self._ask("POST", "registered-models/create", THERE_IS_ONE, name=model)
        found = self._ask("GET", "model-versions/search", filter=f"run_id = '{run_id}'")
        if not (known := found.get("model_versions")):  # else an earlier answer was lost
            tags = _tags({"version": version, "base": row["base"], "method": row["method"]})
            source = f"fluxtrain:/models/{row['artifact']}"  # its files stay in the service
            given: dict[str, Any] = {
                "name": model,
                "source": source,
                "run_id": run_id,
                "tags": tags,
            }
            known = [self._ask("POST", "model-versions/create", **given)["model_version"]]
        with self._store.write() as connection:
            same = versions.c.id == version
            facts = connection.execute(sa.select(versions.c.facts).where(same)).scalar_one_or_none()
            noted = {**(facts or {}), "mlflow": str(known[0]["version"])}
            connection.execute(sa.update(versions).where(same).values(facts=noted))

    def _send_alias(self, row: Row) -> bool:
        """Let an alias lead to a version of its project's model, or nowhere; return False where
        that version is still to be sent."""
        version = self._store.one(sa.select(versions).where(versions.c.id == row["version"]))
        number = version and version["facts"].get("mlflow")
        if version is not None and number is None and version["job"] not in self._left_out:
            return False
        given: dict[str, Any] = {
            "name": f"fluxtrain-{row['project']}",
            "alias": row["name"].replace(".", "_"),
        }
        with contextlib.suppress(MlflowRefused):  # it, or its model, is not there any more
            if number is not None:
                self._ask("POST", "registered-models/alias", **given, version=number)
            elif row["version"] is None:
                self._ask("DELETE", "registered-models/alias", **given)
        return True


def mirror_of(store: Store, leads: Callable[[], bool]) -> Mirror | None:
    """Return the mirror that MLFLOW_TRACKING_URI asks for; None where it names no server."""
    url = os.environ.get("MLFLOW_TRACKING_URI", "")
    return Mirror(store, leads, url) if url.startswith(("http://", "https://")) else None


def _metrics(event: AnyEvent) -> list[dict[str, Any]]:
    step, values = values_of(event) or (0, {})
    known = {"timestamp": int(event.wall_s * 1000), "step": step}
    return [{"key": name, "value": value, **known} for name, value in values.items()]


def _tags(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": f"fluxtrain.{name}", "value": value} for name, value in values.items()]


def _say(what: str) -> None:
    print(f"mlflow: it {what}", file=sys.stderr, flush=True)
