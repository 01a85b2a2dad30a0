"""A table of the GPU benchmarks that is measured by several commands, and the kernels below it."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import bench_table  # noqa: E402 - scripts beside the project, not a package
import kernel_table  # noqa: E402
from verdicts import counted  # noqa: E402

SHARES = {"fp32 states": 0.96, "bf16 states": 0.95, "8-bit states": 0.81}


def kernels(of_fp32: float = 1.5, **shares: float) -> dict[str, Any]:
    """What bench_cpu.py found on one thread and on two."""
    rows = []
    for threads, (name, share) in itertools.product((1, 2), (SHARES | shares).items()):
        eight_bit = name == "8-bit states"
        good = of_fp32 >= 1.5 if eight_bit else share >= 0.95
        wanted = "95% of stream" if not eight_bit else "1.5x fp32" if threads == 2 else ""
        rows.append({
            "threads": threads, "name": name, "seconds": 0.012, "per_s": 5.306e9,
            "of_stream": share, "of_fp32": of_fp32 if eight_bit else 1.0, "wanted": wanted,
            "verdict": ("met" if good else "missed") if wanted else "",
        })  # fmt: skip
    return {"isa": "avx512", "million": 64.0, "processors": 2, "rows": rows}


class Bench:
    """bench_table with rows that take 0.5 s a step and no GPU, on the machine `gpu`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run: list[str] = []
        self.gpu = "one"
        self.docs = folder / "docs.md"
        self.docs.write_text(f"above\n{bench_table.BEGIN}\nold\n{bench_table.END}\nbelow\n")
        self._out, self._patch = folder / "out", monkeypatch
        monkeypatch.setattr(bench_table, "DOCS", self.docs)
        monkeypatch.setattr(bench_table, "machine", lambda: "A machine.")
        monkeypatch.setattr(bench_table, "gpu", lambda: self.gpu)
        monkeypatch.setattr(bench_table, "measured", self._measured)
        monkeypatch.setattr(kernel_table, "measured", self._kernels)

    def _measured(self, row: dict[str, Any], out: Path, limit_s: float) -> dict[str, Any]:
        self.run.append(row["name"])
        if "needs" in row:
            return {"error": f"{row['needs']} is not installed"}
        return {
            "step_s": 0.3, "tokens_per_s": 1000, "tflops": 300.0, "nvml_gib": 22.0,
            "host_gib": 26.0, "losses": [9.0],
        }  # fmt: skip

    def _kernels(self, out: Path) -> dict[str, Any]:
        self.run.append("kernels")
        return kernels()

    def __call__(self, *arguments: str) -> str:
        """The table after a command."""
        self._patch.setattr(sys, "argv", ["bench_table", "--out", str(self._out), *arguments])
        bench_table.main()
        return (self._out / "table.md").read_text()


def without_commands(table: str) -> list[str]:
    return [line for line in table.splitlines() if not line.startswith("    python ")]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_a_table_measured_by_several_commands_is_that_of_one(bench: Bench) -> None:
    whole = bench()
    rows = [name for name in bench.run if name != "kernels"]
    bench.run.clear()
    bench.gpu = "two"
    bench("--only", *rows[:3])
    last = bench("--only", "kernels", *reversed(rows[3:]), "--write")
    assert bench.run == [*rows, "kernels"]  # each once, the kernels with nothing beside them
    assert without_commands(last) == without_commands(whole)
    assert whole.count("    python bench/") == 1
    assert f"    python bench/bench_table.py --out DIR --only {' '.join(rows[:3])}\n" in last
    assert "Not run" not in whole
    assert "| 3b-8-zero2 | deepspeed is not installed |" in whole
    assert "100.0% of 3b-32-bf16" in whole
    assert bench.docs.read_text() == (
        f"above\n{bench_table.BEGIN}\n\n{last}\n{bench_table.END}\nbelow\n"
    )
    assert bench("--only") == last
    assert len(bench.run) == len(rows) + 1


