"""A table of the GPU benchmarks that is measured by several commands, and the kernels below it."""

from __future__ import annotations

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

SHARES = {
    "adamw, fp32 states": 0.96, "adamw, weights alone": 0.95, "adamw, moments alone": 0.97,
    "adamw, bf16 states": 0.96, "adamw, 8-bit states": 0.81,
}  # fmt: skip
NARROW, BF16 = "adamw, 8-bit states", "adamw, bf16 states"
BELOW = {BF16: 0.949}


def kernels(
    of_fp32: float = 1.5, of_cache: dict[str, float] | None = None, **shares: float
) -> dict[str, Any]:
    """What bench_cpu.py found on one thread and on two, with what is known of arithmetic."""
    of_all = {} if of_cache is None else dict.fromkeys(SHARES, 0.5) | of_cache
    rows = [
        {"threads": threads, "name": name, "per_s": 5.306e9, "of_stream": share,
         "of_fp32": of_fp32 if "8-bit" in name else 1.0, "of_cache": of_all.get(name),
         "in_cache_per_s": 5.306e9 / of_all[name] if of_all else None}
        for threads in (1, 2)
        for name, share in (SHARES | shares).items()
    ]  # fmt: skip
    rows.append({"threads": 1, "name": "stream, weights", "per_s": 1e9, "of_stream": None})
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


@pytest.mark.parametrize(
    ("found", "verdicts"),
    [
        (kernels(), "95%: met; 1.5x: met"),
        (kernels(of_fp32=1.49), "95%: met; 1.5x: MISSED"),
        (kernels(of_fp32=1.49, of_cache={NARROW: 0.949}), "95%: met; 1.5x: MISSED"),
        (
            kernels(of_fp32=1.49, of_cache={NARROW: 0.965}),
            "95%: met; 1.5x: BOUND, at 96.5% of what arithmetic allows",
        ),
        (kernels(**BELOW), "95%: MISSED (bf16 states); 1.5x: met"),
        (kernels(of_cache={BF16: 0.949}, **BELOW), "95%: MISSED (bf16 states); 1.5x: met"),
        (
            kernels(of_cache={BF16: 0.965}, **BELOW),
            "95%: BOUND, bf16 states at 96.5% of what arithmetic allows; 1.5x: met",
        ),
        (
            kernels(of_cache={BF16: 0.965}, **BELOW | {"adamw, moments alone": 0.949}),
            "95%: MISSED (moments alone); 1.5x: met",
        ),
    ],
    ids=[
        "all met",
        "8 bits gain too little",
        "and could gain more",
        "and arithmetic binds",
        "bf16 states below the stream",
        "and could be faster",
        "and arithmetic binds them",
        "and not moments alone",
    ],
)
def test_kernels_are_held_to_their_stream_and_8_bits_to_their_gain(
    found: dict[str, Any], verdicts: str
) -> None:
    lines = kernel_table.table(found).splitlines()
    assert [line.split(" | ")[-1] for line in lines[4:]] == [f"{verdicts} |"] * 2
    assert lines[4].startswith("| 1 | 5.306 (96.0%) | 5.306 (95.0%) | ")
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_results_that_do_not_know_what_arithmetic_allows_are_held_to_their_targets() -> None:
    found = kernels(of_fp32=1.49, **BELOW)
    for row in found["rows"]:
        row.pop("of_cache", None), row.pop("in_cache_per_s", None)  # as earlier versions wrote it
    line = kernel_table.table(found).splitlines()[4]
    assert line.endswith("| -, -, -, -, - | 95%: MISSED (bf16 states); 1.5x: MISSED |")


def test_what_arithmetic_binds_is_counted_apart_from_what_was_missed() -> None:
    bound = kernel_table.targets(kernels(of_fp32=1.49, of_cache={NARROW: 0.965}))
    told = counted({"kernels": bound["kernels, threads: 1"]})
    assert told.startswith("Of 2 targets 1 are met. At their bound: `kernels` (1.5x: BOUND")
    assert "Missed" not in told


def test_kernels_that_could_not_be_measured_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bench_cpu.py"
    script.write_text("import sys; sys.exit('no kernels here')")
    monkeypatch.setattr(kernel_table, "HERE", tmp_path)
    found = kernel_table.measured(tmp_path)
    assert kernel_table.table(found) == "The native AdamW was not measured: no kernels here."


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
    assert "8-bit beside fp32" in kernel_table.table(found)
    assert found["done"] and kernel_table.table(found).startswith("The native AdamW")
    for row in found["rows"]:
        assert row["per_s"] > 0
        assert (row["of_stream"] is None) == (not row["name"].startswith("adamw, ")) or (
            row["name"] in ("adamw, f32 grad", "adamw, f32 weights")
        )
