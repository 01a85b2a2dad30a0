"""`serve --print`: the files are as they were reviewed, and hold together."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fluxtrain.cli import app
from fluxtrain.errors import BadInput
from fluxtrain.serve.deployment import document
from fluxtrain.serve.settings import ServedModel, ServeSettings

PRINTED = Path(__file__).parent / "printed"
SETTINGS = ServeSettings(
    models={"llama": ServedModel(path="/models/llama", method="qlora")}, cards=(0, 1)
)


@pytest.mark.parametrize(
    "name",
    [
        *("dockerfile", "compose.yaml", "kubernetes.yaml", "kubernetes.jobs.yaml"),
        *("grafana.json", "alerts.yaml"),
    ],
)
def test_what_is_printed_is_what_was_reviewed(name: str) -> None:
    """Review a change with FLUXTRAIN_WRITE=1 and `git diff`."""
    where = {"backend": "kubernetes", "cards": ()} if ".jobs" in name else {}
    settings = SETTINGS.model_copy(update=where)
    text = document(name.partition(".")[0], settings).replace(version("fluxtrain"), "VERSION")
    if os.environ.get("FLUXTRAIN_WRITE"):
        (PRINTED / name).write_text(text)
    assert text == (PRINTED / name).read_text()


def test_compose_has_board_and_rules_in_place() -> None:
    made = yaml.safe_load(document("compose", SETTINGS))
    texts = {name: one["content"].replace("$$", "$") for name, one in made["configs"].items()}
    assert texts["board"] == json.dumps(json.loads(document("grafana", SETTINGS)))
    assert texts["rules"] == document("alerts", SETTINGS)
    used = [one["source"] for service in made["services"].values() for one in service["configs"]]
    assert sorted(used) == sorted(texts)
    served = ServeSettings.model_validate(yaml.safe_load(texts["serve"]))
    assert served.models == SETTINGS.models and served.cards == (0, 1)
    assert "/models/llama:/models/llama:ro" in made["services"]["fluxtrain"]["volumes"]


def test_the_pod_has_no_rights_and_places_for_all_that_is_written() -> None:
    parts: dict[str, Any] = {
        one["kind"]: one for one in yaml.safe_load_all(document("kubernetes", SETTINGS))
    }
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts.keys() == {one["name"] for one in pod["volumes"]}
    text = parts["ConfigMap"]["data"]["serve.yaml"]
    folder = ServeSettings.model_validate(yaml.safe_load(text)).folder
    assert str(folder).startswith(mounts["data"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert (
        parts["Service"]["spec"]["selector"]
        == parts["Deployment"]["spec"]["selector"]["matchLabels"]
    )


def test_tasks_without_what_runs_them_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    config = tmp_path / "serve.yaml"
    config.write_text("models: {demo: {path: demo, method: full, tasks: tasks}}")
    ended = CliRunner().invoke(app, ["serve", "--config", str(config), "--port", "0"])
    assert isinstance(ended.exception, BadInput)
    assert "fluxtrain[eval]" in str(ended.exception)


def test_the_command_prints_and_ends() -> None:
    ended = CliRunner().invoke(app, ["serve", "--print", "alerts"])
    assert ended.exit_code == 0
    assert yaml.safe_load(ended.output)["groups"][0]["name"] == "fluxtrain"