def test_rows_of_another_machine_are_left_out(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--only", "3b-32-bf16")
    bench.gpu = "two"
    table = bench("--only", "3b-32-exact")
    assert "| 3b-32-bf16 |" not in table
    assert "90% of 3b-32-bf16: not judged, it has no result" in table
    assert "3b-32-bf16.json: left out" in capsys.readouterr().err


def test_a_row_that_was_not_written_to_its_end_is_left_out(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--only", "3b-32-bf16")
    (tmp_path / "out" / "3b-32-bf16.json").write_text('{"step_s": 0.')
    assert "Not run: 3b-8-bf16" in bench("--only", "3b-32-exact")
    assert "3b-32-bf16.json: left out" in capsys.readouterr().err
    assert "| 3b-32-bf16 |" in bench("--only", "3b-32-bf16")


def test_a_row_that_fails_again_leaves_nothing_of_its_earlier_result(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench("--only", "3b-8-bf16")
    monkeypatch.setattr(bench_table, "measured", lambda *_: {"error": "out of memory"})
    bench("--only", "3b-8-bf16")
    assert "| 3b-8-bf16 | out of memory |" in bench("--only")


def test_a_name_that_is_no_row_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench("--only", "3b-8-exakt")
    assert "no rows 3b-8-exakt: there are 3b-8-bf16," in capsys.readouterr().err
    assert bench.run == []


def test_kernels_stand_in_one_table_with_what_is_wanted_of_them() -> None:
    lines = kernel_table.table(kernels(1.49, **{"bf16 states": 0.949})).splitlines()
    assert lines[4] == ("| fp32 states | 1 | 12.0 | 5.306 | 96.0% | 1.00x | 95% of stream: met |")
    wanted = [line.split(" | ")[-1] for line in lines[4:]]
    met, missed = "95% of stream: met |", "95% of stream: MISSED |"
    assert wanted == [met, missed, "- |", met, missed, "1.5x fp32: MISSED |"]
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_targets_of_kernels_are_counted_by_their_threads() -> None:
    found = kernel_table.targets(kernels(1.49))
    assert {name: len(told) for name, told in found.items()} == {
        "kernels, threads: 1": 2, "kernels, threads: 2": 3,
    }  # fmt: skip
    told = counted(found)
    assert told.startswith("Of 5 targets 4 are met. Missed: `kernels, threads: 2` (8-bit states, 1")


def test_kernels_that_could_not_be_measured_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bench_cpu.py"
    script.write_text("import sys; sys.exit('no kernels here')")
    monkeypatch.setattr(kernel_table, "HERE", tmp_path)
    found = kernel_table.measured(tmp_path)
    assert kernel_table.table(found) == "The native AdamW was not measured: no kernels here."


@pytest.mark.slow
def test_kernels_that_were_cut_short_keep_what_they_had_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = json.dumps(kernels() | {"done": False})
    script = tmp_path / "bench_cpu.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "path = pathlib.Path(sys.argv[sys.argv.index('--json') + 1])\n"
        f"path.write_text({written!r})\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(kernel_table, "HERE", tmp_path)
    monkeypatch.setattr(kernel_table, "LIMIT_S", 5.0)
    found = kernel_table.measured(tmp_path)
    assert found["rows"] == kernels()["rows"]
    table = kernel_table.table(found)
    assert table.startswith("Cut short (not done in 5 s). The native AdamW (avx512")
    assert set(kernel_table.targets(found)) == {"kernels, threads: 1", "kernels, threads: 2"}


def test_a_benchmark_that_is_stopped_keeps_what_its_row_had_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(out: Path) -> dict[str, Any]:
        (out / "kernels.json").write_text(json.dumps(kernels() | {"done": False}))
        raise bench_table.Stopped(15)

    bench("--only", "3b-32-bf16")
    monkeypatch.setattr(kernel_table, "measured", stopped)
    with pytest.raises(SystemExit):
        bench("--only", "kernels")
    assert "Cut short (stopped). The native AdamW" in bench("--only")


def test_the_kernels_of_this_machine_are_measured_in_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_table, "MILLION", 0.05)
    found = kernel_table.measured(tmp_path)
    assert json.loads((tmp_path / "kernels.json").read_text()) == found
    assert found["done"] and kernel_table.table(found).startswith("The native AdamW")
    assert all(row["per_s"] > 0 and row["of_stream"] > 0 for row in found["rows"])
