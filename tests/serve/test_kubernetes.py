"""Jobs of the service as Jobs of a cluster: a fake API server, with processes for pods."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from fluxtrain.errors import BadInput
from fluxtrain.events.events import StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.serve.deployment import document
from fluxtrain.serve.jobs import find_job, run_of
from fluxtrain.serve.kubernetes_jobs import KubernetesJobs, job_manifest
from fluxtrain.serve.settings import KubernetesSettings, ServedModel, ServeSettings
from tests.serve.conftest import FAKE, Served, create, ended, wait_for
from tests.serve.fake_cluster import Cluster
from tests.serve.test_queue import notes

api = pytest.importorskip("kubernetes.client", reason="needs the extra `kubernetes`")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr("fluxtrain.serve.kubernetes_jobs.WATCH_S", 2)
    monkeypatch.setattr("fluxtrain.serve.kubernetes_jobs.PAUSE_S", 0.05)
    monkeypatch.setattr("fluxtrain.serve.queue.RELAUNCH_S", 0.1)
    monkeypatch.setattr("fluxtrain.serve.queue.WHY_PERIOD_S", 0.1)
    made = Cluster(FAKE)
    monkeypatch.setenv("KUBECONFIG", str(made.write_config(tmp_path / "kubeconfig")))
    yield made
    made.close()


@pytest.fixture
def served(cluster: Cluster, serve: Callable[..., Served], tmp_path: Path) -> Served:
    return serve(backend="kubernetes", kubernetes={"mount": tmp_path})


def state(job_id: str) -> str:
    return run_of(job_id).liveness()


def tries(served: Served, job_id: str) -> Any:
    return find_job(served.service.store, "default", job_id)["tries"]


def steps(job_id: str) -> list[int]:
    found = read_events(run_of(job_id).journal)
    return [one.step for one in found if isinstance(one, StepFinished)]


def test_a_suspended_job_goes_on_by_itself_when_it_is_admitted(
    cluster: Cluster, served: Served
) -> None:
    cluster.admits = False
    client = served.client()
    job = create(client, "waits")
    name = f"{job.id}-1"
    wait_for(lambda: "Kueue's queue fluxtrain" in notes(client, job.id))
    assert client.fine_tuning.jobs.retrieve(job.id).status == "queued"
    for _ in range(2):  # preempted once
        cluster.admit(name)
        wait_for(lambda: state(job.id) == "running" and "started_s" in tries(served, job.id))
        cluster.suspend(name)
        wait_for(lambda: state(job.id) == "stopped")
        assert run_of(job.id).summary().exit_code == 143
        wait_for(lambda: "started_s" not in tries(served, job.id))  # it waits, and uses no card
        assert served.service.store.used("default", ("card_s",), 0.0) > 0
    (run_of(job.id).path / "go").touch()
    cluster.admit(name)
    assert ended(client, job.id).fine_tuned_model
    assert cluster.made == [name] and steps(job.id) == [1, 2, 3, 4]
    assert "queued again" not in notes(client, job.id)
    assert not served.service.queue.busy  # nothing of it was on this machine


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_evicted_pod_and_a_lost_node_are_replaced_within_their_job(
    cluster: Cluster, served: Served, number: int
) -> None:
    client = served.client()
    job = create(client, "waits")
    wait_for(lambda: state(job.id) == "running")
    cluster.disrupt(f"{job.id}-1", number)
    wait_for(lambda: len(cluster.pods) == 2)
    (run_of(job.id).path / "go").touch()
    assert ended(client, job.id).status == "succeeded"
    assert cluster.made == [f"{job.id}-1"] and steps(job.id) == [1, 2, 3, 4]


def test_what_is_lost_between_server_and_cluster_makes_no_job_twice(
    cluster: Cluster, served: Served, serve: Callable[..., Served], tmp_path: Path
) -> None:
    cluster.loses_answers = True  # it is made, and the server is not told
    client = served.client()
    job = create(client, "waits")
    wait_for(lambda: state(job.id) == "running")
    wait_for(lambda: tries(served, job.id).get("made"))
    cluster.loses_answers, cluster.down = False, True
    cluster.stop_watches()
    served.close()
    again = serve(backend="kubernetes", kubernetes={"mount": tmp_path})  # while it is down
    client = again.client()
    wait_for(lambda: "does not answer" in notes(client, job.id))
    assert client.fine_tuning.jobs.retrieve(job.id).status == "running"
    cluster.down = False
    cluster.forget()
    (run_of(job.id).path / "go").touch()
    assert ended(client, job.id).status == "succeeded"
    assert cluster.made == [f"{job.id}-1"]


def test_a_watch_that_says_nothing_is_made_up_for_by_a_list(
    cluster: Cluster, served: Served
) -> None:
    cluster.silent = True
    client = served.client()
    job = create(client)
    assert ended(client, job.id).status == "succeeded"


def test_jobs_are_planned_for_the_machine_of_their_pods(
    cluster: Cluster, serve: Callable[..., Served], tmp_path: Path
) -> None:
    cluster.admits, machine = False, tmp_path / "machine.json"
    served = serve(backend="kubernetes", kubernetes={"mount": tmp_path, "machine": machine})
    with pytest.raises(openai.BadRequestError, match=r"machine\.json"):
        create(served.client())
    machine.touch()
    job = create(served.client())
    assert job.fluxtrain["plan"]["checkpoint_bytes"] == 1
    assert served.client().fine_tuning.jobs.cancel(job.id).status == "cancelled"


def test_a_job_deleted_by_hand_fails_with_words(cluster: Cluster, served: Served) -> None:
    client = served.client()
    job = create(client, "waits")
    wait_for(lambda: state(job.id) == "running")
    cluster.delete(f"{job.id}-1", foreground=False)
    told = ended(client, job.id)
    assert told.status == "failed" and "deleted by hand" in told.error.message
    assert cluster.made == [f"{job.id}-1"]


def test_pausing_and_cancelling_delete_the_job_after_its_checkpoint(
    cluster: Cluster, served: Served
) -> None:
    client = served.client()
    job = create(client, "waits")
    wait_for(lambda: state(job.id) == "running")
    client.fine_tuning.jobs.pause(job.id)
    wait_for(lambda: not cluster.jobs)
    assert run_of(job.id).summary().exit_code == 143
    assert client.fine_tuning.jobs.retrieve(job.id).fluxtrain["state"] == "paused"
    client.fine_tuning.jobs.resume(job.id)
    wait_for(lambda: state(job.id) == "running")
    assert list(cluster.jobs) == [f"{job.id}-2"]
    client.fine_tuning.jobs.cancel(job.id)
    assert ended(client, job.id).status == "cancelled"
    wait_for(lambda: not cluster.jobs)


def test_an_end_of_its_own_fails_the_job_and_is_judged_as_anywhere(
    cluster: Cluster, served: Served
) -> None:
    cluster.refusal = 403  # no rights yet
    client = served.client()
    job = create(client, "killed@1", "exit-7@2", "exit-4@3")
    wait_for(lambda: "403" in notes(client, job.id))
    cluster.refusal = 0
    told = ended(client, job.id)
    assert (told.status, told.error.code) == ("failed", "4")
    assert "the fake failed with 4" in told.error.message
    assert cluster.made == [f"{job.id}-{number}" for number in (1, 2, 3)]
    pod = cluster.jobs[f"{job.id}-3"]["spec"]["template"]["spec"]
    assert "node-0" in json.dumps(pod["affinity"]["nodeAffinity"])  # whose card failed


ROW: dict[str, Any] = {
    "id": "ftjob-1",
    "wanted": "run",
    "tries": {"started": 1, "made": 1},
    "plan": {"checkpoint_bytes": 10**9, "step_s": 1.5},
}


@pytest.mark.parametrize(
    ("code", "memory_full", "end", "told"),
    [
        (137, True, 3, "took more than 32Gi"),
        (137, False, 137, "its last line"),
        (2, False, 8, "its last line"),  # the folder was in use: nothing is recorded
        (0, False, 8, "its last line"),  # what it wrote is not there
    ],
)
def test_ends_of_which_the_run_says_nothing_have_a_meaning(
    cluster: Cluster, tmp_path: Path, code: int, memory_full: bool, end: int, told: str
) -> None:
    settings = ServeSettings(folder=tmp_path, kubernetes=KubernetesSettings(mount=Path("/")))
    cluster.command, cluster.memory_full = ["sh", "-c", f"exit {code}"], memory_full
    backend = KubernetesJobs(settings)
    backend.start(ROW, ["config.yaml"])
    backend.start(ROW, ["config.yaml"])  # by another server
    assert cluster.made == ["ftjob-1-1"]
    wait_for(lambda: "conditions" in cluster.jobs["ftjob-1-1"]["status"])
    backend = KubernetesJobs(settings)
    assert backend.state(ROW) == ("waits" if code == 0 else "ended")
    found = backend.collect(ROW, None)
    assert found.code == end and told in found.message


def test_a_cluster_that_is_not_there_or_gives_no_rights_is_told(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"not on the volume.*kubernetes.mount"):
        KubernetesJobs(ServeSettings(folder=tmp_path))
    settings = ServeSettings(folder=tmp_path, kubernetes=KubernetesSettings(mount=Path("/")))
    cluster.lists = 403
    with pytest.raises(BadInput, match="403.*--print kubernetes"):
        KubernetesJobs(settings)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(BadInput, match="KUBECONFIG"):
        KubernetesJobs(settings)


def test_manifests_are_what_the_client_knows() -> None:
    chosen = KubernetesSettings(pod={"nodeSelector": {"card": "h200"}})
    job = job_manifest(chosen, ROW, ["config.yaml"], ["bad-node"])
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 83
    fails, ignored, _ = job["spec"]["podFailurePolicy"]["rules"]
    assert fails["onExitCodes"]["values"] == [2, 3, 4, 5, 6, 7, 8]
    assert ignored["onExitCodes"]["values"] == [143]
    settings = ServeSettings(
        backend="kubernetes",
        kubernetes=chosen,
        models={"llama": ServedModel(path="/data/llama", method="qlora")},
    )
    parts = [*yaml.safe_load_all(document("kubernetes", settings)), job]
    own = [one for one in parts if "kueue" not in one["apiVersion"]]
    assert len(own) == 8
    client = api.ApiClient()
    for one in own:
        known = client.deserialize(json.dumps(one), f"V1{one['kind']}", "application/json")
        assert client.sanitize_for_serialization(known) == one
    names = {one["kind"]: one["metadata"]["name"] for one in parts}
    queues = {one["kind"]: one["spec"] for one in parts if one["kind"].endswith("Queue")}
    assert names["LocalQueue"] == job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert queues["LocalQueue"]["clusterQueue"] == names["ClusterQueue"]
    (group,) = queues["ClusterQueue"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == names["ResourceFlavor"]
    covered = [one["name"] for one in flavor["resources"]]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert covered == group["coveredResources"] == list(container["resources"]["requests"])
    assert container["securityContext"]["readOnlyRootFilesystem"]
