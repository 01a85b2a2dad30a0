"""Checks of the tasks about the service: SDK, registry, metrics."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

from fluxtrain.commands.learn.checking import Wrong, require
from fluxtrain.errors import BadInput

KEY = "sk-flux-learner"
SLOW_S = 0.3  # of an answer to `wait`
JOBS_AT_ONCE = 8

# -- 3: SDK ---------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    """Answers as `fluxtrain serve` does, and fails where a network does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.jobs: dict[str, int] = {}  # how often each was asked for
        self.by_key: dict[str, str] = {}
        self.posts = 0
        self.faults: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.posts += 1
            fault = self.server.faults.pop(0) if self.server.faults else ""
        if not self._is_known():
            return None
        if fault == "busy":
            return self._say(503, _error("a job is planned now: ask again"), {"Retry-After": "1"})
        if body.get("model") != "demo":
            return self._say(404, _error("no model 'x' can be trained here: use one of demo"))
        with self.server.lock:
            name = f"ftjob-{len(self.server.jobs)}"
            key = self.headers.get("Idempotency-Key")
            name = self.server.by_key.setdefault(key, name) if key else name
            self.server.jobs.setdefault(name, 0)
        if fault == "lost":  # it is done, and the answer does not arrive
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return None
        return self._say(200, {"id": name, "status": "queued"})

    def do_GET(self) -> None:
        if not self._is_known():
            return
        name = self.path.rpartition("/")[2]
        time.sleep(SLOW_S)
        with self.server.lock:
            asked = self.server.jobs[name] = self.server.jobs.get(name, 0) + 1
        status = "running" if asked < 2 else "failed" if name.endswith("-1") else "succeeded"
        self._say(200, {"id": name, "status": status})

    def _is_known(self) -> bool:
        known = self.headers.get("Authorization") == f"Bearer {KEY}"
        if not known:
            self._say(401, _error("the key is not known: send it as a bearer token"))
        return known

    def _say(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        told = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        for name, value in (told | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


def check_sdk(own: ModuleType) -> str:
    """Let `Client` make jobs at a server that is busy, loses an answer, refuses and is slow."""
    server = _Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = own.Client(server.url, KEY)
    require(client.create_job("demo", "file-1") == "ftjob-0", "create_job returns the job's id")
    server.faults = ["busy"]
    began_s = time.monotonic()
    client.create_job("demo", "file-1")
    require(
        time.monotonic() - began_s >= 0.9,
        "after a 503 the request came again at once: wait the seconds of Retry-After",
    )
    require(len(server.jobs) == 2, "two calls of create_job make two jobs: each call has a new key")
    server.faults = ["lost"]
    client.create_job("demo", "file-1")
    require(
        len(server.jobs) == 3,
        "an answer was lost on its way, the request was sent again, and now two jobs train in "
        "place of one: send the same Idempotency-Key with each try of one call",
    )
    server.posts = 0
    try:
        client.create_job("x", "file-1")
    except Exception as error:  # noqa: BLE001 - the learner's own
        require(
            "use one of demo" in str(error),
            f"the error says {str(error)!r}, not why: pass on error.message of the answer",
        )
    else:
        raise Wrong("a 404 raises no error: the caller takes its job to be queued")
    require(server.posts == 1, f"a 404 was sent {server.posts} times: it stays wrong, send it once")
    require(client.wait("ftjob-0") == "succeeded", "wait returns the last status")
    require(client.wait("ftjob-1") == "failed", "wait ends at failed and cancelled, too")
    names = [f"ftjob-{number}" for number in range(100, 100 + JOBS_AT_ONCE)]
    began_s = time.monotonic()
    found = asyncio.run(client.wait_all(names))
    took_s = time.monotonic() - began_s
    require(list(found) == ["succeeded"] * JOBS_AT_ONCE, "wait_all returns statuses in order")
    require(
        took_s < JOBS_AT_ONCE * SLOW_S * 2,
        f"wait_all asked for {JOBS_AT_ONCE} jobs one after the other ({took_s:.1f} s): await them "
        "together",
    )
    server.shutdown()
    return "busy, lost and refused requests end as they should, and no job is made twice"


# -- 5: registry ----------------------------------------------------------------------------------


def check_registry(own: ModuleType) -> str:
    """Keep versions, change files behind the registry's back, promote and look back."""
    with tempfile.TemporaryDirectory() as made:
        root, trained = Path(made, "registry"), Path(made, "model")
        trained.mkdir()
        (trained / "adapter.safetensors").write_bytes(b"a" * 64)
        (trained / "config.json").write_text("{}")
        registry, kept = own.Registry(root), b""
        first = registry.add(trained)
        require(
            registry.add(trained) == first,
            "the same files are two versions: name them by a digest of their contents",
        )
        (trained / "adapter.safetensors").write_bytes(b"b" * 64)
        second = registry.add(trained)
        require(
            first != second,
            "other weights of the same size have the same version: put the "
            "contents into the digest, not names and sizes",
        )
        with suppress(ValueError):
            kept = Path(registry.open(first), "adapter.safetensors").read_bytes()
        require(kept == b"a" * 64, "training again has changed the first version: copy its files")
        _check_promotion(own, registry, root, first, second)
        Path(registry.open(second), "adapter.safetensors").write_bytes(b"c" * 64)
        try:
            registry.open(second)
        except ValueError:
            return "versions are immutable, a change is noticed, and aliases keep their history"
        raise Wrong(
            "a file was changed in the registry and open() does not raise ValueError: "
            "compare the digest each time"
        )


def _check_promotion(own: ModuleType, registry: Any, root: Path, first: str, second: str) -> None:
    with suppress(KeyError):
        registry.current("best")
        raise Wrong("current() of an alias that does not exist has to raise KeyError")
    require(registry.promote("best", first, 0.8), "the first promotion of an alias passes")
    moved = registry.promote("best", second, 0.79, min_gain=0.1)
    require(
        not moved and registry.current("best") == first,
        "0.8 to 0.79 is less than min_gain 0.1, and the alias was moved: the gate stands open",
    )
    require(
        registry.promote("best", second, 0.5, min_gain=0.1), "a gain of 0.3 passes min_gain 0.1"
    )
    again = own.Registry(root)
    require(
        again.current("best") == second,
        "another Registry of the folder does not see the alias: write it to the disk",
    )
    require(
        again.history("best") == [first, second],
        f"the history is {again.history('best')}, not "
        "the versions in order: append, never overwrite",
    )


# -- 8: metrics -----------------------------------------------------------------------------------


def _journal(path: Path) -> None:
    """Write a run's journal: resumed once, its last line torn."""
    from fluxtrain.events.emitter import Emitter
    from fluxtrain.events.events import Heartbeat, StepFinished

    emitter = Emitter(path)
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.25), (2, 2.75)):  # killed after 3, resumed from 1
        emitter.emit(
            StepFinished(
                step=step,
                total_steps=9,
                epoch=0.0,
                loss=loss,
                learning_rate=0.1,
                grad_norm=None,
                tokens=10,
                total_tokens=10 * step,
                step_s=0.5,
                tokens_per_s=20.0,
                phases_s={},
                stalls_s={"weights": 0.125, "disk": 0.25},
            )
        )
        emitter.emit(Heartbeat(phase="training", step=step))
    emitter.close()
    with path.open("ab") as file:
        file.write(b'{"event":"step","seq":99,"step":7,"lo')


