"""A small MLflow server: the REST routes that the mirror uses, with troubles to choose from."""

from __future__ import annotations

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

ALIAS = re.compile(r"[\w-]+")


class Refused(Exception):
    """MLflow's own error."""


class FakeMlflow:
    """Experiments, runs, models, versions and aliases in memory; trouble: "", 500 or slow."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.models: dict[str, dict[str, str]] = {}  # aliases
        self.versions: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.trouble = ""
        mlflow = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"{}")
                path = urlsplit(self.path)
                given = dict(parse_qsl(path.query)) if self.command == "GET" else body
                status, told = mlflow.told(
                    f"{self.command} {path.path.removeprefix('/api/2.0/mlflow/')}", given
                )
                content = json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815 - as http.server calls them

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def told(self, route: str, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append(route)
        if self.trouble == "500":
            return 500, {"error_code": "INTERNAL_ERROR", "message": "no"}
        try:
            told = self.carried_out(route, given)
        except Refused as error:
            code = str(error)
            return 404 if code == "RESOURCE_DOES_NOT_EXIST" else 400, {"error_code": code}
        if self.trouble == "slow":  # what was asked for is done, and nobody waits for the answer
            time.sleep(1.0)
        return 200, told

    def carried_out(self, route: str, given: dict[str, Any]) -> dict[str, Any]:
        act = getattr(self, re.sub(r"\W+", "_", route).lower())
        return act(given) or {}

    def get_experiments_get_by_name(self, given: dict[str, Any]) -> dict[str, Any]:
        found = self.known(self.experiments.get(given["experiment_name"]))
        return {"experiment": {"experiment_id": found}}

    def post_experiments_create(self, given: dict[str, Any]) -> dict[str, Any]:
        self.new(given["name"] not in self.experiments)
        found = self.experiments[given["name"]] = str(len(self.experiments))
        return {"experiment_id": found}

    def post_runs_search(self, given: dict[str, Any]) -> dict[str, Any]:
        wanted = re.fullmatch(r"tags\.`(.*)` = '(.*)'", given["filter"])
        assert wanted is not None and given["experiment_ids"] == ["0"]
        same = [one for one in self.runs.values() if one["tags"][wanted[1]] == wanted[2]]
        return {"runs": [{"info": {"run_id": one["id"]}} for one in same]} if same else {}

    def post_runs_create(self, given: dict[str, Any]) -> dict[str, Any]:
        assert given["experiment_id"] == "0" and given["start_time"] > 1e12
        run = {"id": f"r{len(self.runs)}", "status": "RUNNING", "metrics": {}}
        self.runs[str(run["id"])] = run | {"tags": pairs(given["tags"])}
        return {"run": {"info": {"run_id": run["id"]}}}

    def post_runs_log_batch(self, given: dict[str, Any]) -> None:
        run = self.known(self.runs.get(given["run_id"]))
        assert len(given["metrics"]) <= 1000
        for one in given["metrics"]:
            key = (one["key"], one["step"], one["timestamp"], one["value"])
            run["metrics"][key] = run["metrics"].get(key, 0) + 1

    def post_runs_update(self, given: dict[str, Any]) -> None:
        assert given["end_time"] > 1e12
        self.known(self.runs.get(given["run_id"]))["status"] = given["status"]

    def post_registered_models_create(self, given: dict[str, Any]) -> None:
        self.new(given["name"] not in self.models)
        self.models[given["name"]] = {}

    def get_model_versions_search(self, given: dict[str, Any]) -> dict[str, Any]:
        wanted = re.fullmatch(r"run_id = '(.*)'", given["filter"])
        assert wanted is not None
        return {"model_versions": [one for one in self.versions if one["run_id"] == wanted[1]]}

    def post_model_versions_create(self, given: dict[str, Any]) -> dict[str, Any]:
        self.known(self.models.get(given["name"]))
        assert re.fullmatch(r"[a-z]+:(/\w+)+", given["source"])  # no local path
        self.versions.append({**given, "version": str(len(self.versions) + 1)})
        return {"model_version": self.versions[-1]}

    def post_registered_models_alias(self, given: dict[str, Any]) -> None:
        assert ALIAS.fullmatch(given["alias"])
        self.known(self.models.get(given["name"]))[given["alias"]] = given["version"]

    def delete_registered_models_alias(self, given: dict[str, Any]) -> None:
        self.known(self.models.get(given["name"])).pop(given["alias"], None)

    @staticmethod
    def known(found: Any) -> Any:
        if found is None:
            raise Refused("RESOURCE_DOES_NOT_EXIST")
        return found

    @staticmethod
    def new(is_new: bool) -> None:
        if not is_new:
            raise Refused("RESOURCE_ALREADY_EXISTS")


def pairs(listed: Any) -> dict[str, str]:
    return {one["key"]: one["value"] for one in listed}
