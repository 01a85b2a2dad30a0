"""Trainers as Jobs of a Kubernetes cluster, which Kueue admits, suspends and lets go on.

A trial of a job is one Job, `JOB-TRIAL`: who makes it a second time gets the first. What a trainer
survives stays within its Job: a pod that is evicted, preempted, deleted, or lost with its node is
replaced, and the next one resumes. Any other end fails the Job, and the queue judges it as that of
a process. No cluster that cannot be reached is taken for one where nothing runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fluxtrain.errors import (
    EXIT_BAD_INPUT,
    EXIT_DEVICE_FAILED,
    EXIT_DOES_NOT_FIT,
    EXIT_FINISHED,
    EXIT_READ_FAILED,
    EXIT_TERMINATED,
    BadInput,
    FluxTrainError,
)
from fluxtrain.events.run_folder.run_dir import RunSummary, runs_root
from fluxtrain.serve.backend import End, State, end_of
from fluxtrain.serve.deployment import locked_down
from fluxtrain.serve.jobs import run_of
from fluxtrain.serve.settings import KubernetesSettings, ServeSettings

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
APP, TRAINER = "fluxtrain-trainer", "trainer"  # a label, and the container's name
IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
WATCH_S = 60  # then all is listed again, so that a watch that tells nothing costs a minute
PAUSE_S = 2.0
TIMEOUT_S = (5.0, 20.0)  # to connect, to read
SEEN_S = 120.0  # until all nodes see what was written to a network disk
KEPT_S = 7 * 86400  # that a Job stays after its end
ASIDE_S = 600.0  # that a node is avoided after one of its cards failed
# Ends that fail a Job at once; before EXIT_TERMINATED a checkpoint was written.
FOR_GOOD = range(EXIT_BAD_INPUT, EXIT_READ_FAILED + 1)


class ClusterRefused(FluxTrainError):
    """The API server refused what it was asked for, or does not answer (status: None)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class KubernetesJobs:
    """The backend that makes, watches and deletes Jobs."""

    shares_machine = False

    def __init__(self, settings: ServeSettings) -> None:
        """Connect, as the pod's service account or by $KUBECONFIG.

        Raises BadInput where the client is missing, Jobs may not be listed, or the files of jobs
        are not on the volume.
        """
        self._chosen = settings.kubernetes
        _refuse_other_places(self._chosen.mount, settings.folder.absolute(), runs_root())
        self._batch, self._core = _connected()
        own = IN_CLUSTER.read_text().strip() if IN_CLUSTER.exists() else "default"
        self._namespace = self._chosen.namespace or own
        self._jobs: dict[str, Any] = {}  # by name, as far as the watch has told
        self._reached = False
        self._aside_until_s: dict[str, float] = {}  # nodes with a card that failed
        self._ends = threading.Event()
        try:
            self._list()
        except ClusterRefused as error:  # else it is asked again
            if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise BadInput(
                    f"{error}: give the server the rights that `fluxtrain serve --print "
                    "kubernetes` writes"
                ) from error

    def open(self, wake: Callable[[], None]) -> None:
        """Begin to watch the Jobs, in a thread."""
        threading.Thread(target=self._follow, args=(wake,), name="jobs", daemon=True).start()

    def close(self) -> None:
        """End watching; Jobs go on."""
        self._ends.set()

    # -- the verbs

    def start(self, row: Mapping[str, Any], arguments: Sequence[str]) -> None:
        """Make the Job of a trial, suspended, for Kueue to admit. Raises ClusterRefused."""
        now_s = time.monotonic()
        aside = [node for node, until_s in self._aside_until_s.items() if until_s > now_s]
        body = job_manifest(self._chosen, row, arguments, aside)
        try:
            made = _asked(self._batch.create_namespaced_job, self._namespace, body)
        except ClusterRefused as error:
            if error.status == HTTPStatus.CONFLICT:
                return  # an answer was lost, or a server that died had made it
            raise
        self._jobs[name_of(row)] = made

    def state(self, row: Mapping[str, Any]) -> State:
        """Return what the newest trial's Job does; while it cannot be asked, what it did last."""
        if row["tries"].get("started", 0) == row["tries"].get("judged", 0):
            return "ended"
        try:
            job = self._find(name_of(row))
        except ClusterRefused:
            return "waits"
        if job is None:
            return "ended" if _was_made(row) else "unmade"
        over = _condition(job)
        if over is None:
            return "runs" if job.status is not None and job.status.ready else "waits"
        age_s = (datetime.now(UTC) - over.last_transition_time).total_seconds()
        is_seen = over.type == "Failed" or run_of(row["id"]).liveness() == "finished"
        return "ended" if is_seen or age_s > SEEN_S else "waits"

    def why_waits(self, row: Mapping[str, Any]) -> str:
        """Tell what a Job that does not run waits for, as far as the cluster says."""
        job = self._jobs.get(name_of(row))
        if not self._reached:
            return "the cluster does not answer, so that nothing is known of its trainer"
        if job is None:
            return ""
        if job.spec.suspend:
            return f"waits until Kueue's queue {self._chosen.queue} admits it"
        pod = self._newest_pod(name_of(row))
        held = [one for one in (pod and pod.status.conditions) or () if one.status == "False"]
        held += [one.state.waiting for one in _containers(pod) if one.state.waiting]
        why = next((one for one in reversed(held) if one.message), None)
        return f"its pod waits: {why.reason}: {why.message}" if why is not None else ""

    def stop(self, row: Mapping[str, Any]) -> None:
        """Delete the Job, which stays until its pod has written a checkpoint and ended."""
        with contextlib.suppress(ClusterRefused):  # the queue asks again
            _asked(
                self._batch.delete_namespaced_job,
                name_of(row),
                self._namespace,
                propagation_policy="Foreground",
            )

    def collect(self, row: Mapping[str, Any], run: RunSummary | None) -> End:
        """Return how a trial ended: by what its pod tells, with the words of the run directory."""
        name, known = name_of(row), run.exit_code if run is not None else None
        job = self._jobs.get(name)
        if job is None and not _was_stopped(row) and _was_made(row):
            return End(
                code=EXIT_BAD_INPUT,
                message=f"its Kubernetes Job {name} was deleted by hand (or has been over for "
                f"{KEPT_S // 86400} days): create the job again to train",
            )
        if job is None:
            return end_of(row, run, EXIT_TERMINATED if known is None else known)
        pod = self._newest_pod(name)
        states = [one.state.terminated for one in _containers(pod)]
        if not any(states):
            return end_of(row, run, known, _condition(job).message or "")
        ended = next(filter(None, states))
        if ended.exit_code == EXIT_DEVICE_FAILED:
            self._aside_until_s[pod.spec.node_name] = time.monotonic() + ASIDE_S
        if ended.exit_code == known:
            return end_of(row, run, known)
        return end_of(row, run, *self._unrecorded(ended))

    def _unrecorded(self, ended: Any) -> tuple[int, str]:
        """Return what an end means of which the run directory says nothing, and the words for it.

        Exit 2: the folder was in use, as the lock of a node that is gone lasts for a while on a
        network disk.
        """
        lines = (ended.message or "").strip().splitlines()
        if ended.reason == "OOMKilled":
            memory = self._chosen.resources.get("memory", "its memory")
            return EXIT_DOES_NOT_FIT, (
                f"its container was killed as it took more than {memory}: raise "
                "kubernetes.resources.memory in serve.yaml"
            )
        told = lines[-1] if lines else f"its container ended with {ended.exit_code}"
        lost = ended.exit_code in (EXIT_FINISHED, EXIT_BAD_INPUT)
        return EXIT_READ_FAILED if lost else ended.exit_code, told

    # -- what the cluster says

    def _follow(self, wake: Callable[[], None]) -> None:
        """List the Jobs and watch them, again and again."""
        while not self._ends.is_set():
            try:
                self._watch(self._list(), wake)
            except Exception as error:  # noqa: BLE001 - whatever was told must not end it
                if self._reached:
                    print(f"kubernetes: {error}", file=sys.stderr, flush=True)
                self._reached = False
                self._ends.wait(PAUSE_S)

    def _watch(self, version: str, wake: Callable[[], None]) -> None:
        """Keep `_jobs` right for a minute, from a list of this version on."""
        from kubernetes.watch import Watch

        wake()
        for event in Watch().stream(
            self._batch.list_namespaced_job,
            self._namespace,
            label_selector=f"app={APP}",
            resource_version=version,
            timeout_seconds=WATCH_S,
            _request_timeout=(TIMEOUT_S[0], WATCH_S + TIMEOUT_S[1]),
        ):
            name = event["object"].metadata.name
            if event["type"] == "DELETED":
                self._jobs.pop(name, None)
            else:
                self._jobs[name] = event["object"]
            wake()
            if self._ends.is_set():
                return

    def _list(self) -> str:
        """List all Jobs of trainers; return the version that a watch begins with.

        Raises ClusterRefused.
        """
        wanted = f"app={APP}"
        listed = _asked(self._batch.list_namespaced_job, self._namespace, label_selector=wanted)
        self._jobs = {one.metadata.name: one for one in listed.items}
        self._reached = True
        return str(listed.metadata.resource_version)

    def _find(self, name: str) -> Any:
        """Return a Job; that there is none only the API server can tell. Raises ClusterRefused."""
        found = self._jobs.get(name)
        if found is not None:
            return found
        if not self._reached:
            raise ClusterRefused("the cluster does not answer")
        try:
            found = _asked(self._batch.read_namespaced_job, name, self._namespace)
        except ClusterRefused as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise
        self._jobs[name] = found
        return found

    def _newest_pod(self, name: str) -> Any:
        """Return the newest pod of a Job; None where there is none, or it cannot be asked."""
        pods: list[Any] = []
        with contextlib.suppress(ClusterRefused):
            wanted = f"job-name={name}"
            listed = _asked(self._core.list_namespaced_pod, self._namespace, label_selector=wanted)
            pods = listed.items
        return max(pods, key=lambda one: one.metadata.creation_timestamp, default=None)


