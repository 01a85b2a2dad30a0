"""What a plan predicted against what a recorded step took, cause by cause, in milliseconds.

    python bench/compare_plan.py 3b-8-exact.json                              the step as a whole
    python bench/compare_plan.py 3b-8-exact.json 3b-8-exact.trace.json.gz     with its lanes

Reads a result of bench_gpu.py and the trace of its median step. The prediction is made anew, with
the constants that the result recorded and the formula as it is now. Needs no GPU. Results of the
time when the first blocks of the model were those on the device are refused.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from fluxtrain.events.trace.attribution import Attribution, attribute
from fluxtrain.events.trace.export import THREADS
from fluxtrain.events.trace.lanes import Interval, StepLanes
from fluxtrain.plan.calibration import Calibration
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.plan.rates import Rates, rates_from
from fluxtrain.plan.simulation import StepTime, step_time
from fluxtrain.train.placing.placing import model_facts

GIB = 1 << 30
SHAPES = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())


def result_of(path: Path) -> dict[str, Any]:
    """The result in a file of bench_gpu.py; SystemExit where it has no plan, or one whose seconds
    the formula as it is now cannot predict."""
    row: dict[str, Any] = json.loads(path.read_text())
    if "error" in row:
        raise SystemExit(f"{path}: this row failed: {row['error']}")
    if row["engine"] != "flux":
        raise SystemExit(f"{path}: a result of the engine {row['engine']}, which has no plan")
    if row.get("blocks") != "spread":
        raise SystemExit(
            f"{path}: in this result the first blocks of the model were those on the device (it "
            'does not say "blocks": "spread"), and steps are predicted for blocks that stand '
            "between the others (docs/decisions/0009): measure it again with bench_gpu.py"
        )
    if "calibration" not in row:
        raise SystemExit(f"{path}: its plan knew no seconds: {row['constants']}")
    return row


def facts_of_result(row: dict[str, Any]) -> ModelFacts:
    """Return the facts of the model of a result, with the measured activations of its block."""
    config = Qwen2Config(**SHAPES[row["shape"]])
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.tie_weights()
    facts = model_facts(model, config, row["sequence"], row["states"])
    assert facts.row is not None
    tried = row["calibration"]
    found = {"activation_bytes": tried["activation_bytes"], "saved_bytes": tried["kept_bytes"]}
    return replace(facts, row=replace(facts.row, **found))


def layout_of_result(row: dict[str, Any]) -> Layout:
    """Where the result's plan put everything."""
    names = ("offload", "device_groups", "device_first", "resident_blocks", "chunk_rows",
             "blocks_without_recompute", "activations", "embedding",
             "deferred_moments")  # fmt: skip
    found = {name: row[name] for name in names} | {"head": row.get("head", "whole")}
    found["optimizer_in_backward"] = row["in_backward"]
    found["activations_on_device"] = row.get("activations_on_device", 0)
    found["slots"] = row.get("slots")  # None: as many as results had that do not say it
    found["passes"] = row.get("passes", 1)
    return Layout(batch_rows=row["batch"], **found)


def rates_of_result(row: dict[str, Any]) -> Rates:
    """What its plan was timed with."""
    calibration = msgspec.convert(row["calibration"], Calibration)
    found = rates_from(row["per_s"], has_gpu=True, calibration=calibration)
    if isinstance(found, str):
        raise SystemExit(found)
    return found


