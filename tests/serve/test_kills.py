"""Servers, trainers and Postgres are killed at random moments; every job still succeeds once."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa

from fluxtrain.events.events import Done, StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.run_dir import RunDir, list_runs
from fluxtrain.serve.jobs import run_of
from fluxtrain.serve.keys import add_key
from fluxtrain.serve.store import Store, jobs, versions
from tests.serve.conftest import create, rows, upload
from tests.serve.postgres import Postgres

KILLS = 20
JOBS = int(os.environ.get("FLUXTRAIN_SOAK_JOBS", "200"))
HANG_S = 20.0  # longer than a lease
SETTINGS = {
    "train": {"steps": 40, "batch_rows": 1, "checkpoint_every": 5, "evaluate_every": "end"},
    "data": {"sequence_length": 64},
}


class Restarted:
    """`fluxtrain serve` at one port, started again after each kill."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._folder, self._log = folder, (folder / "log").open("w+")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-P", "-m", "fluxtrain", "serve", "--port", str(self.port)]
            environment = {**os.environ, "FLUXTRAIN_RUNS": str(self._folder / "runs")}
            self.process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=self._log, stderr=self._log
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def key(self) -> str:
        while "sk-flux" not in (said := (self._folder / "log").read_text()):
            time.sleep(0.1)
        return next(word for word in said.split() if word.startswith("sk-flux"))


def losses(run: RunDir) -> dict[int, float]:
    """Return the loss of every step; of steps made again, the newest."""
    return {
        event.step: event.loss
        for event in read_events(run.journal)
        if isinstance(event, StepFinished)
    }


@pytest.mark.slow
def test_jobs_survive_kills_of_server_and_trainer_bit_for_bit(tmp_path: Path) -> None:
    draw = random.Random(5)
    server = Restarted(tmp_path)
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key=server.key(), max_retries=8
    )
    file = client.files.create(file=("data.jsonl", rows(60)), purpose="fine-tune").id
    jobs: list[Any] = [
        client.fine_tuning.jobs.create(
            model="demo", training_file=file, seed=seed, extra_body={"fluxtrain": SETTINGS}
        )
        for seed in (1, 1, 2)
    ]
    for number in range(KILLS):
        time.sleep(draw.uniform(0.5, 6.0))
        which = draw.choice(["server", "trainer", "both"])
        if which != "server":
            for run in list_runs(tmp_path / "runs"):
                user = RunDir(run.path).user()
                if run.state == "running" and user is not None:
                    with suppress(ProcessLookupError):
                        os.kill(user.pid, signal.SIGKILL)
        if which != "trainer":
            server.kill()
            server.start()
        if number == KILLS - 1:
            break
    until_s = time.monotonic() + 600
    while time.monotonic() < until_s:
        with suppress(openai.APIConnectionError):
            found = [client.fine_tuning.jobs.retrieve(job.id) for job in jobs]
            if all(one.status not in ("queued", "running") for one in found):
                break
        time.sleep(1)
    assert [one.status for one in found] == ["succeeded"] * 3, found
    assert len(client.models.list().data) == 4  # each job made one model, beside the base
    config = next((tmp_path / "runs").glob("*/run.json"))
    undisturbed = RunDir(tmp_path / "undisturbed")
    configuration = tmp_path / "config.yaml"
    configuration.write_text(json.dumps(json.loads(config.read_text())["config"]))
    subprocess.run(
        [sys.executable, "-m", "fluxtrain", "train", str(configuration), "--run-dir",
         str(undisturbed.path)],
        check=True, capture_output=True,
    )  # fmt: skip
    expected = losses(undisturbed)
    disturbed = [losses(RunDir(tmp_path / "runs" / job.id)) for job in jobs]
    assert expected in disturbed
    assert disturbed[0] == disturbed[1] != disturbed[2]
    assert all(list(one) and set(one) == set(range(1, 41)) for one in disturbed)
    server.kill()


