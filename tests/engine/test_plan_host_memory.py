"""The host memory that a plan predicts is that of the whole process."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from fluxtrain.config.schema import demo_config
from fluxtrain.core.memory.mapped import resident_bytes
from fluxtrain.machine.machine import read_machine
from fluxtrain.models.demo_model import demo_model
from fluxtrain.train.placing.placing import decide, model_facts


def test_the_demo_takes_the_host_memory_that_its_plan_predicts(tmp_path: Path) -> None:
    """In a process of its own, as a run is; 15 % leaves room for another allocator."""
    command = [sys.executable, "-m", "fluxtrain", "train", "--demo", "--steps", "3", "--run-dir"]
    subprocess.run([*command, str(tmp_path / "run")], check=True, capture_output=True, timeout=240)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    rows = {row["quantity"]: row for row in result["plan"]}
    assert abs(rows["host_peak_bytes"]["error"]) < 0.15
    assert rows["device_peak_bytes"]["measured"] is None  # the host's memory is the device's
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert rows["step_s"]["predicted"] == plan["step_s"]  # frozen before the first step
    assert plan["calibration"]["rows"] == [1, 4]


def test_weights_that_are_loaded_already_are_not_counted_twice() -> None:
    model = demo_model(256)
    facts = model_facts(model, model.config, 128)
    config, machine = demo_config(), read_machine()
    one, other = (
        decide(config, facts, machine, "cpu", batch_rows=4, data_rows=99, loaded_bytes=loaded)
        for loaded in (0, 100_000_000)
    )
    assert one.need == other.need
    assert 0.9e8 < one.process_bytes - other.process_bytes < 1.1e8
    assert one.host_bytes == one.need.host_bytes + one.process_bytes  # nothing lives on a GPU


def test_a_dropped_model_in_a_reference_cycle_is_no_part_of_the_process() -> None:
    model = demo_model(256)
    facts = model_facts(model, model.config, 128)
    given = demo_config(), facts, read_machine(), "cpu"
    before = decide(*given, batch_rows=4, data_rows=99).process_bytes
    timed = nn.Linear(10_000, 10_000)  # 400 MB
    timed.itself = [timed]
    gc.collect()  # it is old now: no collection of young objects finds it
    del timed
    assert decide(*given, batch_rows=4, data_rows=99).process_bytes < before + 1e8


def test_tied_weights_are_counted_once_and_empty_ones_not_at_all() -> None:
    model = demo_model(256)
    assert resident_bytes(model) == sum(p.nbytes for p in model.parameters())
    with torch.device("meta"):
        assert resident_bytes(nn.Linear(8, 8)) == 0


def test_a_plan_says_where_the_dial_has_no_effect() -> None:
    model, machine = demo_model(256), read_machine()
    facts = model_facts(model, model.config, 128)
    for dial, told in (("fit", ["fit"]), ("0.3", ["0.3"]), ("auto", [])):
        config = demo_config([f"placement.aggressiveness={dial}"])
        plan = decide(config, facts, machine, "cpu", batch_rows=4, data_rows=99)
        found = [choice for choice in plan.choices if choice.name == "placement.aggressiveness"]
        assert [choice.value for choice in found] == told
        assert all("no effect without a GPU" in choice.because for choice in found)
