"""Uploads: read by the trainer's reader, stored once, deleted when nothing needs them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import httpx
import openai
import pytest

from fluxtrain.serve.settings import Quotas
from tests.serve.conftest import Served, create, ended, rows, upload, wait_for


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("data.jsonl", rows(3) + b"{broken\n", "data.jsonl"),
        ("data.jsonl", rows(2) + b'{"messages": 3}\n', "3"),
        ("data.jsonl", b"\xff\xfe\x00", "data.jsonl"),
        ("data.exe", rows(), ".jsonl"),
        ("data.jsonl", b"[" * 100_000, "data.jsonl"),
        ("empty.jsonl", b"\n", "empty"),
    ],
)
def test_what_the_trainer_cannot_read_is_refused_with_its_place(
    served: Served, name: str, content: bytes, told: str
) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError) as refused:
        upload(client, content, name)
    assert told in str(refused.value) and str(served.service.store.folder) not in str(refused.value)
    assert not list(served.service.store.files.iterdir())


def test_a_name_leads_nowhere_and_content_comes_back(served: Served) -> None:
    client = served.client()
    file = client.files.create(file=("../../etc/passwd\r\n.jsonl", rows()), purpose="fine-tune")
    assert "/" not in file.filename
    assert client.files.content(file.id).read() == rows()
    assert [one.name for one in served.service.store.folder.rglob("*passwd*")] == []
    assert all(path.stat().st_mode & 0o077 == 0 for path in served.service.store.files.iterdir())


def test_a_file_that_a_job_reads_can_be_deleted(served: Served) -> None:
    client = served.client()
    first, second = upload(client), upload(client)
    assert len(list(served.service.store.files.iterdir())) == 1  # the same content
    job = create(client, "waits", file=first)
    client.files.delete(first)
    client.files.delete(second)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(first)
    assert len(list(served.service.store.files.iterdir())) == 1  # the job may start again
    client.fine_tuning.jobs.cancel(job.id)
    ended(client, job.id)
    store = served.service.store
    wait_for(lambda: not list(store.files.iterdir()))


def test_limits_are_kept_before_and_while_a_file_comes(serve: Callable[..., Served]) -> None:
    served = serve(quotas=Quotas(file_bytes=1000, stored_bytes=1500))
    client = served.client()
    with pytest.raises(openai.APIStatusError) as refused:
        upload(client, rows(1000))
    assert refused.value.status_code == 413
    upload(client, rows(6))
    upload(client, rows(6))
    with pytest.raises(openai.BadRequestError, match="delete files"):
        upload(client, rows(6))
    endless = httpx.post(
        f"{served.url}/files",
        headers={"Authorization": f"Bearer {served.keys['admin']}"},
        content=iter([b"x"]),
    )
    assert endless.status_code == 411


def test_a_full_disk_is_told_and_leaves_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fluxtrain.serve.uploads.os.fsync", full)
    with pytest.raises(openai.APIStatusError) as refused:
        upload(served.client(max_retries=2))
    assert refused.value.status_code == 507
    assert not list(served.service.store.files.iterdir())
