"""A developer's comparison of a plan with a recorded step: terms that add up, from real traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fluxtrain.events.trace.attribution import attribute
from fluxtrain.plan.calibration import Calibration, Line

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import compare_plan  # noqa: E402 - a script beside the project, not a package

TRACES = sorted((ROOT / "docs" / "traces").glob("*.json.gz"))
CALIBRATION = Calibration(
    forward=Line(base=0.001, slope=0.0002),
    backward=Line(base=0.001, slope=0.0007),
    outside_forward=Line(base=0.004, slope=0.002),
    outside_backward=Line(base=0.0, slope=0.0),
    activation_bytes=1 << 20,
    kept_bytes=1 << 19,
    adamw_per_s=6e9,
    rows=(2, 8),
    measured_at_s=0.0,
    measuring_s=1.0,
)
ROW: dict[str, Any] = {
    "engine": "flux", "shape": "tiny", "batch": 8, "offload": "weights", "device_groups": 1,
    "resident_blocks": 0, "blocks_without_recompute": 0, "activations": "device", "chunk_rows": 8,
    "embedding": "whole", "deferred_moments": False, "blocks": "spread",
    "device_first": "embedding", "in_backward": False, "states": "fp32", "sequence": 1024,
    "per_s": {"h2d_pinned": 55e9, "d2h_pinned": 55e9},
    "step_s": 0.1, "torch_peak_gib": 1.0, "predicted_step_s": 0.09,
    "calibration": msgspec.to_builtins(CALIBRATION),
}  # fmt: skip


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.name.partition(".")[0])
def test_the_terms_of_a_recorded_step_add_up_to_it(trace: Path) -> None:
    step = compare_plan.lanes_of(trace)
    terms = compare_plan.measured_terms(step, attribute(step))
    computing_s = (
        terms["forward, computing"] + terms["head and loss, computing"]
        + terms["backward, computing"]
        + terms["optimizer on the device"] + terms["computation waits"]
    )  # fmt: skip
    phases_s = (
        terms["forward, with its waits"] + terms["head and loss, with its waits"]
        + terms["backward, with its waits"] + terms["after it, until the next step"]
    )  # fmt: skip
    assert computing_s == pytest.approx(terms["step"], rel=0.02)
    assert phases_s <= terms["step"] * 1.001
    assert phases_s + terms["optimizer on the device"] >= terms["step"] * 0.98


def test_a_result_is_predicted_anew_from_what_it_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "row.json"
    result.write_text(json.dumps(ROW))
    monkeypatch.setattr(sys, "argv", ["compare_plan.py", str(result), str(TRACES[0])])
    compare_plan.main()
    told = capsys.readouterr().out
    assert "tiny, batch 8; bound by the GPU" in told
    # the tied embedding lives on the device, and four blocks are computed with 8 rows at once
    blocks_ms = 4 * (CALIBRATION.forward.at(8) + CALIBRATION.backward.at(8)) * 1e3
    predicted = next(line for line in told.splitlines() if line.startswith("median step, predict"))
    anew_ms = float(predicted.split()[4])
    assert anew_ms == pytest.approx(blocks_ms + CALIBRATION.outside_forward.at(8) * 1e3, rel=0.02)
    assert "copies to the device" in told


def test_several_passes_are_predicted_and_their_lanes_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result, anew_ms = tmp_path / "row.json", []
    monkeypatch.setattr(sys, "argv", ["compare_plan.py", str(result), str(TRACES[0])])
    for passes in (1, 4):
        result.write_text(json.dumps(ROW | {"passes": passes}))
        compare_plan.main()
        told = capsys.readouterr().out
        lines = told.splitlines()
        line = next(line for line in lines if line.startswith("median step, predicted anew"))
        anew_ms.append(float(line.split()[4]))
    assert anew_ms[1] == pytest.approx(4 * anew_ms[0], rel=0.05)
    assert told.endswith("its lanes are not compared: 4 passes have several of each part\n")


@pytest.mark.parametrize(
    ("without", "instead", "told"),
    [
        ("blocks", {"blocks": "first"}, "first blocks of the model were those on the device"),
        ("blocks", {}, "measure it again with bench_gpu.py"),
        ("blocks", {"engine": "resident"}, "the engine resident, which has no plan"),
        ("calibration", {"constants": "nobody measured"}, "knew no seconds: nobody measured"),
    ],
    ids=["blocks at the front", "of the time before they were spread", "no plan", "no time"],
)
def test_a_result_that_cannot_be_predicted_anew_is_refused_in_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without: str,
    instead: dict[str, str],
    told: str,
) -> None:
    result = tmp_path / "row.json"
    kept = {name: value for name, value in ROW.items() if name != without}
    result.write_text(json.dumps(kept | instead))
    monkeypatch.setattr(sys, "argv", ["compare_plan.py", str(result)])
    with pytest.raises(SystemExit, match=told):
        compare_plan.main()
