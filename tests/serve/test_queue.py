"""Jobs through the queue: started once, whatever dies, and judged by how they ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from fluxtrain.events.run_folder.control import send_command
from fluxtrain.serve.backend import End
from fluxtrain.serve.jobs import run_of
from fluxtrain.serve.verdict import judge
from tests.serve.conftest import Served, create, ended, upload, wait_for


def notes(client: openai.OpenAI, job_id: str) -> str:
    return "\n".join(one.message for one in client.fine_tuning.jobs.list_events(job_id, limit=100))


@pytest.mark.parametrize("word", ["killed@2", "killed-early", "exit-1@2"])
def test_a_trainer_that_dies_goes_on_from_its_checkpoint(served: Served, word: str) -> None:
    client = served.client()
    job = ended(client, create(client, word).id)
    assert job.status == "succeeded", job
    assert "queued again" in notes(client, job.id)
    assert job.trained_tokens == 40


def test_a_job_that_cannot_succeed_fails_with_the_trainers_words(served: Served) -> None:
    client = served.client()
    job = ended(client, create(client, "exit-4@1").id)
    assert (job.status, job.error.message) == ("failed", "the fake failed with 4 in engine.log")
    assert job.fine_tuned_model is None
    assert str(served.service.store.folder.parent) not in notes(client, job.id)  # no server's paths


@pytest.mark.parametrize(
    ("code", "refused", "tries", "status"),
    [
        (0, False, {}, "succeeded"),
        (2, True, {}, "failed"),
        (3, True, {}, "failed"),
        (3, False, {}, "queued"),
        (3, False, {"step": 7, "memory": 1}, "failed"),
        (3, False, {"step": 6, "memory": 1}, "queued"),  # a step was made since
        (4, False, {}, "failed"),
        (5, False, {}, "queued"),
        (6, False, {}, "failed"),
        (7, False, {}, "queued"),
        (7, False, {"step": 7, "card": 1}, "failed"),
        (8, False, {"step": 7, "read": 3}, "failed"),
        (None, False, {"step": 7, "crash": 4}, "queued"),
        (None, False, {"step": 7, "crash": 5}, "failed"),
        (143, False, {}, "queued"),
    ],
)
def test_each_end_has_what_follows_from_it(
    code: int | None, refused: bool, tries: dict[str, Any], status: str
) -> None:
    end = End(code=code, refused=refused, message="why", free_bytes=1, needed_bytes=2)
    assert judge(end, "run", tries, 7).status == status
    asked = "succeeded" if code == 0 else "cancelled"
    assert judge(end, "cancel", tries, 7).status == asked


def test_a_server_that_comes_back_adopts_its_trainers(serve: Callable[..., Served]) -> None:
    first = serve()
    client = first.client()
    running, waiting = create(client, "waits"), create(client)
    wait_for(lambda: client.fine_tuning.jobs.retrieve(running.id).status == "running")
    first.close()
    client = serve().client()
    assert client.fine_tuning.jobs.retrieve(running.id).status == "running"
    user = run_of(running.id).user()
    (run_of(running.id).path / "go").touch()
    assert ended(client, running.id).status == ended(client, waiting.id).status == "succeeded"
    assert run_of(running.id).user() in (user, None)  # never another process
    assert "queued again" not in notes(client, running.id)


def test_pausing_keeps_a_job_and_resuming_goes_on(served: Served) -> None:
    client = served.client()
    job = create(client, "waits")
    wait_for(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "running")
    client.fine_tuning.jobs.pause(job.id)
    wait_for(lambda: run_of(job.id).liveness() == "stopped")
    paused = client.fine_tuning.jobs.retrieve(job.id)
    assert (paused.status, paused.fluxtrain["state"]) == ("queued", "paused")
    (run_of(job.id).path / "go").touch()
    client.fine_tuning.jobs.resume(job.id)
    assert ended(client, job.id).status == "succeeded"


@pytest.mark.parametrize("side", ["api", "app"])
def test_a_job_is_cancelled_from_either_side(served: Served, side: str) -> None:
    client = served.client()
    job = create(client, "waits")
    wait_for(run_of(job.id).socket.exists)
    if side == "api":
        assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    else:
        send_command(run_of(job.id).socket, "stop")
    assert ended(client, job.id).status == "cancelled"
    wait_for(lambda: run_of(job.id).liveness() == "stopped")
    with pytest.raises(openai.BadRequestError):
        client.fine_tuning.jobs.resume(job.id)


def test_one_request_sent_often_makes_one_job(served: Served) -> None:
    client = served.client(max_retries=3)
    file = upload(client)

    def send(number: int) -> str:
        headers = {"Idempotency-Key": "one"} if number % 2 else {"x-stainless-retry-count": "1"}
        job: Any = create(client, file=file, extra_headers=headers)
        return str(job.id)

    with ThreadPoolExecutor(16) as threads:
        ids = set(threads.map(send, range(50)))
    assert len(ids) <= 2  # with a key, and repeats without one
    assert len(list(client.fine_tuning.jobs.list())) == len(ids)
    with pytest.raises(openai.UnprocessableEntityError):
        create(client, file=file, seed=7, extra_headers={"Idempotency-Key": "one"})


def test_events_are_told_as_they_come_and_again_from_where_a_client_was(served: Served) -> None:
    client = served.client()
    job = create(client, "waits")
    wait_for(run_of(job.id).socket.exists)
    (run_of(job.id).path / "go").touch()
    address = f"{served.url}/fine_tuning/jobs/{job.id}/events?stream=true"
    headers = {"Authorization": f"Bearer {served.keys['read']}"}

    def told(**more: str) -> list[tuple[str, dict[str, Any]]]:
        with httpx.stream("GET", address, headers={**headers, **more}, timeout=60) as answer:
            lines = [line for line in answer.iter_lines() if line]
        pairs = zip(lines[::2], lines[1::2], strict=True)
        return [(first[4:], json.loads(second[6:])) for first, second in pairs]

    every = told()
    steps = [event for _, event in every if event["message"].startswith("Step")]
    assert [one["data"]["step"] for one in steps] == [1, 2, 3, 4]
    at = next(number for number, (_, event) in enumerate(every) if event is steps[1])
    rest = told(**{"Last-Event-ID": every[at][0]})
    assert [event for _, event in rest] == [event for _, event in every[at + 1 :]]
    listed = {one.id for one in client.fine_tuning.jobs.list_events(job.id, limit=2)}
    assert listed == {event["id"] for _, event in every}