def lanes_of(trace: Path) -> StepLanes:
    """The step of a trace."""
    open_it = gzip.open if trace.suffix == ".gz" else open
    with open_it(trace, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    step = next(event for event in events if event["cat"] == "step")
    first = step["ts"]
    return StepLanes(
        step=step["args"]["step"],
        wall_s=0.0,
        length_s=step["dur"] / 1e6,
        intervals=[
            Interval(
                one["cat"], one["args"]["kind"], one["name"].partition(" ")[2],
                (one["ts"] - first) / 1e6, one["dur"] / 1e6,
            )
            for one in events
            if one["cat"] in THREADS and one["cat"] != "step"
        ],
    )  # fmt: skip


def measured_terms(step: StepLanes, found: Attribution) -> dict[str, float]:
    """Seconds by the names of `predicted_terms`."""
    on_gpu = [one for one in step.intervals if one.lane == "gpu"]
    heads = [
        one for one in on_gpu if one.kind == "head"
    ]  # in vocabulary chunks: forward and backward
    begins_s, left_s = heads[0].start_s, max(one.stop_s for one in heads)
    ends_s = max(one.stop_s for one in on_gpu if one.kind in ("backward", "gradients"))

    def took(lane: str, *kinds: str) -> float:
        mine = [one for one in step.intervals if one.lane == lane]
        return sum(one.duration_s for one in mine if one.kind in kinds or not kinds)

    waited_s = sum(found.waits_s.values())
    return {
        "forward, computing": found.work_s["forward"],
        "forward, with its waits": begins_s,
        "head and loss, computing": found.work_s["head"],
        "head and loss, with its waits": left_s - begins_s,
        "backward, computing": found.work_s["backward"] + found.work_s["gradients"],
        "backward, with its waits": ends_s - left_s,
        "optimizer on the device": found.work_s.get("update", 0.0),
        "after it, until the next step": max(0.0, step.length_s - ends_s - took("gpu", "update")),
        "AdamW on the host": took("cpu", "update"),
        "deferred moments": took("cpu", "moments"),
        "copies to the device": took("h2d"),
        "copies to the host": took("d2h"),
        "computation waits": waited_s,
        "step": step.length_s,
    }


def predicted_terms(plan: StepTime) -> dict[str, float]:
    """Seconds of the formula; the optimizer on the device is all that it puts behind a step."""
    return {
        "forward, computing": plan.parts_s["forward"],
        "forward, with its waits": plan.parts_s["forward_phase"],
        "head and loss, computing": plan.parts_s["head"],
        "head and loss, with its waits": plan.parts_s["head"],
        "backward, computing": plan.parts_s["backward"],
        "backward, with its waits": plan.parts_s["backward_phase"],
        "optimizer on the device": plan.parts_s["device_update"],
        "after it, until the next step": 0.0,
        "AdamW on the host": plan.parts_s["host_update"],
        "deferred moments": plan.parts_s["deferred_moments"],
        "copies to the device": plan.parts_s["upload_forward"] + plan.parts_s["upload_backward"],
        "copies to the host": plan.parts_s["download"],
        "computation waits": max(
            0.0,
            plan.step_s
            - plan.parts_s["forward"]
            - plan.parts_s["head"]
            - plan.parts_s["backward"]
            - plan.parts_s["device_update"],
        ),
        "step": plan.step_s,
    }


def main() -> None:
    """Print one result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("trace", type=Path, nargs="?")
    options = parser.parse_args()
    row = result_of(options.result)
    facts, layout = facts_of_result(row), layout_of_result(row)
    clips = not layout.optimizer_in_backward
    plan = step_time(facts, layout, rates_of_result(row), clips=clips, passes=layout.passes)
    need = footprint(facts, layout, has_gpu=True)
    print(f"{row['shape']}, batch {row['batch']}; bound by {plan.binds}")
    print(f"{'':<32}{'predicted':>11}{'measured':>11}{'error':>9}")
    _line("GiB of the device", need.device_bytes / GIB, row["torch_peak_gib"], digits=2)
    recorded_s = row.get("predicted_step_s")
    if recorded_s is not None:
        _line("median step, as it was planned", 1e3 * recorded_s, 1e3 * row["step_s"])
    _line("median step, predicted anew", 1e3 * plan.step_s, 1e3 * row["step_s"])
    if options.trace is not None and layout.passes > 1:
        print(f"its lanes are not compared: {layout.passes} passes have several of each part")
    elif options.trace is not None:
        step = lanes_of(options.trace)
        found = attribute(step)
        measured = measured_terms(step, found)
        print(f"step {step.step}, ms: {found.because}")
        for name, seconds in predicted_terms(plan).items():
            _line(f"  {name}", 1e3 * seconds, 1e3 * measured[name])


def _line(name: str, predicted: float, measured: float, *, digits: int = 1) -> None:
    error = f"{predicted / measured - 1:+9.1%}" if measured else ""
    print(f"{name:<32}{predicted:11.{digits}f}{measured:11.{digits}f}{error}")


if __name__ == "__main__":
    main()
