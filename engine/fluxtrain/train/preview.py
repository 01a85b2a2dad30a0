"""`fluxtrain plan`: what a run would do and need, without reading weights or training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fluxtrain.data.demo import VOCABULARY
from fluxtrain.data.sources import glance
from fluxtrain.errors import BadInput
from fluxtrain.hardware.machine import read_machine
from fluxtrain.methods.demo_model import demo_config as demo_shape
from fluxtrain.methods.model_files import check_model_folder
from fluxtrain.telemetry.events import ChoiceMade
from fluxtrain.train.choices import choose_course
from fluxtrain.train.config import RunConfig, settings
from fluxtrain.train.ingredients import DEMO
from fluxtrain.train.placing import choose_device, decide, model_facts
from fluxtrain.units import bytes_text, count_text

DEMO_TOKENS = 510_000  # about what the standard library's docstrings come to


def preview(config: RunConfig) -> dict[str, Any]:
    """The plan as plain values; the data's size is estimated from a glance at it.

    Raises:
        BadInput, DoesNotFit: as the run would.
    """
    device = choose_device(config)
    machine = read_machine()
    model, dtype = _empty_model(config)
    length = config.data.sequence_length
    facts = model_facts(model, model.config, length)
    rows = max(1, round(_tokens(config) * (1 - config.data.held_out) / length))
    batch = config.train.batch_rows
    if batch != "auto" and batch * config.train.accumulation > 2 * rows:  # an estimate: be lenient
        raise BadInput(
            f"train.batch_rows = {batch} times train.accumulation = {config.train.accumulation} is "
            f"more than the data's about {rows} rows: lower it, or add data"
        )
    placement = decide(
        config,
        facts,
        machine,
        device.value,
        batch_rows=None if batch == "auto" else batch,
        data_rows=max(1, rows // config.train.accumulation),
    )
    step_rows = placement.batch_rows * config.train.accumulation
    course = choose_course(
        config.train,
        steps_per_epoch=max(1, -(-rows // step_rows)),
        fresh_weights=config.model.path == DEMO,
    )
    choices: tuple[ChoiceMade, ...] = (device, *placement.choices, *course.choices)
    return {
        "model": {
            "name": Path(config.model.path).name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "blocks": facts.layers,
            "dtype": dtype,
        },
        "device": device.value,
        "offload": placement.offload,
        "device_groups": placement.device_groups,
        "resident_blocks": placement.resident_blocks,
        "batch_rows": placement.batch_rows,
        "chunk_rows": placement.chunk_rows,
        "accumulation": config.train.accumulation,
        "sequence_length": length,
        "estimated_rows": rows,
        "steps": course.total_steps,
        "device_bytes": placement.device_bytes,
        "need": asdict(placement.need),
        "device_budget_bytes": placement.budget_bytes,
        "host_bytes": placement.host_bytes,
        "host_limit_bytes": machine.memory_available_bytes,
        "machine": machine.line(),
        "choices": [msgspec.to_builtins(choice) for choice in choices],
        "settings": [_setting(setting) for setting in settings(config)],
        "config": config.model_dump(mode="json"),
    }


def table(plan: dict[str, Any]) -> str:
    """The plan for people: what is needed, every choice with its reason, every setting."""
    model = plan["model"]
    lines = [
        f"{model['name']}: {count_text(model['parameters'])} parameters in {model['blocks']} "
        f"blocks, {model['dtype']}; {plan['machine']}",
        f"device memory {_of(plan['device_bytes'], plan['device_budget_bytes'])}, "
        f"host memory {_of(plan['host_bytes'], plan['host_limit_bytes'])}, {plan['steps']} steps",
        "",
        "chosen",
        *(f"  {c['name']:<22} {c['value']:<12} {c['because']}" for c in plan["choices"]),
        "",
        "settings (* changed from the default)",
    ]
    for setting in plan["settings"]:
        mark = "*" if setting["changed"] else " "
        value = _shown(setting["value"])
        lines.append(f"{mark} {setting['key']:<26} {value:<22} {setting['description']}")
    return "\n".join(lines)


def _empty_model(config: RunConfig) -> tuple[PreTrainedModel, str]:
    """The model without its weights, in the dtype that it would be trained in."""
    wished = config.model.dtype
    if config.model.path == DEMO:
        shape, stored = demo_shape(VOCABULARY), "float32"
    else:
        shape, stored = _shape_of(config)
    trained = {"float16": "bfloat16", "float64": "float32"}.get(stored, stored)
    dtype = trained if wished == "auto" else wished
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    return model, dtype


def _shape_of(config: RunConfig) -> tuple[Any, str]:
    """A folder's or a hub model's configuration, and the dtype its weights are stored in."""
    source, trusted = config.model, config.model.trust_remote_code
    folder = Path(source.path).expanduser()
    if folder.exists():
        files = check_model_folder(folder, trusted)
        shape = AutoConfig.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)
        return shape, files.dtype or "float32"
    try:
        shape = AutoConfig.from_pretrained(
            source.path, revision=source.revision, trust_remote_code=trusted
        )
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{source.path!r} is no local folder, and its configuration cannot be had from the hub "
            f"({str(error).splitlines()[0]}): check model.path and the network"
        ) from error
    return shape, str(shape.dtype or torch.float32).removeprefix("torch.")


def _tokens(config: RunConfig) -> int:
    if config.data.path == DEMO:
        return DEMO_TOKENS
    return glance(Path(config.data.path).expanduser()).estimated_tokens


def _setting(setting: Any) -> dict[str, Any]:
    return {
        "key": setting.key,
        "value": setting.value,
        "default": setting.default,
        "changed": setting.changed,
        "description": setting.description,
    }


def _of(size: int | None, limit: int | None) -> str:
    return f"{bytes_text(size)} of {bytes_text(limit)}" if limit else bytes_text(size)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
