"""Several servers on one Postgres: no job is run twice, whichever of them hangs or dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa

from fluxtrain.errors import BadInput
from fluxtrain.events.events import Done, Hello
from fluxtrain.events.journal import read_events
from fluxtrain.serve import backend as backends
from fluxtrain.serve import lease as leases
from fluxtrain.serve import metrics
from fluxtrain.serve import store as stores
from fluxtrain.serve.held_jobs import Taken
from fluxtrain.serve.jobs import run_of
from fluxtrain.serve.lease import Lease
from fluxtrain.serve.refusal import Refusal
from fluxtrain.serve.store import Store, jobs, servers, versions
from tests.serve.conftest import Served, create, ended, upload, wait_for
from tests.serve.postgres import Postgres


@pytest.fixture
def db(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 1.5)
    monkeypatch.setattr(leases, "RENEW_S", 0.2)


def processes(job_id: str) -> list[str]:
    """Return the beginnings and ends of a job's trainers."""
    events = read_events(run_of(job_id).journal)
    return [type(one).__name__ for one in events if isinstance(one, Hello | Done)]


def of_all(served: Served) -> bytes:
    lines = served.service.watched.exposition(None).splitlines()
    return b"\n".join(line for line in lines if not line.startswith(b"#"))


def test_two_servers_run_each_job_once_and_know_of_each_other(
    serve: Callable[..., Served],
) -> None:
    first, second = serve(), serve()
    clients = first.client(), second.client()
    file = upload(clients[0])
    both = [create(one, "waits", file=file).id for one in clients]
    wait_for(lambda: all(run_of(one).socket.exists() for one in both))  # at once: one on each
    made = both + [create(clients[number % 2], file=file).id for number in range(4)]
    for one in both:
        (run_of(one).path / "go").touch()
    assert {ended(clients[0], one).status for one in made} == {"succeeded"}
    assert all(processes(one) == ["Hello", "Done"] for one in made)
    rows = first.service.store.rows(sa.select(jobs.c.server))
    assert {row["server"] for row in rows} == {
        one.service.queue.lease.id for one in (first, second)
    }
    assert len(clients[1].models.list().data) == 7
    waiting = create(clients[0], "waits").id
    wait_for(lambda: clients[1].fine_tuning.jobs.retrieve(waiting).status == "running")
    clients[1].fine_tuning.jobs.cancel(waiting)
    wait_for(lambda: run_of(waiting).liveness() == "stopped")
    assert [one.service.queue.lease.leads for one in (first, second)] == [True, False]
    told = [str(metrics.ENDED).encode() in of_all(one) for one in (first, second)]
    assert told == [True, False]  # so that sums over servers are right


def test_one_request_to_two_servers_makes_one_job(serve: Callable[..., Served]) -> None:
    clients = [serve().client(), serve().client()]
    file = upload(clients[0])

    def send(number: int) -> str:
        headers = {"Idempotency-Key": "one"}
        job: Any = create(clients[number % 2], file=file, extra_headers=headers)
        return str(job.id)

    with ThreadPoolExecutor(6) as threads:
        assert len(set(threads.map(send, range(6)))) == 1


