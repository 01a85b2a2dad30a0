"""The mirror in MLflow: all arrives once, and no trouble of it holds up a job or a request."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any

import httpx
import pytest

from fluxtrain.events.events import StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.serve import mirror
from fluxtrain.serve.jobs import run_of
from tests.serve.conftest import Served, create, ended, wait_for
from tests.serve.fake_mlflow import FakeMlflow


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMlflow]:
    for name, value in (("PERIOD_S", 0.1), ("LONGEST_PAUSE_S", 0.3), ("TIMEOUT_S", 0.4)):
        monkeypatch.setattr(mirror, name, value)
    fake = FakeMlflow()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", fake.url)
    yield fake
    fake.close()


def statuses(mlflow: FakeMlflow) -> list[str]:
    return [one["status"] for one in mlflow.runs.values()]


def promote(served: Served, version: str, name: str = "best") -> None:
    headers = {"Authorization": f"Bearer {served.keys['admin']}"}
    address = f"{served.url}/fluxtrain/aliases/{name}"
    assert httpx.post(address, headers=headers, json={"version": version}).status_code == 200


def test_runs_versions_and_aliases_arrive_once_over_all_restarts(
    mlflow: FakeMlflow, serve: Callable[..., Served]
) -> None:
    served = serve()
    client = served.client()
    job = create(client, "waits")
    wait_for(lambda: statuses(mlflow) == ["RUNNING"])
    served.close()
    (run_of(job.id).path / "go").touch()
    served = serve()
    client = served.client()
    done = ended(client, job.id)
    wait_for(lambda: statuses(mlflow) == ["FINISHED"])
    (run,) = mlflow.runs.values()
    steps = [one for one in read_events(run_of(job.id).journal) if isinstance(one, StepFinished)]
    losses = {(key[1], key[3]) for key in run["metrics"] if key[0] == "train/loss"}
    assert losses == {(one.step, one.loss) for one in steps} and len(losses) == 4
    assert run["tags"]["fluxtrain.job"] == job.id
    (version,) = mlflow.versions
    assert (version["name"], version["run_id"]) == ("fluxtrain-default", run["id"])
    promote(served, done.fine_tuned_model, "the.best")
    wait_for(lambda: mlflow.models["fluxtrain-default"] == {"the_best": "1"})
    address = f"{served.url}/fluxtrain/aliases/the.best"
    httpx.delete(address, headers={"Authorization": f"Bearer {served.keys['admin']}"})
    wait_for(lambda: mlflow.models["fluxtrain-default"] == {})
    assert ended(client, create(client, "exit-4@2").id).status == "failed"
    wait_for(lambda: statuses(mlflow) == ["FINISHED", "FAILED"])
    served.close()
    mlflow.asked.clear()
    serve()
    wait_for(lambda: "DELETE registered-models/alias" in mlflow.asked)
    assert not any(one.startswith(("POST runs", "POST model")) for one in mlflow.asked)


@pytest.mark.parametrize("trouble", ["down", "500", "slow"])
def test_an_mlflow_in_trouble_holds_nobody_up_and_gets_all_afterwards(
    mlflow: FakeMlflow,
    serve: Callable[..., Served],
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mlflow.trouble = trouble
    if trouble == "down":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    served = serve()
    client = served.client()
    job = ended(client, create(client).id)
    assert job.status == "succeeded" and "FINISHED" not in statuses(mlflow)
    promote(served, job.fine_tuned_model)
    began_s = time.monotonic()
    for _ in range(20):
        client.models.list()
    assert time.monotonic() - began_s < 5
    wait_for(lambda: "mlflow: it is away" in capfd.readouterr().err)
    mlflow.trouble = ""
    if trouble == "down":
        served.close()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.url)
        served = serve()
    wait_for(lambda: mlflow.models.get("fluxtrain-default") == {"best": "1"})
    assert statuses(mlflow) == ["FINISHED"] and len(mlflow.versions) == 1
    (run,) = mlflow.runs.values()
    assert len({key for key in run["metrics"] if key[0] == "train/loss"}) == 4


def test_a_run_that_mlflow_refuses_is_left_out_and_others_are_sent(
    mlflow: FakeMlflow, serve: Callable[..., Served]
) -> None:
    client = serve().client()
    job: Any = create(client, "waits")
    wait_for(lambda: statuses(mlflow) == ["RUNNING"])
    mlflow.runs.clear()  # somebody deleted it there
    (run_of(job.id).path / "go").touch()
    other = create(client)
    assert ended(client, job.id).status == ended(client, other.id).status == "succeeded"
    wait_for(lambda: statuses(mlflow) == ["FINISHED"])
    assert next(iter(mlflow.runs.values()))["tags"]["fluxtrain.job"] == other.id


def test_an_alias_waits_for_its_version(
    mlflow: FakeMlflow, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    may, own = threading.Event(), mirror.Mirror._send_run
    monkeypatch.setattr(mirror.Mirror, "_send_run", lambda *of: may.is_set() and own(*of))
    served = serve()
    promote(served, ended(served.client(), create(served.client()).id).fine_tuned_model)
    time.sleep(0.5)  # looks at the alias
    may.set()
    wait_for(lambda: mlflow.models.get("fluxtrain-default") == {"best": "1"}, 10)


@pytest.mark.slow
@pytest.mark.skipif(which("mlflow") is None, reason="needs MLflow's own server on the path")
def test_a_real_mlflow_has_runs_metrics_versions_and_aliases(
    serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PERIOD_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = f"sqlite:///{tmp_path}/mlflow.db"
    started = ["mlflow", "server", "--port", str(port), "--backend-store-uri", store]
    with subprocess.Popen([*started, "--workers", "1"], cwd=tmp_path) as server:
        url = f"http://127.0.0.1:{port}"
        asked = httpx.Client(base_url=f"{url}/api/2.0/mlflow/", timeout=30)
        try:
            wait_for(lambda: answers(f"{url}/health"), 120)
            monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
            served = serve()
            done = ended(served.client(), create(served.client()).id)
            promote(served, done.fine_tuned_model, "the.best")
            name = {"name": "fluxtrain-default"}

            def model() -> dict[str, Any]:
                told = asked.get("registered-models/get", params=name).json()
                return told.get("registered_model", {})

            wait_for(lambda: model().get("aliases") == [{"alias": "the_best", "version": "1"}], 60)
            (version,) = model()["latest_versions"]
            run = {"run_id": version["run_id"]}
            data = asked.get("runs/get", params=run).json()["run"]
            wait_for(lambda: data["info"]["status"] == "FINISHED")
            assert {one["key"]: one["value"] for one in data["data"]["tags"]}[
                "fluxtrain.job"
            ] == done.id
            losses = {**run, "metric_key": "train/loss"}
            history = asked.get("metrics/get-history", params=losses).json()["metrics"]
            steps = read_events(run_of(done.id).journal)
            told = {(one.step, one.loss) for one in steps if isinstance(one, StepFinished)}
            assert {(int(one["step"]), one["value"]) for one in history} == told
        finally:
            server.terminate()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url).status_code == 200
    return False
