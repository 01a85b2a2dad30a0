"""Modules that stand for wandb, mlflow and trackio, with the signatures of the real ones.

They write what they get to a list, and refuse what the real ones would: an argument they do not
have, a run that does not exist, a value that is no number.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Told = list[tuple[Any, ...]]


class Settings:
    """wandb.Settings, with the two fields that are set."""

    def __init__(self, *, console: str, silent: bool) -> None:
        self.console, self.silent = console, silent


class Run:
    """A run of wandb or of trackio."""

    def __init__(self, told: Told) -> None:
        self._told = told

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert isinstance(step, int)
        assert all(isinstance(v, float | str | tuple | list) for v in data.values()), data
        self._told.append(("log", step, dict(data)))

    def finish(self, exit_code: int | None = None) -> None:
        self._told.append(("finish", exit_code))


def image(value: str, caption: str | None = None) -> tuple[str, str | None]:
    """wandb.Image or trackio.Image, of a file that must be there."""
    assert Path(value).is_file()
    return Path(value).name, caption


def wandb(told: Told) -> ModuleType:
    """wandb 0.31."""
    module: Any = ModuleType("wandb")

    def init(
        *, project: str | None = None, dir: str | None = None, id: str | None = None,
        name: str | None = None, config: dict[str, Any] | None = None, mode: str | None = None,
        resume: str | None = None, settings: Settings | None = None,
    ) -> Run:  # fmt: skip
        assert Path(str(dir)).is_dir() and isinstance(config, dict) and settings is not None
        told.append(("init", project, name, id, mode, resume))
        return Run(told)

    def table(*, columns: list[str], data: list[list[Any]]) -> tuple[Any, ...]:
        assert all(len(row) == len(columns) for row in data)
        return tuple(tuple(row) for row in data)

    def setup(settings: Settings | None = None) -> None:
        assert settings is not None and settings.silent

    module.init, module.Table, module.Settings = init, table, Settings
    module.Image = image
    module.setup = setup
    return module


def trackio(told: Told) -> ModuleType:
    """trackio 0.43, which prints."""
    module: Any = ModuleType("trackio")

    def init(
        project: str, name: str | None = None, *, config: dict[str, Any] | None = None,
        resume: str = "never", embed: bool = True, auto_log_gpu: bool | None = None,
        auto_log_cpu: bool | None = None,
    ) -> Run:  # fmt: skip
        module.print(f"* Trackio project initialized: {project}")
        assert (embed, auto_log_gpu, auto_log_cpu) == (False, False, False)
        told.append(("init", project, name, resume, config))
        return Run(told)

    module.print = print
    module.init, module.Image = init, image
    return module


def mlflow(told: Told, runs: dict[str, str]) -> list[ModuleType]:  # noqa: C901 - a class inside
    """mlflow 3: the client and the entities of it that are used. `runs`: their states, by id."""
    top, entities, tracking = (
        ModuleType("mlflow"), ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    )  # fmt: skip

    class Metric:
        def __init__(self, key: str, value: float, timestamp: int, step: int) -> None:
            assert isinstance(value, float) and timestamp > 1e12
            self.key, self.value, self.step = key, value, step

    class Param:
        def __init__(self, key: str, value: str) -> None:
            assert isinstance(value, str)
            self.key, self.value = key, value

    class Named:
        def __init__(self, **names: Any) -> None:
            vars(self).update(names)

    class MlflowClient:
        def get_experiment_by_name(self, name: str) -> Any:
            known = [entry for entry in told if entry == ("experiment", name)]
            return Named(experiment_id="7") if known else None

        def create_experiment(self, name: str) -> str:
            told.append(("experiment", name))
            return "7"

        def create_run(self, experiment_id: str, run_name: str | None = None) -> Any:
            assert experiment_id == "7"
            run_id = f"run{len(runs)}"
            runs[run_id] = "RUNNING"
            told.append(("run", run_name))
            return Named(info=Named(run_id=run_id))

        def update_run(self, run_id: str, status: str | None = None) -> None:
            assert run_id in runs
            runs[run_id] = str(status)

        def log_batch(
            self, run_id: str, metrics: list[Metric] = [], params: list[Param] = []  # noqa: B006
        ) -> None:  # fmt: skip
            assert runs[run_id] == "RUNNING" and len(params) <= 100
            told.extend(("metric", m.key, m.step, m.value) for m in metrics)
            told.extend(("param", p.key, p.value) for p in params)

        def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
            told.append(("text", artifact_file, text))

        def log_artifact(self, run_id: str, local_path: str, artifact_path: str) -> None:
            assert Path(local_path).is_file()
            told.append(("file", artifact_path, Path(local_path).name))

        def set_terminated(self, run_id: str, status: str | None = None) -> None:
            runs[run_id] = str(status)

    entities.Metric, entities.Param = Metric, Param  # type: ignore[attr-defined]
    tracking.MlflowClient = MlflowClient  # type: ignore[attr-defined]
    return [top, entities, tracking]


def installed(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let these be what is imported, and found to be installed."""
    names = {module.__name__.partition(".")[0] for module in modules}
    for module in modules:
        patch.setitem(sys.modules, module.__name__, module)
    patch.setattr("fluxtrain.train.observe.tracking._is_installed", lambda name: name in names)
