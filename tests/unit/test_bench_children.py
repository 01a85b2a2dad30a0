"""What a benchmark started ends with it, and its table says what was done until then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import bench_plan  # noqa: E402 - scripts beside the project, not a package
import bench_table  # noqa: E402
from children import Stopped, compiled_once, run_python  # noqa: E402

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {below.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(120)
"""
BENCHMARK = """
import subprocess, sys
import children
children.GRACE_S = 0.2
try:
    with children.stoppable():
        children.run_python(["-c", sys.argv[1], sys.argv[2]], stdout=subprocess.DEVNULL)
except children.Stopped as error:
    sys.exit(error.exit_code)
"""
RECORDER = """
import sys
from pathlib import Path
import record_runs
record_runs.RUNS = record_runs.RECORDED = Path(sys.argv.pop(1)) / "runs"
record_runs.main()
"""


def wait_for(what: Callable[[], bool], *, limit_s: float = 20.0) -> None:
    until_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_benchmark_that_is_told_to_end_ends_what_it_started(number: int, tmp_path: Path) -> None:
    told = tmp_path / "told"
    benchmark = subprocess.Popen([sys.executable, "-c", BENCHMARK, STUBBORN, str(told)], cwd=BENCH)
    wait_for(told.exists)
    benchmark.send_signal(number)
    assert benchmark.wait(20) == 128 + number
    for pid in map(int, told.read_text().split()):
        wait_for(lambda pid=pid: not lives(pid))  # type: ignore[misc]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of it on Linux")
def test_a_benchmark_that_is_killed_leaves_no_training(tmp_path: Path) -> None:
    told = tmp_path / "told"
    benchmark = subprocess.Popen([sys.executable, "-c", BENCHMARK, STUBBORN, str(told)], cwd=BENCH)
    wait_for(told.exists)
    training, below = map(int, told.read_text().split())
    try:
        benchmark.kill()
        benchmark.wait(20)
        wait_for(lambda: not lives(training))
    finally:
        os.kill(below, signal.SIGKILL)  # what the training itself starts is its own


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streamed", "killed"])
def test_a_recording_that_is_told_to_end_ends_its_training(name: str, tmp_path: Path) -> None:
    recorder = subprocess.Popen([sys.executable, "-c", RECORDER, str(tmp_path), name], cwd=BENCH)
    pids: list[int] = []
    try:
        wait_for(lambda: any(tmp_path.rglob("events.ndjson")), limit_s=60)
        pids += [process.pid for process in psutil.Process(recorder.pid).children(recursive=True)]
        assert pids
        recorder.send_signal(signal.SIGTERM)
        assert recorder.wait(20) == 128 + signal.SIGTERM
        for pid in pids:
            wait_for(lambda pid=pid: not lives(pid))  # type: ignore[misc]
    finally:
        recorder.kill()
        for pid in filter(lives, pids):
            os.kill(pid, signal.SIGKILL)


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    others = set(psutil.Process().children())
    with pytest.raises(subprocess.TimeoutExpired):
        run_python(["-c", "import time; time.sleep(120)"], stdout=subprocess.DEVNULL, limit_s=0.5)
    assert set(psutil.Process().children()) <= others


def test_the_code_and_the_words_of_a_child_are_known(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        code = run_python(["-c", "import sys; print('seen'); sys.exit('wrong')"], stdout=log)
    assert code == 1
    assert sorted((tmp_path / "log").read_text().split()) == ["seen", "wrong"]


def test_a_table_of_plans_that_was_stopped_holds_the_cases_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = {"shape": "tiny", "batch": 1, "sequence": 8, "fills": True}
    cases = {"shapes": {"tiny": {}}, "cases": [case, case, case]}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"cpu": cases}))
    calls: list[Path] = []

    def run(case: dict[str, Any], device: str, steps: int, text: Path, folder: Path) -> Any:
        calls.append(folder)
        if len(calls) == 3:
            raise Stopped(signal.SIGTERM)
        return {"case": case, "exit_code": 4, "log": [f"no room in {folder.name}"]}

    monkeypatch.setattr(bench_plan, "run", run)
    monkeypatch.setattr(bench_plan, "write_model", lambda *made: made[-1].mkdir())
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--write"]
    monkeypatch.setattr(
        sys, "argv", ["bench_plan", *arguments, "--cases", str(tmp_path / "cases.yaml")]
    )
    docs = bench_plan.DOCS.read_bytes()
    with pytest.raises(SystemExit) as ended:
        bench_plan.main()
    assert ended.value.code == 143
    table = (tmp_path / "table.md").read_text()
    assert "Ended by SIGTERM with 2 of 3 cases done." in table
    assert [f"no room in case-{i}" in table for i in range(3)] == [True, True, False]
    assert len(json.loads((tmp_path / "plan.json").read_text())) == 2
    assert bench_plan.DOCS.read_bytes() == docs


def test_a_table_of_loops_that_was_stopped_holds_the_rows_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(row: dict[str, Any], out: Path, limit_s: float) -> dict[str, Any]:
        if len(seen) == 2:
            raise Stopped(signal.SIGINT)
        seen.append(row["name"])
        return {"error": "no GPU"}

    seen: list[str] = []
    monkeypatch.setattr(bench_table, "measured", measured)
    monkeypatch.setattr(bench_table, "machine", lambda: "A machine.")
    monkeypatch.setattr(sys, "argv", ["bench_table", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        bench_table.main()
    assert ended.value.code == 130
    table = (tmp_path / "table.md").read_text()
    assert "A machine. Ended by SIGINT with 2 rows done." in table
    assert all(f"| {name} | no GPU |" in table for name in seen)


def test_what_a_row_says_on_its_way_out_is_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bench_gpu.py"
    script.write_text("import sys; print('step 1'); sys.exit('no such shape')")
    monkeypatch.setattr(bench_table, "HERE", tmp_path)
    row = {"name": "one", "shape": "3b", "batch": 8, "steps": 4}
    assert bench_table.measured(row, tmp_path, 20.0) == {"error": "no such shape"}
    assert "step 1" in (tmp_path / "one.log").read_text()


def test_modules_are_compiled_once_where_python_is_told_to_keep_none(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("VALUE = 1\n")
    told = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tmp_path)}
    folder = tmp_path / "bytecode"
    for environment in (told, told | compiled_once(folder, told)):
        code = run_python(
            ["-c", "import counted"], stdout=subprocess.DEVNULL, environment=environment
        )
        assert code == 0
        kept = [*tmp_path.glob("__pycache__/*"), *folder.rglob("counted*.pyc")]
        assert len(kept) == (0 if environment is told else 1)
    assert compiled_once(folder, {}) == {}