def check_metrics(own: ModuleType) -> str:
    """Read what `exposition` writes with Prometheus' own parser."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        raise BadInput(
            "this check needs prometheus-client: pip install 'fluxtrain[serve]'"
        ) from error

    job = 'a "quoted"\nname\\'
    with tempfile.TemporaryDirectory() as made:
        path = Path(made, "events.ndjson")
        _journal(path)
        text = own.exposition(path, job)
        shutil.rmtree(made)
        empty = own.exposition(path, job)  # a run that was deleted meanwhile
        Path(made).mkdir()
    require("job_loss" not in empty, "a journal that is gone gives no samples, and no error")
    try:
        families = {one.name: one for one in text_string_to_metric_families(text)}
    except ValueError as error:
        raise Wrong(
            f"Prometheus cannot read the text ({error}): in a label's value escape the "
            "backslash, the quote and the line end"
        ) from error
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    name = ("job", job)
    require(any(name in key for key in samples), f"no sample has the label job={job!r}")
    loss = samples.get(("job_loss", name))
    require(
        loss != 2.25,
        "the run was resumed from step 1 and is at step 2 again: the newest line "
        "counts, not the highest step",
    )
    require(loss == 2.75, f"job_loss is {loss}, and the newest step has 2.75")
    total = samples.get(("job_tokens_total", name))
    require(total == 20, f"job_tokens_total is {total}, and the newest step says 20")
    family = families.get("job_tokens")
    require(
        family is not None and family.type == "counter",
        "job_tokens_total is a counter: say so in its # TYPE line",
    )
    stall = samples.get(("job_stall_seconds", ("cause", "disk"), name))
    require(stall == 0.25, "job_stall_seconds has a sample for each cause, in the label `cause`")
    return "Prometheus reads the newest step, also of a torn, resumed or deleted run"
