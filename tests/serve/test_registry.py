"""Versions, aliases with history, promotion by a gate, artifacts that are checked."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from fluxtrain.serve.jobs import run_of
from fluxtrain.serve.settings import ServedModel
from tests.serve.conftest import Served, create, ended, upload, wait_for


def call(served: Served, method: str, path: str, **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {served.keys['admin']}"}
    answer = httpx.request(
        method, f"{served.url}/fluxtrain/{path}", headers=headers, json=body or None, timeout=60
    )
    return answer.status_code, answer.json()


def trained(client: openai.OpenAI, *words: str) -> str:
    name = ended(client, create(client, *words).id).fine_tuned_model
    assert name
    return str(name)


def asked(client: openai.OpenAI, model: str, words: str = "one two") -> str:
    message: Any = {"role": "user", "content": words}
    answer = client.chat.completions.create(model=model, messages=[message])
    return str(answer.choices[0].message.content)


def test_a_gate_moves_an_alias_and_says_why_not(served: Served) -> None:
    client = served.client()
    first, worse = trained(client, "loss-0.8"), trained(client, "loss-0.79")
    better, file = trained(client, "loss-0.5"), upload(client)
    gate = {"file": file, "min_gain": 0.1}
    assert call(served, "POST", "aliases/best", version=first, gate=gate)[0] == 200
    assert asked(client, "best") == "one two "
    status, refused = call(served, "POST", "aliases/best", version=worse, gate=gate)
    assert status == 400 and "0.8" in refused["error"]["message"]
    assert "0.79" in refused["error"]["message"]
    assert call(served, "POST", "aliases/best", version=better, gate=gate)[0] == 200
    moves = call(served, "GET", "aliases/best")[1]["data"]
    assert [one["version"] for one in moves] == [better, first]
    assert (moves[0]["why"]["loss_before"], moves[0]["why"]["loss"]) == (0.8, 0.5)
    assert client.models.retrieve("best").id == better
    with pytest.raises(openai.BadRequestError, match="alias best"):
        client.models.delete(better)
    client.models.delete(worse)
    with pytest.raises(openai.NotFoundError):
        asked(client, worse)
    assert call(served, "DELETE", "aliases/best")[0] == 200
    with pytest.raises(openai.NotFoundError):
        asked(client, "best")
    assert call(served, "GET", "aliases")[1]["data"] == []


def test_each_jobs_model_is_put_to_the_operators_tasks_for_the_gate(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    (tmp_path / "tasks").mkdir()
    served = serve(models={
        "demo": ServedModel(path="demo", method="full", tasks=tmp_path / "tasks"),
    })  # fmt: skip
    client = served.client()
    first, better = trained(client, "loss-0.8"), trained(client, "loss-0.5")

    def results(name: str) -> Any:
        told: Any = client.models.retrieve(name)
        return told.fluxtrain["tasks"]

    wait_for(lambda: results(first) and results(better))
    assert results(better)["sums/acc"]["value"] == 0.5
    gate = {"metric": "sums/acc", "min_gain": 0.4}
    assert call(served, "POST", "aliases/best", version=first, gate=gate)[0] == 200
    status, refused = call(served, "POST", "aliases/best", version=better, gate=gate)
    assert status == 400 and "a gain of 0.3 where 0.4" in refused["error"]["message"]
    gate["min_gain"] = 0.2
    assert call(served, "POST", "aliases/best", version=better, gate=gate)[0] == 200
    unknown = call(served, "POST", "aliases/best", version=first, gate={"metric": "sums/f1"})
    assert unknown[0] == 400 and "it has sums/acc" in unknown[1]["error"]["message"]
    (tmp_path / "tasks").rmdir()
    third = trained(client, "loss-0.1")
    wait_for(lambda: results(third))
    told = call(served, "POST", "aliases/best", version=third, gate=gate)[1]["error"]["message"]
    assert "name the folder" in told and str(tmp_path) not in told


def test_an_evaluation_leaves_the_memory_to_a_job_and_begins_again(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "waits").touch()
    served = serve(models={"demo": ServedModel(path="demo", method="full", tasks=tasks)})
    client = served.client()
    name = trained(client, "loss-0.8")
    pid = tmp_path / "tasks.pid"
    wait_for(lambda: pid.exists() and pid.read_text())
    evaluates = psutil.Process(int(pid.read_text()))
    job = create(client, "waits")
    wait_for(lambda: not evaluates.is_running())
    (tasks / "waits").unlink()
    (run_of(job.id).path / "go").touch()
    names = [name, ended(client, job.id).fine_tuned_model]
    wait_for(lambda: all(client.models.retrieve(one).fluxtrain["tasks"] for one in names))


def test_a_model_whose_files_were_changed_is_not_used(served: Served) -> None:
    client = served.client()
    name = trained(client, "loss-1")
    (artifact,) = served.service.store.models.iterdir()
    (artifact / "config.json").write_text("{}")
    with pytest.raises(openai.ConflictError, match="changed"):
        asked(client, name)


def test_a_worker_that_dies_is_told_and_the_next_ask_is_answered(served: Served) -> None:
    client = served.client()
    message: Any = {"role": "user", "content": "die"}
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(model="demo", messages=[message])
    assert refused.value.status_code == 503
    assert asked(client, "demo") == "one two "
    pieces = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "a b c"}], stream=True
    )
    assert [one.choices[0].delta.content for one in pieces][1:-1] == ["a ", "b ", "c "]


def test_an_ask_that_a_stop_of_the_server_cuts_off_is_told_to_come_again(served: Served) -> None:
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(asked, served.client(), "demo", "no answer")
        wait_for(lambda: getattr(served.service.worker, "_worker", None) is not None)
        served.close()
        with pytest.raises(openai.InternalServerError, match="the server is stopping") as told:
            answer.result(30)
    assert told.value.status_code == 503 and told.value.response.headers["retry-after"]


def test_what_this_server_does_not_do_is_refused_by_its_name(served: Served) -> None:
    client = served.client()
    message: Any = {"role": "user", "content": "x"}
    for more in ({"tools": []}, {"n": 2}, {"presence_penalty": 1.0}, {"logit_bias": {}}):
        with pytest.raises(openai.BadRequestError, match=next(iter(more))):
            client.chat.completions.create(model="demo", messages=[message], **more)  # type: ignore[call-overload]
    for key, extra in (
        ("model.path", {"model": {"path": "/etc"}}),
        ("parallel", {"parallel": {}}),
        ("data.token_cache", {"data": {"token_cache": "/tmp/x"}}),
        ("data.chat_template", {"data": {"chat_template": "../x.jinja"}}),
        ("samples.prompts", {"samples": {"prompts": "/etc/passwd"}}),
        ("train.stepz", {"train": {"stepz": 1}}),
    ):
        with pytest.raises(openai.BadRequestError, match=key):
            client.fine_tuning.jobs.create(
                model="demo", training_file=upload(client), extra_body={"fluxtrain": extra}
            )
    with pytest.raises(openai.BadRequestError, match="shorten the sequence"):
        create(client, "too-large")


def test_an_ask_waits_while_a_job_trains(served: Served) -> None:
    client = served.client()
    job = create(client, "waits")
    wait_for(lambda: served.service.queue.busy)
    with pytest.raises(openai.InternalServerError, match="a job trains.*1 B.*beside") as refused:
        asked(client, "demo")
    assert refused.value.response.headers["retry-after"] == "5"
    accepted = create(client, "too-large")  # its plan may find room when the job has ended
    assert accepted.status == "queued"
    with pytest.raises(openai.InternalServerError, match="learning rate"):
        create(client, "too-large", hyperparameters={"learning_rate_multiplier": 2})
    client.fine_tuning.jobs.cancel(accepted.id)
    client.fine_tuning.jobs.cancel(job.id)
    wait_for(lambda: not served.service.queue.busy)
    assert asked(client, "demo") == "one two "
    needs_its_memory = create(client, "beside-no-worker")
    assert ended(client, needs_its_memory.id).status == "succeeded"


def test_an_ask_is_answered_while_a_job_trains_where_the_operator_lets_it(
    serve: Callable[..., Served],
) -> None:
    served = serve(inference="beside")
    client = served.client()
    job = create(client, "waits")
    wait_for(lambda: served.service.queue.busy)
    assert asked(client, "demo") == "one two "
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"


@pytest.mark.parametrize(
    ("suffix", "named"),
    [("../../My Model/2", "my-model-2"), ("Bücher & 中文:x", "bucher-x"), ("v1.0_b", "v1.0_b")],
)
def test_a_suffix_becomes_part_of_a_name_that_leads_nowhere(
    served: Served, suffix: str, named: str
) -> None:
    client = served.client()
    job = ended(client, create(client, suffix=suffix).id)
    assert job.user_provided_suffix == suffix
    assert job.fine_tuned_model == f"ft:demo:default:{named}:{job.id.removeprefix('ftjob-')}"
    assert client.models.retrieve(job.fine_tuned_model).id == job.fine_tuned_model


def test_an_unknown_hyperparameter_is_named_as_in_the_request(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="not known") as refused:
        create(served.client(), hyperparameters={"n_epoch": 1})
    error: Any = refused.value.body
    assert error["param"] == "hyperparameters.n_epoch"


def test_an_unknown_endpoint_is_refused_in_words(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="no POST v1/embeddings.*chat/completions"):
        served.client().embeddings.create(model="demo", input="x")
    status, answer = call(served, "PUT", "usage")
    assert status == 405 and "no PUT v1/fluxtrain/usage" in answer["error"]["message"]
