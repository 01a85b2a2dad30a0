"""An API server of Kubernetes in this process, as small as the backend needs it: Jobs, their pods
and a watch. Kueue, kubelet and the Job controller do what a test says; pods are processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

JOBS = "/apis/batch/v1/namespaces/default/jobs"
PODS = "/api/v1/namespaces/default/pods"
CONFIG = """\
apiVersion: v1
kind: Config
clusters: [{name: fake, cluster: {server: "http://127.0.0.1:%d"}}]
users: [{name: fake, user: {}}]
contexts: [{name: fake, context: {cluster: fake, user: fake}}]
current-context: fake
"""


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Cluster:
    """What the API server knows, and what happens to it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command, self.jobs, self.pods = list(command), dict[str, Any](), list[Any]()
        self.told: list[tuple[int, str, Any]] = []  # version, type, Job as it was
        self.version, self.streams, self.made = 1, 0, list[str]()
        self.admits, self.down, self.silent = True, False, False
        self.refusal, self.lists, self.loses_answers, self.memory_full = 0, 200, False, False
        self.lock = threading.Condition(threading.RLock())
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("_", (Handler,), {"cluster": self})
        )
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def write_config(self, path: Path) -> Path:
        path.write_text(CONFIG % self.server.server_address[1])
        return path

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for process in self.processes.values():
            process.kill()
            process.wait()

    # -- what the server is asked

    def create(self, job: Any) -> int:
        with self.lock:
            name = job["metadata"]["name"]
            if self.refusal:
                return self.refusal
            if name in self.jobs:
                return 409
            job["metadata"] |= {"uid": name, "creationTimestamp": now()}
            job["status"] = {}
            self.jobs[name] = job
            self.made.append(name)
            self._tell("ADDED", job)
            if self.admits:
                self.admit(name)
            return 500 if self.loses_answers else 201

    def delete(self, name: str, foreground: bool) -> None:
        with self.lock:
            job = self.jobs[name]
            job["metadata"]["deletionTimestamp"] = now()
            self._tell("MODIFIED", job)
            if not self._end_pods(name) or not foreground:
                self._remove(name)

    # -- what happens in the cluster

    def admit(self, name: str) -> None:
        with self.lock:
            self.jobs[name]["spec"]["suspend"] = False
            self._start_pod(self.jobs[name])

    def suspend(self, name: str) -> None:
        with self.lock:
            self.jobs[name]["spec"]["suspend"] = True
            self._tell("MODIFIED", self.jobs[name])
            self._end_pods(name)

    def disrupt(self, name: str, number: int = signal.SIGTERM) -> None:
        """Evict the pod of a Job (SIGTERM), or lose its node (SIGKILL)."""
        with self.lock:
            pod = next(one for one in self.pods if self._lives(one, name))
            pod["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
            self.processes[pod["metadata"]["name"]].send_signal(number)

    def stop_watches(self) -> None:
        with self.lock:
            self.streams += 1
            self.lock.notify_all()

    def forget(self) -> None:
        """Let every version that a watch could go on from be too old."""
        with self.lock:
            self.told.clear()
            self.stop_watches()

    def _tell(self, kind: str, job: Any) -> None:
        self.version += 1
        job["metadata"]["resourceVersion"] = str(self.version)
        self.told.append((self.version, kind, json.loads(json.dumps(job))))
        self.lock.notify_all()

    def _lives(self, pod: Any, name: str) -> bool:
        labels, of = pod["metadata"]["labels"], pod["metadata"]["name"]
        return labels["job-name"] == name and self.processes[of].poll() is None

    def _end_pods(self, name: str) -> bool:
        living = [one["metadata"]["name"] for one in self.pods if self._lives(one, name)]
        for pod in living:
            self.processes[pod].send_signal(signal.SIGTERM)
        return bool(living)

    def _remove(self, name: str) -> None:
        self._tell("DELETED", self.jobs.pop(name))

    def _start_pod(self, job: Any) -> None:
        name = job["metadata"]["name"]
        number = sum(one["metadata"]["labels"]["job-name"] == name for one in self.pods)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        pod: Any = {
            "metadata": {"name": f"{name}-{number}", "labels": {"job-name": name}},
            "spec": {"nodeName": f"node-{number}", "containers": [container]},
            "status": {"phase": "Running"},
        }
        at_s = time.gmtime(time.time() + len(self.pods))  # the newest by whole seconds
        pod["metadata"]["creationTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", at_s)
        self.pods.append(pod)
        process = subprocess.Popen([*self.command, *container["args"]], env=os.environ)
        self.processes[f"{name}-{number}"] = process
        job["status"] |= {"active": 1, "ready": 1, "startTime": now()}
        self._tell("MODIFIED", job)
        threading.Thread(target=self._wait, args=(job, pod, process), daemon=True).start()

    def _wait(self, job: Any, pod: Any, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        code = 128 - code if code < 0 else code
        with self.lock:
            reason = "OOMKilled" if code == 137 and self.memory_full else "Error"
            ended = {"exitCode": code, "reason": reason, "message": "a line\nits last line"}
            container = {"name": "trainer", "image": "", "imageID": "", "restartCount": 0}
            container |= {"ready": False, "state": {"terminated": ended}}
            pod["status"] |= {"phase": "Failed", "containerStatuses": [container]}
            self._control(job, code, pod["status"].get("conditions", ()))

    def _control(self, job: Any, code: int, conditions: Sequence[Any]) -> None:
        """Do as the Job controller does when a pod has ended."""
        name, spec = job["metadata"]["name"], job["spec"]
        job["status"] |= {"active": 0, "ready": 0}
        if name not in self.jobs:
            return
        if job["metadata"].get("deletionTimestamp"):
            self._remove(name)
        elif code == 0 or (not spec["suspend"] and self._fails(spec, code, conditions)):
            over = {"type": "Complete" if code == 0 else "Failed", "status": "True"}
            job["status"]["conditions"] = [{**over, "lastTransitionTime": now()}]
            self._tell("MODIFIED", job)
        elif spec["suspend"]:
            self._tell("MODIFIED", job)
        else:
            self._start_pod(job)

    @staticmethod
    def _fails(spec: Any, code: int, conditions: Sequence[Any]) -> bool:
        held = {one["type"] for one in conditions if one["status"] == "True"}
        for rule in spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes", {}).get("values", ())
            if code in codes or held & {one["type"] for one in rule.get("onPodConditions", ())}:
                return bool(rule["action"] != "Ignore")
        assert spec["backoffLimit"] == 0
        return True


class Handler(BaseHTTPRequestHandler):
    cluster: Cluster

    def parse_request(self) -> bool:
        self.close_connection = True
        return not self.cluster.down and super().parse_request()

    def do_GET(self) -> None:
        path, query = self._asked()
        with self.cluster.lock:
            if path == JOBS and "watch" in query:
                version = int(query["resourceVersion"])
            elif path == JOBS:
                wanted = dict(one.split("=") for one in query["labelSelector"].split(","))
                fit = [
                    one
                    for one in self.cluster.jobs.values()
                    if wanted.items() <= one["metadata"]["labels"].items()
                ]
                return self._answer(self.cluster.lists, self._list(fit))
            elif path == PODS:
                name = query["labelSelector"].partition("=")[2]
                pods = [
                    one
                    for one in self.cluster.pods
                    if one["metadata"]["labels"]["job-name"] == name
                ]
                return self._answer(200, self._list(pods))
            else:
                job = self.cluster.jobs.get(path.rpartition("/")[2])
                return self._answer(404 if job is None else 200, job)
        with suppress(OSError):
            return self._watch(version, time.monotonic() + int(query["timeoutSeconds"]))

    def do_POST(self) -> None:
        self._asked()
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(self.cluster.create(job), job)

    def do_DELETE(self) -> None:
        path, query = self._asked()
        name = path.rpartition("/")[2]
        if name not in self.cluster.jobs:
            return self._answer(404, None)
        self.cluster.delete(name, query.get("propagationPolicy") == "Foreground")
        return self._answer(200, {"kind": "Status", "status": "Success"})

    def _asked(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        return url.path, {name: one[0] for name, one in parse_qs(url.query).items()}

    def _list(self, items: list[Any]) -> Any:
        return {"metadata": {"resourceVersion": str(self.cluster.version)}, "items": items}

    def _watch(self, version: int, until_s: float) -> None:
        """Tell what happened after a version, in order, until the stream is cut."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        with self.cluster.lock:
            streams = self.cluster.streams
            while streams == self.cluster.streams and time.monotonic() < until_s:
                if self.cluster.told and version < self.cluster.told[0][0] - 1:
                    gone = {"code": 410, "reason": "Expired", "message": "too old"}
                    return self._line({"type": "ERROR", "object": gone})
                for number, kind, job in list(self.cluster.told):
                    if number > version and not self.cluster.silent:
                        self._line({"type": kind, "object": job})
                        version = number
                self.cluster.lock.wait(0.1)
        return None

    def _line(self, event: Any) -> None:
        self.wfile.write(json.dumps(event).encode() + b"\n")
        self.wfile.flush()

    def _answer(self, status: int, body: Any) -> None:
        refused = {"kind": "Status", "message": f"the fake answers {status}"}
        content = json.dumps(refused if status >= 300 else body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...
