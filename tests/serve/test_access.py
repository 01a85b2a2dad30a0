"""Who may do what: every route for every scope, and what other projects see."""

from __future__ import annotations

import httpx
import openai
import pytest
from fastapi.routing import APIRoute

from fluxtrain.serve.keys import SCOPES, add_key, revoke_key
from fluxtrain.serve.store import keys
from tests.serve.conftest import Served, create, ended, upload

OPEN = {"/health", "/ready"}
INFERS = {"/v1/chat/completions", "/v1/completions", "/generate"}


def needed(route: APIRoute) -> str:
    if route.path in INFERS:
        return "infer"
    if route.path == "/metrics":
        return "metrics"
    return "read" if route.methods == {"GET"} else "train"


def test_each_route_takes_the_scopes_that_it_should(served: Served) -> None:
    routes = [one for one in served.service_routes() if one.path not in OPEN]
    assert len(routes) >= 15
    with httpx.Client(base_url=served.url.removesuffix("/v1")) as client:
        for route in routes:
            path = route.path.replace("{verb}", "cancel").replace("{job_id}", "x")
            for scope in (None, *SCOPES):
                key = served.keys[scope] if scope else "sk-flux-wrong"
                method = min(route.methods)
                headers = {"Authorization": f"Bearer {key}"}
                status = client.request(method, path, headers=headers).status_code
                if scope is None:
                    assert status == 401, path
                elif SCOPES.index(scope) < SCOPES.index(needed(route)):
                    assert status == 403, (path, scope)
                else:
                    assert status not in (401, 403, 500), (path, scope)


def test_a_key_is_kept_as_a_digest_and_ends_at_once(served: Served) -> None:
    key = served.keys["read"]
    kept = [path for path in served.service.store.folder.rglob("*") if path.is_file()]
    assert kept and all(key.encode() not in path.read_bytes() for path in kept)
    row = served.service.store.one(keys.select().where(keys.c.name == "read"))
    assert row is not None
    client = served.client("read")
    assert client.models.list().data
    revoke_key(served.service.store, row["id"])
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_another_project_sees_nothing(served: Served) -> None:
    client = served.client()
    file = upload(client)
    job = ended(client, create(client, file=file).id)
    served.keys["other"] = add_key(served.service.store, "other", "admin", "other")
    other = served.client("other")
    assert not other.files.list().data and not other.fine_tuning.jobs.list().data
    assert [one.id for one in other.models.list()] == ["demo"]
    for ask in (
        lambda: other.files.content(file),
        lambda: other.files.delete(file),
        lambda: other.fine_tuning.jobs.cancel(job.id),
        lambda: other.fine_tuning.jobs.list_events(job.id),
        lambda: other.models.retrieve(job.fine_tuned_model),
        lambda: create(other, file=file),
        lambda: other.chat.completions.create(
            model=job.fine_tuned_model, messages=[{"role": "user", "content": "x"}]
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