def test_a_server_that_hangs_beyond_its_lease_starts_nothing_that_another_took(
    serve: Callable[..., Served], short_lease: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    begin, begun = backends.start_unwatched, []

    def hang(*arguments: Any) -> Any:
        if not begun:  # the first server, after all its checks and before its trainer
            begun.append(None)
            hangs.set()
            assert goes_on.wait(60)
            begun.append(begin(*arguments))
            return begun[-1]
        return begin(*arguments)

    monkeypatch.setattr(backends, "start_unwatched", hang)
    first = serve()
    client = first.client()
    job = create(client).id
    assert hangs.wait(60)
    lease = first.service.queue.lease
    renew, before = lease.renew, lease.id
    monkeypatch.setattr(lease, "renew", lambda: goes_on.wait(60) and renew())
    second = serve().client()
    assert ended(second, job).status == "succeeded"
    goes_on.set()
    wait_for(lambda: len(begun) == 2 and begun[1].poll() is not None)
    assert begun[1].returncode != 0  # it found no configuration
    assert processes(job) == ["Hello", "Done"]
    assert len(first.service.store.rows(sa.select(versions))) == 1
    wait_for(lambda: lease.id != before)


def test_the_end_that_a_server_records_too_late_is_not_taken(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    client = served.client()
    job = create(client, "waits").id
    wait_for(run_of(job).socket.exists)
    store, queue = served.service.store, served.service.queue
    row = store.rows(sa.select(jobs))[0]
    another = {"id": "z", "host": "", "folder": store.mark, "until_s": store.now_s() + 10}
    with store.write() as connection:
        connection.execute(sa.insert(servers), another)
        connection.execute(sa.update(jobs).values(server="z"))
    for act in (
        lambda: queue._end(row, "failed"),
        lambda: queue._held.note(row, "warn", ""),
        lambda: queue._judge(row),
    ):
        with pytest.raises(Taken):
            act()
    with store.write() as connection:
        connection.execute(sa.delete(servers).where(servers.c.id == "z"))
    wait_for(lambda: store.rows(sa.select(jobs))[0]["server"] == queue.lease.id)
    (run_of(job).path / "go").touch()
    assert ended(client, job).status == "succeeded"


def test_a_restart_of_postgres_is_a_wait_for_requests_and_for_jobs(
    serve: Callable[..., Served], postgres: Postgres
) -> None:
    served = serve()
    client, store = served.client(), served.service.store
    job = create(client, "waits").id
    wait_for(run_of(job).socket.exists)
    before = served.service.queue.lease.id
    with pytest.raises(Refusal, match="does not answer") as told, store.write() as connection:
        connection.execute(sa.update(jobs).values(wanted="cancel"))
        postgres.stop()
        connection.execute(sa.select(jobs.c.id))
    assert told.value.status == 503
    headers = {"Authorization": f"Bearer {served.keys['read']}"}
    answer = httpx.get(f"{served.url}/fine_tuning/jobs", headers=headers)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    assert httpx.get(served.url.replace("/v1", "/health")).status_code == 200
    postgres.start()
    found = served.client(max_retries=5).fine_tuning.jobs.retrieve(job)
    assert found.status == "running"  # what was not committed is not there
    (run_of(job).path / "go").touch()
    assert ended(client, job).status == "succeeded"
    assert processes(job) == ["Hello", "Done"]
    assert served.service.queue.lease.id == before


def test_leases_follow_the_clock_of_the_database(
    tmp_path: Path, db: str, short_lease: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Lease(Store(tmp_path, db=db))
    behind = SimpleNamespace(time=lambda: time.time() - 3600, monotonic=time.monotonic)
    for module in (leases, stores):
        monkeypatch.setattr(module, "time", behind)
    wrong = Lease(Store(tmp_path, db=db))
    assert abs(wrong._store.now_s() - time.time()) < 5
    assert right.living() == wrong.living() == {right.id, wrong.id}
    wait_for(lambda: right.renew() or right.living() == {right.id})  # the other one's has ended
    old = wrong.id
    wrong.renew()  # nobody took anything of it meanwhile
    assert wrong.id == old
    with right._store.write() as connection:
        connection.execute(sa.delete(servers).where(servers.c.id == old))
    wrong.renew()
    assert wrong.id > old and right.living() == {right.id, wrong.id}
    wrong.close()
    assert right.living() == {right.id}


def test_a_gap_in_its_own_lease_makes_a_server_patient(
    tmp_path: Path, db: str, short_lease: None
) -> None:
    one, other = (Lease(Store(tmp_path, db=db)) for _ in range(2))
    time.sleep(1.6)  # as while Postgres is started again
    one.renew()
    assert other.id in one.living()
    other.renew()
    assert one.living() == {one.id, other.id}


def test_servers_of_one_database_have_one_folder(tmp_path: Path, db: str) -> None:
    Lease(Store(tmp_path / "a", db=db))
    with pytest.raises(BadInput, match="another folder"):
        Lease(Store(tmp_path / "b", db=db))


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("mysql://x/y", "use postgresql://"),
        ("nonsense", "use postgresql://"),
        ("postgresql://u:secret@127.0.0.1:1/x", "127.0.0.1:1/x cannot be used .*refused.*createdb"),
    ],
)
def test_a_database_that_is_none_is_refused(tmp_path: Path, address: str, told: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(BadInput, match=told) as error:
        Store(tmp_path, db=address)
    assert "secret" not in str(error.value)


def test_a_text_that_postgres_cannot_keep_is_refused_by_its_sender(
    serve: Callable[..., Served],
) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be kept"):
        serve().client().files.retrieve("a\0b")