def name_of(row: Mapping[str, Any]) -> str:
    """Return the name of the Job of a job's newest trial."""
    return f"{row['id']}-{row['tries']['started']}"


def job_manifest(
    chosen: KubernetesSettings,
    row: Mapping[str, Any],
    arguments: Sequence[str],
    nodes_aside: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the Job of a trial; arguments: of `fluxtrain train`."""
    labels = {"app": APP, "fluxtrain/job": row["id"]}
    container = {
        "name": TRAINER,
        "image": chosen.image,
        "args": ["train", *arguments, "--run-dir", str(run_of(row["id"]).path)],
        "env": [{"name": "HOME", "value": str(chosen.mount)}],
        "resources": {"requests": chosen.resources, "limits": chosen.resources},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod = locked_down(container, chosen.claim, str(chosen.mount))
    pod |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": _grace_s(row["plan"])}
    if nodes_aside:
        but = {"key": "metadata.name", "operator": "NotIn"}
        others = [{**but, "values": [node]} for node in nodes_aside]
        wished = [{"weight": 100, "preference": {"matchFields": others}}]
        wish = "preferredDuringSchedulingIgnoredDuringExecution"
        pod["affinity"] = {"nodeAffinity": {wish: wished}}
    rules: list[dict[str, Any]] = [
        {"action": "FailJob", "onExitCodes": _codes(FOR_GOOD)},
        {"action": "Ignore", "onExitCodes": _codes((EXIT_TERMINATED,))},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name_of(row), "labels": {**labels, QUEUE_LABEL: chosen.queue}},
        "spec": {
            "suspend": True,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",  # never two trainers of one run
            "ttlSecondsAfterFinished": KEPT_S,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": labels}, "spec": {**pod, **chosen.pod}},
        },
    }


def _codes(values: Sequence[int]) -> dict[str, Any]:
    return {"containerName": TRAINER, "operator": "In", "values": sorted(values)}


def _grace_s(plan: Mapping[str, Any]) -> int:
    """Return the seconds for ending a step and writing a checkpoint, on a slow disk."""
    written_s = (plan.get("checkpoint_bytes") or 0) / 50e6
    return 60 + math.ceil(2 * (plan.get("step_s") or 0.0) + written_s)


def _was_stopped(row: Mapping[str, Any]) -> bool:
    """Return whether the newest trial was told to stop, or nobody wants it to run."""
    tries = row["tries"]
    return bool(row["wanted"] != "run" or tries.get("told") == tries["started"])


def _was_made(row: Mapping[str, Any]) -> bool:
    """Return whether the Job of the newest trial is known to have existed."""
    tries = row["tries"]
    return bool(tries["started"] in (tries.get("made"), tries.get("told")))


def _condition(job: Any) -> Any:
    """Return the condition that a Job has ended by; None while it goes on."""
    known = (job.status and job.status.conditions) or ()
    over = (one for one in known if one.type in ("Complete", "Failed") and one.status == "True")
    return next(over, None)


def _containers(pod: Any) -> Sequence[Any]:
    return (pod and pod.status.container_statuses) or ()


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise ClusterRefused for errors of the API server and of the network."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        told = error.body or error.reason
        with contextlib.suppress(ValueError, TypeError, KeyError):
            told = json.loads(told)["message"]
        raise ClusterRefused(f"the cluster answers {error.status}: {told}", error.status) from error
    except (HTTPError, OSError) as error:
        raise ClusterRefused(f"the cluster does not answer: {error}") from error


def _asked(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the answer of the API server. Raises ClusterRefused."""
    with _refusals():
        return call(*arguments, **options, _request_timeout=TIMEOUT_S)


def _connected() -> tuple[Any, Any]:
    """Return the API of Jobs and that of pods. Raises BadInput."""
    try:
        from kubernetes import client, config
    except ModuleNotFoundError as error:
        raise BadInput(
            f"Jobs of Kubernetes need {error.name}: install it with "
            "`pip install 'fluxtrain[kubernetes]'`"
        ) from error
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config()
        else:
            config.load_kube_config(os.environ.get("KUBECONFIG"))
    except config.ConfigException as error:
        raise BadInput(
            f"no cluster is known ({error}): name a file with KUBECONFIG, or run the server in a "
            "pod as `fluxtrain serve --print kubernetes` writes"
        ) from error
    return client.BatchV1Api(), client.CoreV1Api()


def _refuse_other_places(mount: Path, *places: Path) -> None:
    """Raise BadInput for files of jobs that pods would not see."""
    for place in places:
        if not place.is_relative_to(mount):
            raise BadInput(
                f"{place} is not on the volume that pods see at {mount}: choose --folder and "
                "FLUXTRAIN_RUNS there, or set kubernetes.mount in serve.yaml"
            )
