"""What clients and clocks do to a server that it has to stand: large bodies and lines, streams that
nobody reads, a clock that is set back."""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest

from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import LogWritten
from fluxtrain.serve import queue
from fluxtrain.serve.app import SEND_JSON
from fluxtrain.serve.jobs import JobRequest, _refuse_closed, run_of
from fluxtrain.serve.refusal import Refusal
from fluxtrain.serve.settings import Quotas
from fluxtrain.serve.uploads import add_file
from tests.serve.conftest import Served, create, ended, rows, upload, wait_for

MIB = 1 << 20


def connected(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").removesuffix("/v1").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def request(served: Served, line: str, *headers: str) -> bytes:
    key = f"Authorization: Bearer {served.keys['admin']}"
    return "\r\n".join([f"{line} HTTP/1.1", "Host: x", key, *headers, "", ""]).encode()


def memory_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_three_gigabytes_are_refused_before_they_come_and_while_they_do(served: Served) -> None:
    before = memory_bytes()
    headers = ("Content-Type: multipart/form-data; boundary=b", f"Content-Length: {3 << 30}")
    with connected(served) as client:
        client.sendall(request(served, "POST /v1/files", *headers))
        answer = b""
        while b"}" not in answer:  # nothing of the body has been sent
            answer += client.recv(65536)
        assert b" 413 " in answer.partition(b"\r\n")[0] and b"512 MiB" in answer
        for _ in range(256):  # a client that does not listen: it is let send, for the answer's sake
            client.sendall(bytes(MIB))
        assert memory_bytes() - before < 64 * MIB
    assert not list(served.service.store.files.iterdir())
    assert upload(served.client())


class Generated(io.RawIOBase):
    """Content that is made while it is read."""

    def __init__(self, begins: bytes, size_bytes: int, ends: bytes) -> None:
        self._pieces = iter([begins, *[b"a" * MIB] * (size_bytes // MIB), ends, b""])
        self.given = 0

    def read(self, size: int = -1) -> bytes:
        piece = next(self._pieces)
        self.given += len(piece)
        return piece


@pytest.mark.parametrize("size_bytes", [100 * MIB, 3 << 30])
def test_a_line_without_an_end_costs_no_memory_and_is_refused(
    served: Served, size_bytes: int
) -> None:
    begins = b'{"messages": [{"role": "user", "content": "'
    content: Any = Generated(begins, size_bytes, b'"}]}\n')
    before, store = memory_bytes(), served.service.store
    told = "longer than 64.0 MiB" if size_bytes < 512 * MIB else "more than 512 MiB"
    with pytest.raises(Refusal, match=told) as refused:
        add_file(store, Quotas(), "default", "data.jsonl", content)
    assert refused.value.status == (400 if size_bytes < 512 * MIB else 413)
    assert content.given <= 514 * MIB
    assert memory_bytes() - before < 256 * MIB
    assert not list(store.files.iterdir())


def test_an_event_stream_that_nobody_reads_holds_nobody_up(served: Served, tmp_path: Path) -> None:
    client = served.client()
    job = create(client, "waits")
    wait_for(run_of(job.id).journal.exists)
    emitter = Emitter(tmp_path / "many", None)
    emitter.emit(LogWritten(level="warning", text="x" * 2000))
    emitter.close()
    line = json.loads((tmp_path / "many").read_bytes())
    with run_of(job.id).journal.open("ab") as journal:  # 20 MB of warnings
        for number in range(10_000):
            journal.write(json.dumps({**line, "seq": 1000 + number}).encode() + b"\n")
    before = memory_bytes()
    deaf = [connected(served) for _ in range(4)]
    for one in deaf:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(request(served, f"GET /v1/fine_tuning/jobs/{job.id}/events?stream=true"))
    time.sleep(1.0)
    started_s = time.monotonic()
    assert client.models.list().data and client.fine_tuning.jobs.retrieve(job.id).id == job.id
    assert time.monotonic() - started_s < 5
    assert memory_bytes() - before < 100 * MIB
    for one in deaf:
        one.close()
    client.fine_tuning.jobs.cancel(job.id)
    assert ended(client, job.id).status == "cancelled"


def test_an_answer_that_nobody_reads_holds_nobody_up(served: Served) -> None:
    client, words = served.client(), ("word" * 64 + " ") * 4_000
    body = json.dumps(
        {"model": "demo", "stream": True, "messages": [{"role": "user", "content": words}]}
    ).encode()
    headers = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    with connected(served) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(request(served, "POST /v1/chat/completions", *headers) + body)
        time.sleep(0.5)
        message: Any = {"role": "user", "content": "one two"}
        answer = client.chat.completions.create(model="demo", messages=[message], timeout=30)
        assert answer.choices[0].message.content == "one two "
    wait_for(lambda: not served.service.worker._worker.waiting)  # type: ignore[union-attr]


@pytest.mark.parametrize("step_s", [-1800.0, -3600.0])
def test_a_clock_that_is_set_back_loses_no_job_and_keeps_the_order(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    served = serve()
    client = served.client()
    job = create(client, "waits", "exit-8@1")
    wait_for(run_of(job.id).journal.exists)
    clock = SimpleNamespace(time=lambda: time.time() + step_s, monotonic=time.monotonic)
    with served.service.store.write():  # between two looks of the queue
        (run_of(job.id).path / "go").touch()
        time.sleep(0.2)
    wait_for(lambda: client.fine_tuning.jobs.list_events(job.id).data[0].level == "warn")
    monkeypatch.setattr(queue, "time", clock)  # it was to wait for ten seconds
    done = ended(client, job.id, timeout_s=30)
    assert done.status in ("succeeded", "failed"), done
    events = client.fine_tuning.jobs.list_events(job.id, limit=100).data
    steps = [one.data["step"] for one in events if one.type == "metrics"]
    assert steps == sorted(steps, reverse=True) and steps[0] == 4
    assert upload(client, rows(9)) == client.files.list().data[0].id


@pytest.mark.parametrize(
    "field", [{"metadata": {"a": "\ud83d"}}, {"fluxtrain": {"\ud83d": 1}}, {"suffix": "\ud83d"}]
)
def test_half_a_character_in_a_body_is_refused_in_words(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="half of a character"):
        JobRequest(model="demo", training_file="file-1", **field)


@pytest.mark.parametrize(
    "given",
    [
        {"placement": {"disk_path": "/etc"}},
        {"placement": {"disk": "on"}},
        {"image": {"cache": "/etc"}},
        {"comm": {"compress": "int8"}},
        {"fsdp": {"enabled": True}},
        {"trainer": {"fsdp": {"enabled": True}}},
        {"data": {"path": "/etc/passwd"}},
    ],
    ids=str,
)
def test_a_job_may_not_set_what_is_the_operators(given: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="is the operator's and no job's: leave it out"):
        _refuse_closed(given)


def refused(served: Served, path: str, body: Any, **headers: str) -> dict[str, Any]:
    """Send a body that is refused; return OpenAI's error object."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **headers}
    given["Authorization"] = f"Bearer {served.keys['admin']}"
    answer = httpx.post(served.url + path, content=content, headers=given)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


PATHS = (
    "/chat/completions",
    "/completions",
    "/fine_tuning/jobs",
    "/tunings.create",
    "/fluxtrain/aliases/a",
    "/fluxtrain/jobs/ftjob-1/apply",
    "/../generate?adapter=demo",
)


def test_a_body_that_is_no_json_is_refused_in_a_sentence(served: Served) -> None:
    deep, long = b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"
    for path in PATHS:
        for body in (b"{", b'{"model": }', b"\xff\xfe", b'{"model": "\xe9"}', deep, long):
            error = refused(served, path, body)
            assert error["message"].startswith("the body is not valid JSON"), error
            assert error["param"] is None
    error = refused(served, "/fine_tuning/jobs", b'{"model": }')
    assert error["message"] == f"the body is not valid JSON (character 11): {SEND_JSON}"


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", f"the body is missing: {SEND_JSON}", None),
        (b"3", f"the body must be a JSON object: {SEND_JSON}", None),
        ({"model": "demo"}, "messages is missing", "messages"),
        ({"model": "demo", "messages": []}, "messages must not be empty", "messages"),
        ({"model": "demo", "messages": [3]}, "messages.0 must be a JSON object", "messages.0"),
        ({"model": 3, "messages": [{}]}, "model must be a valid string", "model"),
        (
            {"model": "demo", "messages": [{}], "max_tokens": 0},
            "max_tokens must be greater than or equal to 1",
            "max_tokens",
        ),
        (
            {"model": "demo", "messages": [{}], "stop": 3},
            "stop must be a valid string or a valid list",
            "stop",
        ),
        (
            {"model": "demo", "messages": [{}], "tools": [], "n": None},
            "tools is not known here",
            "tools",
        ),
    ],
    ids=str,
)
def test_a_body_that_does_not_fit_is_refused_in_a_sentence(
    served: Served, body: Any, message: str, param: str | None
) -> None:
    error = refused(served, "/chat/completions", body)
    assert (error["message"], error["param"]) == (message, param)


def test_json_without_its_content_type_is_told_what_to_send(served: Served) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # curl -d without -H
    error = refused(served, "/chat/completions", body, **form)
    assert error["message"].endswith(SEND_JSON)


def test_an_upload_that_is_no_form_is_refused_in_a_sentence(served: Served) -> None:
    for kind in ("multipart/form-data", "multipart/form-data; boundary=b"):
        error = refused(served, "/files", b"x", **{"Content-Type": kind})
        assert error["message"].startswith("the upload is no form that can be read"), error


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("n_epochs", "1000000000000000", "'auto' or a whole number from 1 to 1,000"),
        ("n_epochs", "9" * 400, "'auto' or a whole number from 1 to 1,000"),
        ("n_epochs", "NaN", "'auto' or a whole number from 1 to 1,000"),
        ("n_epochs", "0", "passes over the file"),
        ("n_epochs", "2.5", "'auto' or a whole number"),
        ("n_epochs", "true", "'auto' or a whole number"),
        ("n_epochs", '"3"', "'auto' or a whole number"),
        ("batch_size", "1000000000", "'auto' or a whole number from 1 to 65,536"),
        ("batch_size", "-1", "rows of one step"),
        ("learning_rate_multiplier", "NaN", "'auto' or a number from 1e-06 to 1,000"),
        ("learning_rate_multiplier", "Infinity", "times the usual learning rate"),
        ("learning_rate_multiplier", "1e9", "not 1000000000.0"),
        ("learning_rate_multiplier", "0", "from 1e-06"),
    ],
)
def test_a_hyperparameter_out_of_its_range_is_refused_with_the_range(
    served: Served, name: str, value: str, told: str
) -> None:
    within = f'{{"{name}": {value}}}'
    for place, given in (
        ("hyperparameters", within),
        ("method", f'{{"supervised": {{"hyperparameters": {within}}}}}'),
    ):
        body = f'{{"model": "demo", "training_file": "file-1", "{place}": {given}}}'
        error = refused(served, "/fine_tuning/jobs", body.encode())
        assert told in error["message"] and len(error["message"]) < 200
        assert error["param"].endswith(f"hyperparameters.{name}")
    assert not served.client().fine_tuning.jobs.list().data


def test_a_plan_of_endless_steps_is_no_job(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError, match=r"hyperparameters\.n_epochs") as told:
        create(client, "steps-20000000", hyperparameters={"n_epochs": 3})
    assert "20,000,000 steps, and 10,000,000 are the most" in str(told.value)
    assert not client.fine_tuning.jobs.list().data


def test_what_the_planner_refuses_has_the_names_of_the_request(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as told:
        create(served.client(), "too-many-rows", hyperparameters={"batch_size": 40})
    assert told.value.param == "hyperparameters.batch_size"
    assert "lower hyperparameters.batch_size" in str(told.value)


@pytest.mark.parametrize("role", ["foo", "User", "function", None, 3])
def test_a_role_that_no_model_knows_is_refused_as_openai_does(served: Served, role: Any) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}, {"role": role, "content": "Ho"}]
    for stream in (False, True):
        error = refused(
            served, "/chat/completions", {"model": "demo", "messages": messages, "stream": stream}
        )
        assert error["message"] == (
            f"Invalid value: {role!r}. Supported values are: 'system', 'developer', 'user', "
            "'assistant', and 'tool'."
        )
        assert (error["param"], error["code"]) == ("messages[1].role", "invalid_value")
    row = json.dumps({"messages": [{"role": "foo", "content": "Hi"}, messages[0]]}).encode()
    with pytest.raises(openai.BadRequestError, match="one of system, developer, user, assistant"):
        upload(served.client(), row)


def test_numbers_that_are_none_are_refused_by_their_field(served: Served) -> None:
    gate = b'{"version": "ft:a", "gate": {"file": "file-1", "min_gain": NaN}}'
    assert refused(served, "/fluxtrain/aliases/best", gate)["param"] == "gate.min_gain"
    chat = b'{"model": "demo", "temperature": Infinity, "messages": [{"role": "user"}]}'
    assert refused(served, "/chat/completions", chat)["param"] == "temperature"


def test_hyperparameters_count_in_both_of_their_places(served: Served) -> None:
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": {"batch_size": 2}}}
    given: Any = {"n_epochs": 3, "batch_size": 1}
    job = create(served.client(), method=method, hyperparameters=given)
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (3, 2)
    assert job.fluxtrain["config"]["train"] == {"epochs": 3.0, "batch_rows": 2}


def test_the_operators_model_is_not_deleted(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="demo is a model of the operator"):
        served.client().models.delete("demo")


def test_a_stop_with_open_streams_leaves_no_traceback(
    serve: Callable[..., Served], capfd: pytest.CaptureFixture[str]
) -> None:
    served = serve()
    job = create(served.client(), "waits")
    wait_for(run_of(job.id).journal.exists)
    listens = connected(served)
    listens.sendall(request(served, f"GET /v1/fine_tuning/jobs/{job.id}/events?stream=true"))
    listens.settimeout(10)
    assert b"200 OK" in listens.recv(4096)
    served.close()
    while listens.recv(65536):
        pass
    listens.close()
    assert "Traceback" not in capfd.readouterr().err
