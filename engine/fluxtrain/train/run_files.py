"""Write run.json and plan.json, and make the Hello events of a run."""

from __future__ import annotations

import platform
from dataclasses import asdict
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import msgspec

import fluxtrain
from fluxtrain.config.schema import RunConfig
from fluxtrain.events.answers.machine import Machine
from fluxtrain.events.answers.plan import PlannedTime
from fluxtrain.events.events import Hello, Planned
from fluxtrain.events.run_folder.process import ProcessMark
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.measure.measured_constants import Constants
from fluxtrain.methods.method import method_of
from fluxtrain.plan.placement import Placement
from fluxtrain.train.observe.step_clock import PHASES

if TYPE_CHECKING:
    from fluxtrain.methods.engine import TrainingEngine

_REPORTED = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "pydantic", "msgspec")


def write_run_file(run_dir: RunDir, config: RunConfig, machine: Machine) -> None:
    """Write run.json: the configuration, the versions and the machine."""
    versions = {"python": platform.python_version(), "fluxtrain": fluxtrain.__version__}
    versions |= {name: _version(name) for name in _REPORTED}
    content = {
        "config": config.model_dump(mode="json"),
        "versions": versions,
        "machine": {"line": machine.line(), **msgspec.to_builtins(machine)},
    }
    run_dir.write_json(run_dir.run, content)


@cache
def _version(name: str) -> str:
    """Return the version of a package; some are bundled with a program without their metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def write_plan_file(
    run_dir: RunDir,
    planned: Planned,
    placement: Placement,
    time: PlannedTime | None,
    constants: Constants,
) -> None:
    """Write plan.json before the first step: the whole plan, even if its event was shortened, with
    the numbers that it was computed from."""
    content: dict[str, Any] = msgspec.to_builtins(planned)
    for stamp in ("seq", "t_s", "wall_s", "dropped", "event"):
        content.pop(stamp, None)
    content |= {
        "placement": [msgspec.structs.asdict(rows) for rows in planned.placement],
        "need": asdict(placement.need),
        "process_bytes": placement.process_bytes,
        "saving_bytes": placement.saving_bytes,
        "parts_s": time.parts_s if time else {},
        "per_s": dict(constants.per_s),
        "calibration": msgspec.to_builtins(constants.calibration),
    }
    run_dir.write_json(run_dir.plan, content)


def first_hello(config: RunConfig, run_dir: RunDir, machine: str) -> Hello:
    """Make the Hello event before anything is loaded; a second one describes the model."""
    mark = ProcessMark.mine()
    return Hello(
        run_id=run_dir.run_id,
        run_dir=str(run_dir.path),
        pid=mark.pid,
        pid_start_s=mark.start_s,
        boot=mark.boot,
        version=fluxtrain.__version__,
        model=config.model.path,
        method=config.method.name,
        dtype=config.model.dtype,
        device=config.placement.device,
        machine=machine,
        blocks=0,
        parameters=0,
        trained_parameters=0,
        total_steps=config.train.steps or 0,
        phase_names=PHASES,
        rank=None if config.method.name == "full" else config.method.rank,
        storage=method_of(config).frozen_storage(config.method),
    )


def full_hello(
    hello: Hello,
    engine: TrainingEngine,
    *,
    model: str,
    dtype: str,
    total_steps: int,
    first_step: int,
) -> Hello:
    """Make the Hello event once the model is placed."""
    parameters, trained = engine.parameter_counts
    return msgspec.structs.replace(
        hello,
        model=model,
        dtype=dtype,
        device=device_name(engine),
        blocks=len(engine.residency().weights),  # one letter a block
        parameters=parameters,
        trained_parameters=trained,
        total_steps=total_steps,
        first_step=first_step,
    )


def device_name(engine: TrainingEngine) -> str:
    """Return the name of the GPU that computes, or cpu."""
    import torch

    if engine.device.torch_device.type == "cuda":
        return str(torch.cuda.get_device_name(engine.device.torch_device))
    return str(engine.device.torch_device.type)
