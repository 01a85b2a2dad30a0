"""Files for running and watching the service elsewhere, made of its settings: `serve --print`."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from fluxtrain.serve.monitoring import alert_rules, board
from fluxtrain.serve.settings import KubernetesSettings, ServeSettings

PORT, USER = 8199, 1000
DATA = "/data"  # database, files, models and runs, in a container
CONFIG = "/etc/fluxtrain/serve.yaml"
IMAGE = "fluxtrain-serve"
PROMETHEUS_IMAGE, GRAFANA_IMAGE = "prom/prometheus:v3.5.0", "grafana/grafana:12.1.0"
_SERVE = ("serve", "--config", CONFIG, "--host", "0.0.0.0", "--behind-proxy")


def document(name: str, settings: ServeSettings) -> str:
    """Return one of the files: dockerfile, compose, kubernetes, grafana, alerts."""
    if name == "dockerfile":
        return _dockerfile()
    if name == "grafana":
        return json.dumps(board(), indent=2)
    if name == "alerts":
        return _yaml(alert_rules())
    if name == "compose":
        return _COMPOSE_HEAD + _yaml(_compose(settings))
    head = _JOBS_HEAD if settings.backend == "kubernetes" else _KUBERNETES_HEAD
    return head + "---\n".join(map(_yaml, _kubernetes(settings)))


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=100)


def _dockerfile() -> str:
    return f"""\
# The tuning service in a container:
#   fluxtrain serve --print dockerfile | docker build -t {IMAGE} -
FROM python:3.12-slim

ARG TORCH=torch
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir "${{TORCH}}" ${{TORCH_INDEX:+--index-url "${{TORCH_INDEX}}"}}
ARG PACKAGE="fluxtrain[serve,data,kubernetes,postgres]=={version("fluxtrain")}"
RUN pip install --no-cache-dir "${{PACKAGE}}"

# A user without rights; nothing but {DATA} and /tmp is written, so that the root may be read-only.
RUN useradd --uid {USER} --create-home fluxtrain && mkdir -p {DATA} && chown {USER}:{USER} {DATA}
ENV HOME={DATA} FLUXTRAIN_RUNS={DATA}/runs PYTHONUNBUFFERED=1
USER {USER}
WORKDIR {DATA}
VOLUME {DATA}
EXPOSE {PORT}

ENTRYPOINT ["fluxtrain"]
CMD ["serve", "--folder", "{DATA}/service", "--host", "0.0.0.0", "--behind-proxy"]
"""


def _serve_yaml(settings: ServeSettings) -> str:
    """Return the operator's settings for a container."""
    there = settings.model_copy(update={"folder": Path(DATA) / "service"})
    return _yaml(there.model_dump(mode="json", exclude_defaults=True))


_COMPOSE_HEAD = """\
# The service with Prometheus and Grafana (http://127.0.0.1:3000), board and rules in place:
#   fluxtrain serve --print dockerfile | docker build -t fluxtrain-serve -
#   touch prometheus.key && docker compose up -d fluxtrain && docker compose logs fluxtrain
#   docker compose exec fluxtrain fluxtrain serve keys add prometheus --scope metrics \\
#     --config /etc/fluxtrain/serve.yaml > prometheus.key
#   docker compose up -d
"""


def _compose(settings: ServeSettings) -> dict[str, Any]:
    models = sorted({one.path for one in settings.models.values() if one.path.startswith("/")})
    scrape = {
        "job_name": "fluxtrain",
        "scrape_interval": "15s",
        "authorization": {"credentials_file": "/run/secrets/prometheus_key"},
        "static_configs": [{"targets": [f"fluxtrain:{PORT}"]}],
    }
    texts = {
        "serve": (CONFIG, _serve_yaml(settings)),
        "prometheus": (
            "/etc/prometheus/prometheus.yml",
            _yaml({"rule_files": ["/etc/prometheus/rules.yml"], "scrape_configs": [scrape]}),
        ),
        "rules": ("/etc/prometheus/rules.yml", _yaml(alert_rules())),
        "source": ("/etc/grafana/provisioning/datasources/fluxtrain.yml", _yaml(_SOURCE)),
        "boards": ("/etc/grafana/provisioning/dashboards/fluxtrain.yml", _yaml(_BOARDS)),
        "board": ("/var/lib/grafana/boards/fluxtrain.json", json.dumps(board())),
    }

    def mounted(*names: str) -> list[dict[str, str]]:
        return [{"source": name, "target": texts[name][0]} for name in names]

    gpus = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    service = {
        "image": IMAGE,
        "command": list(_SERVE),
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "ulimits": {"memlock": -1},  # page-locked memory
        "shm_size": "1gb",
        "stop_grace_period": "30s",
        "restart": "unless-stopped",
        "ports": [f"127.0.0.1:{PORT}:{PORT}"],
        "volumes": [f"data:{DATA}", *(f"{path}:{path}:ro" for path in models)],
        "configs": mounted("serve"),
    }
    if settings.cards:
        service["deploy"] = {"resources": {"reservations": {"devices": [gpus]}}}
    prometheus = {
        "image": PROMETHEUS_IMAGE,
        "restart": "unless-stopped",
        "volumes": ["prometheus:/prometheus"],
        "configs": mounted("prometheus", "rules"),
        "secrets": ["prometheus_key"],
    }
    grafana = {
        "image": GRAFANA_IMAGE,
        "restart": "unless-stopped",
        "ports": ["127.0.0.1:3000:3000"],
        "volumes": ["grafana:/var/lib/grafana"],
        "configs": mounted("source", "boards", "board"),
    }
    return {
        "services": {"fluxtrain": service, "prometheus": prometheus, "grafana": grafana},
        "volumes": {"data": {}, "prometheus": {}, "grafana": {}},
        "secrets": {"prometheus_key": {"file": "./prometheus.key"}},
        # a dollar would begin a variable of compose
        "configs": {
            name: {"content": text.replace("$", "$$")} for name, (_, text) in texts.items()
        },
    }