class Shared:
    """One of the servers of a database, in a process of its own."""

    def __init__(self, folder: Path, db: str, *cards: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        place = (str(folder / "service"), db, str(self.port))
        self._command = [sys.executable, "-m", "tests.serve.fake_server", *place, *map(str, cards)]
        self._log = (folder / "log").open("a")
        self.hangs_until_s = 0.0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)

    def trouble(self, draw: random.Random) -> str:
        """Kill it, start it again, or let it hang for longer than its lease."""
        if self.hangs_until_s:
            if time.monotonic() > self.hangs_until_s:
                self.process.send_signal(signal.SIGCONT)
                self.hangs_until_s = 0.0
            return ""
        if self.process.poll() is not None:
            self.start()
            return ""
        if draw.random() < 0.3:
            self.hangs_until_s = time.monotonic() + HANG_S
            self.process.send_signal(signal.SIGSTOP)
            return "hang"
        self.end()
        return "kill of a server"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hangs_until_s = 0.0


@pytest.mark.slow
def test_two_servers_on_a_postgres_run_each_job_once_whatever_is_killed(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    draw, db = random.Random(7), postgres.new_database()
    store = Store(tmp_path / "service", db=db)
    key = add_key(store, "soak", "admin")
    servers = [Shared(tmp_path, db, 0, 1), Shared(tmp_path, db, 2, 3)]
    clients = [
        openai.OpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key=key, max_retries=100)
        for one in servers
    ]
    file = upload(clients[0])

    def ask(number: int) -> str:
        header = {"Idempotency-Key": str(number)}
        job: Any = create(clients[number % 2], "slow", file=file, extra_headers=header)
        return str(job.id)

    troubles: Counter[str] = Counter()
    open_jobs = sa.select(jobs.c.id).where(jobs.c.outcome.is_(None))
    began_s = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, number) for number in range(JOBS)]
        while not all(one.done() for one in asked) or store.rows(open_jobs):
            assert time.monotonic() - began_s < 3000, troubles
            time.sleep(draw.uniform(0.5, 3.0))
            troubles[trouble(draw, servers, postgres, tmp_path / "runs")] += 1
    for one in servers:
        one.end()
    assert_each_once(store, {one.result() for one in asked})
    starts = Counter(row["tries"]["started"] for row in store.rows(sa.select(jobs.c.tries)))
    print(f"{JOBS} jobs in {time.monotonic() - began_s:.0f} s; {dict(troubles)}; starts: {starts}")
    store.close()


def trouble(draw: random.Random, servers: list[Shared], postgres: Postgres, runs: Path) -> str:
    """Make some trouble, or none; return its name."""
    chance = draw.random()
    if chance < 0.3:
        return draw.choice(servers).trouble(draw)
    if chance < 0.4:
        postgres.stop()
        time.sleep(draw.uniform(0.0, 2.0))
        postgres.start()
        return "restart of Postgres"
    training = [run for run in list_runs(runs) if run.state == "running"]
    user = RunDir(draw.choice(training).path).user() if training and chance < 0.7 else None
    if user is None:
        return ""
    with suppress(ProcessLookupError):
        os.kill(user.pid, signal.SIGKILL)
    return "kill of a trainer"


def assert_each_once(store: Store, made: set[str]) -> None:
    """Check that every job succeeded, was finished by one trainer, and made one version."""
    outcomes = {row["id"]: row["outcome"] for row in store.rows(sa.select(jobs))}
    assert made == set(outcomes) and len(made) == JOBS
    assert {one["status"] for one in outcomes.values()} == {"succeeded"}, outcomes
    for one in made:
        events = list(read_events(run_of(one).journal))
        finished = [event for event in events if isinstance(event, Done)]
        assert [event.exit_code for event in finished] == [0] and events[-1] is finished[0]
        assert {event.step for event in events if isinstance(event, StepFinished)} == {1, 2, 3, 4}
    assert len(store.rows(sa.select(versions))) == JOBS
    left = [one.name for one in store.configs.iterdir() if not one.name.endswith("-plan.yaml")]
    assert not left  # plans that a kill left go in an hour
