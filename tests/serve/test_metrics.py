"""`/metrics`: what the journals say, right after a restart, and quick."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

from fluxtrain.events.answers.generation import Answered
from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import (
    CardMemory,
    Heartbeat,
    MemorySampled,
    StepFinished,
    TrafficSampled,
)
from fluxtrain.events.journal import read_end
from fluxtrain.serve import metrics
from fluxtrain.serve.jobs import run_of
from fluxtrain.serve.keys import add_key
from fluxtrain.serve.monitoring import ALERTS, PANELS, alert_rules, board
from fluxtrain.serve.store import jobs
from tests.serve.conftest import Served, create, ended, wait_for

MOST_S = 0.2  # a tenth on two quiet cores; of a core; what is read was written just before


def scrape(served: Served, scope: str = "metrics") -> dict[tuple[str, frozenset[Any]], float]:
    """Return all samples by name and labels, as Prometheus' parser reads them."""
    url = served.url.removesuffix("v1") + "metrics"
    answer = httpx.get(url, headers={"Authorization": f"Bearer {served.keys[scope]}"})
    assert answer.status_code == 200, answer.text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: dict[Any, float], row: object, **labels: str) -> float:
    """Return the one sample of a metric that has these labels among its own."""
    found = [
        one
        for (name, own), one in samples.items()
        if name == str(row) and labels.items() <= dict(own).items()
    ]
    assert len(found) == 1, (str(row), labels, found)
    return found[0]


def test_a_scrape_equals_the_journals_last_step(serve: Callable[..., Served]) -> None:
    served = serve()
    client = served.client()
    job = create(client, "waits")
    run = run_of(job.id)
    wait_for(run.journal.exists)
    (run.path / "go").touch()
    wait_for(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded")
    step = read_end(run.journal).step
    assert step is not None
    found = scrape(served)
    assert value(found, metrics.LOSS, job_id=job.id) == step.loss
    assert value(found, metrics.STEP, job_id=job.id) == step.step
    assert value(found, metrics.TOKENS, job_id=job.id) == step.total_tokens
    assert value(found, metrics.ENDED, project="default", how="succeeded") == 1
    assert value(found, metrics.ENDED, project="default", how="failed") == 0
    served.close()
    again = scrape(serve())  # nothing of a job was kept in the process
    assert value(again, metrics.LOSS, job_id=job.id) == step.loss


def test_ends_answers_and_the_queue_are_counted(served: Served) -> None:
    client = served.client()
    ended(client, create(client, "exit-4@1").id)
    ended(client, create(client, "exit-2@1").id)
    message: Any = {"role": "user", "content": "one two three"}
    client.chat.completions.create(model="demo", messages=[message])
    with pytest.raises(Exception, match="no"):
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "refuse"}]
        )
    job = create(client, "waits")
    wait_for(lambda: served.service.queue.running == {job.id})
    waiting = create(client)
    found = scrape(served)
    assert value(found, metrics.ENDED, project="default", how="diverged") == 1
    assert value(found, metrics.ENDED, project="default", how="failed") == 1
    assert value(found, metrics.JOBS, project="default", state="running") == 1
    assert value(found, metrics.JOBS, project="default", state="queued") == 1
    assert 0 < value(found, metrics.OLDEST, project="default") < 60
    assert value(found, metrics.SILENT, job_id=job.id) < 60
    assert value(found, metrics.QUOTA, project="default", quota="running_jobs") == 1 / 8
    assert value(found, metrics.ANSWERS, model="demo", how="answered") == 1
    assert value(found, metrics.ANSWERS, model="demo", how="refused") == 1
    assert value(found, metrics.ANSWER_TOKENS, model="demo", kind="answer") == 3
    assert value(found, metrics.ANSWER_WAIT, project="default", le="+Inf") == 1
    assert value(found, metrics.ANSWER_ROWS, project="default") == 0
    for one in (waiting, job):
        client.fine_tuning.jobs.cancel(one.id)


def test_a_key_sees_its_project_alone_and_odd_names_stay_one_label(served: Served) -> None:
    client, name = served.client(), 'a"b\\c\nd{e="f"}'
    ended(client, create(client).id)

    async def said() -> AsyncIterator[Answered]:
        yield Answered(id="", text="", ended="end", tokens=1, prompt_tokens=1, seconds=0.1)

    async def asked() -> None:
        async for _ in served.service.watched.answers.watched("default", name, said()):
            pass

    asyncio.run(asked())
    served.keys["other"] = add_key(served.service.store, "other", "read", "other")
    everybodys, others = scrape(served), scrape(served, "other")
    assert value(everybodys, metrics.ANSWERS, model=name, how="answered") == 1
    assert value(everybodys, metrics.ENDED, project="default", how="succeeded") == 1
    assert str(metrics.DISK_FREE) in {name for name, _ in everybodys}
    assert {dict(labels).get("project") for _, labels in others} == {"other"}
    assert value(others, metrics.ENDED, how="succeeded") == 0
    headers = {"Authorization": f"Bearer {served.keys['metrics']}"}
    assert httpx.get(f"{served.url}/models", headers=headers).status_code == 403