_SOURCE = {
    "apiVersion": 1,
    "datasources": [
        {
            "name": "Prometheus",
            "type": "prometheus",
            "url": "http://prometheus:9090",
            "isDefault": True,
        }
    ],
}
_BOARDS = {
    "apiVersion": 1,
    "providers": [{"name": "FluxTrain", "options": {"path": "/var/lib/grafana/boards"}}],
}

_KUBERNETES_HEAD = """\
# One server with its trainers in one pod. Push the image of `--print dockerfile`, name it below:
#   fluxtrain serve --print kubernetes --config serve.yaml | kubectl apply -f -
# Models that are folders have to be on the volume, or on another one that you mount.
"""
_JOBS_HEAD = """\
# A server whose jobs train as Jobs that Kueue admits (Kubernetes 1.31, Kueue 0.15, or newer). Push
# the image of `--print dockerfile` and name it in serve.yaml (kubernetes.image), then:
#   kubectl create secret generic fluxtrain-db --from-literal url=postgresql://...
#   fluxtrain serve --print kubernetes --backend kubernetes --config serve.yaml | kubectl apply -f -
# Its volume is on every node (ReadWriteMany), and models that are folders lie there. Set the quotas
# of the ClusterQueue to what your nodes have.
"""


def locked_down(container: dict[str, Any], claim: str, mount: str) -> dict[str, Any]:
    """Return a pod for a container: a user without rights, a root that is only read, and places for
    all that is written. The container gets them too."""
    volumes: list[dict[str, Any]] = [
        {"name": "data", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]
    places = {"data": mount, "tmp": "/tmp", "shm": "/dev/shm"}
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    container["volumeMounts"] = [{"name": name, "mountPath": at} for name, at in places.items()]
    return {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",  # a large volume is not gone through each time
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
    }


def _kubernetes(settings: ServeSettings) -> list[dict[str, Any]]:
    in_jobs, chosen = settings.backend == "kubernetes", settings.kubernetes
    labels = {"app": "fluxtrain"}
    meta = {"name": "fluxtrain", "labels": labels}
    claim = {
        "accessModes": ["ReadWriteMany" if in_jobs else "ReadWriteOnce"],
        "resources": {"requests": {"storage": "200Gi"}},
    }
    container: dict[str, Any] = {
        "name": "fluxtrain",
        "image": chosen.image,
        "args": list(_SERVE),
        "ports": [{"name": "http", "containerPort": PORT}],
        "livenessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 30},
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 5},
    }
    if settings.cards:
        container["resources"] = {"limits": {"nvidia.com/gpu": len(settings.cards)}}
    pod = locked_down(container, chosen.claim, DATA)
    container["volumeMounts"].append({"name": "config", "mountPath": str(Path(CONFIG).parent)})
    pod["volumes"].append({"name": "config", "configMap": {"name": "fluxtrain"}})
    if in_jobs:
        pod |= {"serviceAccountName": "fluxtrain", "automountServiceAccountToken": True}
        url = {"secretKeyRef": {"name": "fluxtrain-db", "key": "url"}}
        container["env"] = [{"name": "FLUXTRAIN_DB", "valueFrom": url}]
    deployment = {
        "replicas": 1,  # one server a folder
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    service = {"selector": labels, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]}
    claim_meta = {**meta, "name": chosen.claim}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": claim_meta,
            "spec": claim,
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": meta,
            "data": {Path(CONFIG).name: _serve_yaml(settings)},
        },
        *(_rights_and_queues(meta, chosen) if in_jobs else ()),
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": deployment},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
    ]


def _rights_and_queues(meta: dict[str, Any], chosen: KubernetesSettings) -> list[dict[str, Any]]:
    """Return what lets the server make Jobs, and what lets Kueue admit them."""
    rights, kueue = "rbac.authorization.k8s.io", "kueue.x-k8s.io/v1beta2"
    jobs = ["create", "get", "list", "watch", "delete"]
    rules = [
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": jobs},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
    ]
    role = {"apiGroup": rights, "kind": "Role", "name": "fluxtrain"}
    quotas = [{"name": name, "nominalQuota": one} for name, one in chosen.resources.items()]
    flavor = {"name": "fluxtrain", "resources": quotas}
    group = {"coveredResources": list(chosen.resources), "flavors": [flavor]}
    cluster_queue = {"namespaceSelector": {}, "resourceGroups": [group]}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{rights}/v1", "kind": "Role", "metadata": meta, "rules": rules},
        {
            "apiVersion": f"{rights}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", "name": "fluxtrain"}],
        },
        {"apiVersion": kueue, "kind": "ResourceFlavor", "metadata": meta},
        {"apiVersion": kueue, "kind": "ClusterQueue", "metadata": meta, "spec": cluster_queue},
        {
            "apiVersion": kueue,
            "kind": "LocalQueue",
            "metadata": {**meta, "name": chosen.queue},
            "spec": {"clusterQueue": "fluxtrain"},
        },
    ]
