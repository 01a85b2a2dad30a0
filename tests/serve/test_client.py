"""What the openai SDK lacks: `fluxtrain.serve.client`, the short verbs, usage and retention."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from fluxtrain.serve.client import AsyncClient, Client, ServerRefused
from fluxtrain.serve.jobs import run_of
from fluxtrain.serve.retention import delete_old
from fluxtrain.serve.settings import Quotas
from fluxtrain.serve.store import files, jobs
from tests.serve.conftest import Served, create, ended, rows, upload, wait_for


def test_events_are_followed_through_a_server_that_comes_back(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    first = serve()
    data = tmp_path / "data.jsonl"
    data.write_bytes(rows())
    key, port = first.keys["admin"], int(first.url.split(":")[2].split("/")[0])
    told: list[dict[str, Any]] = []
    with Client(first.url, key, tries=20) as client:
        file = client.upload(data)["id"]
        extra = {"samples": {"prompts": ["waits"]}}
        job = client.create_job(model="demo", training_file=file, fluxtrain=extra)["id"]

        def restart() -> None:
            wait_for(lambda: told)
            first.close()
            serve(port=port)
            (run_of(job).path / "go").touch()

        thread = threading.Thread(target=restart)
        thread.start()
        for event in client.follow(job):
            told.append(event)
        thread.join()
        done = client.wait(job)
    assert done["status"] == "succeeded"
    ids = [event["id"] for event in told]
    assert len(ids) == len(set(ids))
    steps = [event["data"]["step"] for event in told if event["message"].startswith("Step")]
    assert steps == [1, 2, 3, 4]


async def test_a_request_that_was_carried_out_but_not_answered_is_not_done_twice(
    served: Served,
) -> None:
    file = upload(served.client())
    lost = []

    async def answered(response: httpx.Response) -> None:
        if response.request.method == "POST" and not lost:
            lost.append(response.status_code)
            raise httpx.ReadError("the connection was cut behind the commit")

    async with AsyncClient(served.url, served.keys["train"]) as client:
        client._http.event_hooks["response"].append(answered)
        job = await client.create_job(model="demo", training_file=file)
        assert lost == [200]
        assert len((await client.request("GET", "fine_tuning/jobs"))["data"]) == 1
        with pytest.raises(ServerRefused, match="no model") as refused:
            await client.create_job(model="other", training_file=file)
        assert refused.value.status == 404
        with pytest.raises(ServerRefused, match="has ended|no run|no trainer"):
            await client.wait(job["id"])
            await client.change(job["id"], "apply", chunk_rows=2)


def test_the_short_verbs_do_the_same(served: Served) -> None:
    headers = {"Authorization": f"Bearer {served.keys['admin']}"}
    file = upload(served.client())
    with httpx.Client(
        base_url=served.url.removesuffix("/v1"), headers=headers, timeout=60
    ) as client:
        body = {"model": "demo", "file": file, "steps": 4}
        job = client.post("/v1/tunings.create", json=body).json()
        done = ended(served.client(), job["id"])
        told = client.get("/v1/tunings.get", params={"id": job["id"]}).json()
        assert told["fine_tuned_model"] == done.fine_tuned_model
        assert told["fluxtrain"]["config"]["train"]["steps"] == 4
        asked = {"adapter": done.fine_tuned_model}
        answer = client.post("/generate", params=asked, json={"prompt": "one two"}).json()
        assert answer["choices"][0]["text"] == "one two "
        assert client.post("/generate?adapter=nobody", json={"prompt": "x"}).status_code == 404
        rows = client.get("/v1/fluxtrain/usage").json()["data"]
        kinds = {row["kind"]: row["amount"] for row in rows}
        assert kinds["answer_tokens"] == 2 and kinds["card_s"] >= 0


def test_quotas_of_a_project_are_kept(serve: Callable[..., Served]) -> None:
    served = serve(quotas=Quotas(queued_jobs=1, tokens_per_minute=4))
    client = served.client()
    job = create(client, "waits")
    status = httpx.post(
        f"{served.url}/fine_tuning/jobs",
        headers={"Authorization": f"Bearer {served.keys['admin']}"},
        json={"model": "demo", "training_file": upload(client)},
        timeout=60,
    )
    assert (status.status_code, status.headers["retry-after"]) == (429, "60")
    client.fine_tuning.jobs.cancel(job.id)
    wait_for(lambda: not served.service.queue.busy)
    message: Any = {"role": "user", "content": "one two"}
    client.chat.completions.create(model="demo", messages=[message])
    with pytest.raises(Exception, match="tokens of this minute"):
        client.chat.completions.create(model="demo", messages=[message])


def test_what_is_older_than_it_is_kept_goes_and_models_stay(served: Served) -> None:
    client, store = served.client(), served.service.store
    job = ended(client, create(client).id)
    young = upload(client, rows(9))
    with store.write() as connection:
        old = sa.select(files.c.id).where(files.c.id != young).scalar_subquery()
        connection.execute(sa.update(files).where(files.c.id == old).values(created_s=0.0))
        outcome = {**(store.one(sa.select(jobs.c.outcome)) or {})["outcome"], "at_s": 0.0}
        connection.execute(sa.update(jobs).values(created_s=0.0, outcome=outcome))
    delete_old(store, days=1.0)
    assert [one.id for one in client.files.list()] == [young]
    assert len(list(store.files.iterdir())) == 1
    assert not run_of(job.id).journal.exists()
    assert client.fine_tuning.jobs.retrieve(job.id).status == "succeeded"
    message: Any = {"role": "user", "content": "a"}
    assert client.chat.completions.create(model=job.fine_tuned_model, messages=[message]).choices


def test_a_thousand_jobs_are_listed_in_no_time(served: Served) -> None:
    client, store = served.client(), served.service.store
    first = ended(client, create(client).id)
    row = store.one(sa.select(jobs).where(jobs.c.id == first.id))
    assert row is not None
    copies = [{**row, "id": f"ftjob-{n}", "number": n, "repeat_key": None} for n in range(2, 1002)]
    with store.write() as connection:
        connection.execute(sa.insert(jobs), copies)
    taken_s = []
    headers = {"Authorization": f"Bearer {served.keys['read']}"}
    with httpx.Client(base_url=served.url, headers=headers) as asking:
        for _ in range(10):
            started_s = time.process_time()
            answer = asking.get("/fine_tuning/jobs?limit=1000")
            taken_s.append(time.process_time() - started_s)
    found = answer.json()
    assert len(found["data"]) == 1000 and found["has_more"]
    assert min(taken_s) < 0.1, taken_s  # 35 ms on two cores that do nothing else
    assert len(list(client.fine_tuning.jobs.list(limit=100))) == 1001