def test_every_expression_of_board_and_alerts_names_metrics_of_the_table() -> None:
    rows = {str(row): set(row.labels) for row in metrics.TABLE}
    assert len(rows) == len(metrics.TABLE)
    expressions = [one for _, _, targets in PANELS for one, _ in targets]
    legends = [(one, legend) for _, _, targets in PANELS for one, legend in targets]
    expressions += [one for _, one, *_ in ALERTS]
    assert expressions == [
        target["expr"] for panel in board()["panels"] for target in panel["targets"]
    ] + [rule["expr"] for rule in alert_rules()["groups"][0]["rules"]]
    for expression in expressions:
        named = re.findall(r"\bfluxtrain_\w+", expression)
        assert named and set(named) <= set(rows), expression
        labels = set.union(*(rows[name] for name in named)) | {"le"}
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", group)) <= labels, expression
        for name, group in re.findall(r"\b(fluxtrain_\w+)\{([^}]*)\}", expression):
            used = set(re.findall(r"(\w+)(?:=~|!=|=)", group))
            assert used <= rows[name], expression
    for expression, legend in legends:
        known = set.union(*(rows[name] for name in re.findall(r"\bfluxtrain_\w+", expression)))
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= known, legend
    for query in (one["query"] for one in board()["templating"]["list"][1:]):
        name, label = re.findall(r"label_values\((\w+).*, (\w+)\)", query)[0]
        assert label in rows[name]
    shown = set(re.findall(r"fluxtrain_\w+", " ".join(expressions)))
    assert shown == set(rows)  # none is measured for nobody


def _journal_of(job_id: str) -> None:
    """Write what a run of some minutes leaves at its journal's end."""
    run = run_of(job_id)
    run.path.mkdir(parents=True)
    emitter = Emitter(run.journal, None, clock=iter(range(10**6)).__next__)
    by = dict.fromkeys(("weights", "frozen", "packed", "gradients", "optimizer", "cache"), 1 << 30)
    card = CardMemory(
        number=0, total_bytes=1, used_bytes=1, peak_bytes=1, budget_bytes=1, by=by
    )  # fmt: skip
    for step in range(1, 101):
        emitter.emit(StepFinished(
            step=step, total_steps=1000, epoch=0.0, loss=1.0, learning_rate=0.1, grad_norm=1.0,
            tokens=10, total_tokens=10 * step, step_s=0.1, tokens_per_s=100.0,
            phases_s={"forward": 0.05, "backward": 0.05}, stalls_s={"weights": 0.01},
        ))  # fmt: skip
        emitter.emit(MemorySampled(
            device_total_bytes=1, device_used_bytes=1, device_peak_bytes=2, device_budget_bytes=1,
            device_by=by, host_rss_bytes=1, host_peak_bytes=1, host_arena_bytes=1,
            host_pinned_bytes=1, host_limit_bytes=1, cards=(card,) * 4,
        ))  # fmt: skip
        emitter.emit(TrafficSampled(
            h2d_bytes=step, d2h_bytes=1, disk_read_bytes=1, disk_written_bytes=1, window_s=1.0,
            h2d_bytes_per_s=1.0, d2h_bytes_per_s=1.0, disk_read_bytes_per_s=1.0,
            disk_written_bytes_per_s=1.0,
        ))  # fmt: skip
        for _ in range(4):
            emitter.emit(Heartbeat(phase="training", step=step))
    emitter.close()
    (run.checkpoints / "step-00000100").mkdir(parents=True)


def test_a_hundred_jobs_are_scraped_in_a_tenth_of_a_second(served: Served) -> None:
    service, client = served.service, served.client()
    first = ended(client, create(client).id)
    service.queue.close()
    row = service.store.one(sa.select(jobs).where(jobs.c.id == first.id))
    assert row is not None
    many = [
        {**row, "id": f"ftjob-{number}", "number": number + 2, "outcome": None, "digest": "",
         "plan": {"step_s": 0.2, "device_bytes": 1, "host_bytes": 3}}
        for number in range(100)
    ]  # fmt: skip
    with service.store.write() as connection:
        connection.execute(sa.insert(jobs), many)
    for one in many:
        _journal_of(one["id"])
    service.queue.running = frozenset(one["id"] for one in many)
    times_s = []
    for _ in range(5):
        began_s = time.thread_time()
        text = service.watched.exposition(None)
        times_s.append(time.thread_time() - began_s)
    assert text.count(b"fluxtrain_job_loss{") == 101
    found = scrape(served)
    assert value(found, metrics.PLAN_ERROR, job_id="ftjob-7", quantity="step_s") == 1.0
    assert value(found, metrics.PLAN_ERROR, job_id="ftjob-7", quantity="device_bytes") == -0.5
    assert value(found, metrics.MOVED, job_id="ftjob-7", direction="h2d") == 100
    assert value(found, metrics.DEVICE, job_id="ftjob-7", category="packed") == 1 << 30
    assert value(found, metrics.CHECKPOINT_AGE, job_id="ftjob-7") < 60
    assert min(times_s) < MOST_S, times_s


def test_a_run_that_is_deleted_meanwhile_is_left_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = served.client()
    gone, kept = (ended(client, create(client).id).id for _ in range(2))

    def read(journal: Path, kinds: Any) -> Any:
        found = real(journal, kinds)
        if gone in str(journal):
            shutil.rmtree(journal.parent, ignore_errors=True)
        return found

    real = metrics.newest_events
    monkeypatch.setattr(metrics, "newest_events", read)
    for _ in range(2):
        assert value(scrape(served), metrics.LOSS, job_id=kept) == 0.25
    left = {dict(labels).get("job_id") for _, labels in scrape(served)}
    assert gone not in left and kept in left
