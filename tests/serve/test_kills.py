"""Server, trainer or both are killed at random moments; every job still succeeds once (S2)."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from fluxtrain.events.events import StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.run_dir import RunDir, list_runs
from tests.serve.conftest import rows

KILLS = 20
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
