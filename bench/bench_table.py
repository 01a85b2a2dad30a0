"""The table of docs/benchmarks.md: FluxTrain beside the loops without it, one process a row.

    make bench-gpu                              every row of gpu_rows.yaml that is possible here
    python bench/bench_table.py --only 3b-8-exact 3b-8-fp32 kernels --out DIR
    python bench/bench_table.py --only --out DIR --write      nothing is run, all is put together

Writes DIR/table.md and one JSON a row, and with `--write` the section of docs/benchmarks.md. With
`--only`, all other rows are those that earlier commands left in DIR on this machine, so a run can
be cut into several. Every target of gpu_rows.yaml is judged (verdicts.py); after the rows, with
nothing else running, so is the native AdamW (kernel_table.py), which `--only` calls `kernels`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import kernel_table
import pynvml
import yaml
from children import Stopped, compiled_once, run_python, stoppable
from measured_on import (
    LIGER_IS_MISSING,
    bus_line,
    command,
    commands,
    has_liger,
    machine,
    without_liger,
)
from verdicts import Row, Slow, Told, beside, counted, judged, slow_references, verdicts

from fluxtrain.machine.before_torch import NAMES, SETTING

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- table of bench_table.py -->", "<!-- end of the table -->"
LEARNING_RATE = 1e-5  # random weights leap at more, and then no two loops agree
HEAD = (
    "| row | s/step | tokens/s | TFLOP/s | beside | GPU (NVML) | host | block inputs there "
    "| host bytes a parameter | wanted |\n|---|---|---|---|---|---|---|---|---|---|"
)
LEGEND = (
    "Host memory is the process's peak less what it had with all imported, the GPU opened and one "
    "kernel run; where it was taken before the engine stood (block timing and timed steps), the "
    "peak since then stands beside it. Bytes of it a parameter, block inputs apart: by all trained "
    "parameters, which is what is judged, and (by those on the host). In `wanted`, shares and "
    "multiples are of throughput."
)


def measured(row: Row, out: Path, limit_s: float) -> Row:
    """Run one row; its numbers, or `error` in words."""
    if torch_cards() < row.get("cards", 1):
        return {"error": f"it needs {row['cards']} GPUs"}
    if "needs" in row and importlib.util.find_spec(row["needs"]) is None:
        return {"error": f"{row['needs']} is not installed"}
    path = out / f"{row['name']}.json"
    arguments = [
        str(HERE / "bench_gpu.py"), "--json", str(path),
        "--shape", row["shape"], "--batch", str(row["batch"]), "--steps", str(row["steps"]),
        "--engine", row.get("engine", "flux"), "--learning-rate", str(LEARNING_RATE),
        *(["--cards", str(row["cards"])] if "cards" in row else []), *row.get("flags", []),
    ]  # fmt: skip
    if "budget" in row:
        arguments += ["--budget-gib", str(row["budget"])]
        arguments += ["--trace", str(out / f"{row['name']}.trace.json.gz")]
    environment = {NAMES[0]: SETTING, **os.environ}  # as the trainer sets it; the same for all
    environment |= compiled_once(out / "bytecode", os.environ)
    with (out / f"{row['name']}.log").open("w") as log, TemporaryFile("w+") as errors:
        try:
            code = run_python(
                arguments, stdout=log, stderr=errors, environment=environment, limit_s=limit_s
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done in {limit_s:.0f} s"}
        finally:
            errors.seek(0)
            message = errors.read()
            log.write(message)
    if code != 0:
        return {"error": (message.strip().splitlines() or ["no message"])[-1][:160]}
    found: Row = json.loads(path.read_text())
    return found


def torch_cards() -> int:
    """GPUs that programs see here."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        there = int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 1  # a row tells by itself what is wrong
    return there if wanted is None else min(there, len(wanted.split(",")))


def line(row: Row, rows: Mapping[str, Row], slow: Mapping[str, Slow] | None = None) -> str:
    """One row of the table; `slow` is of `slow_references`."""
    found = rows[row["name"]]
    if "error" in found:
        return f"| {row['name']} | {found['error']} |" + " |" * 8
    each, on_host = (found.get(f"host_bytes_per_{which}") for which in ("trained", "on_host"))
    bytes_each = "" if each is None else f"{each:.2f}"
    bytes_each += "" if on_host is None else f" ({on_host:.2f})"
    apart = found.get("block_inputs_on_host_gib")
    host = f"{found['host_gib']:.1f} GiB"
    if found.get("host_setup_gib", 0) > found.get("host_training_gib", math.inf):
        host += f" (training {found['host_training_gib']:.1f})"
    return (
        f"| {row['name']} | {found['step_s']:.3f} | {found['tokens_per_s']:,} | {found['tflops']} "
        f"| {beside(row, rows, slow)} | {found['nvml_gib']:.2f} GiB | {host} "
        f"| {f'{apart:.1f} GiB' if apart else ''} | {bytes_each} "
        f"| {judged(row, rows, slow)} |"
    )


def plan_line(row: Row, found: Row) -> str:
    """What was planned for a row of FluxTrain, and what bound its median step."""
    words = [
        f"{found['offload']}, {found['device_groups']} groups and {found['resident_blocks']} "
        f"blocks' weights on the GPU, chunks of {found['chunk_rows']}, block inputs on the "
        f"{found['activations']}, {found['blocks_without_recompute']} blocks keep activations"
    ]
    on_host = found["offload"] != "none"
    words += ["embedding by rows"] if on_host and found.get("embedding") == "rows" else []
    words += ["head in vocabulary chunks"] if found.get("head") == "chunks" else []
    words += ["moments deferred"] if found.get("deferred_moments") else []
    if "predicted_step_s" in found:
        words.append(f"{found['predicted_step_s']:.3f} s predicted")
    else:
        words.append(f"no time known ({found.get('constants', '')})")
    bound = f". Bound: {found['bound']}" if found.get("bound") else ""
    return f"- `{row['name']}`: {', '.join(words)}{bound}."


def section(told: str, wanted: Sequence[Row], rows: Mapping[str, Row]) -> str:
    """All that stands between the markers: the machine and the commands, the targets counted, the
    rows, their plans, and the native AdamW."""
    here = [row for row in wanted if row["name"] in rows]
    missing = [row["name"] for row in wanted if row["name"] not in rows]
    missing += [] if kernel_table.NAME in rows else [kernel_table.NAME]
    slow = slow_references(wanted, rows)
    told = " ".join(part for part in (without_liger(rows), told, bus_line(rows)) if part)
    if missing:
        told += f" Not run: {', '.join(missing)}."
    parts = [told, commands(rows), f"**{counted(targets(here, rows, slow))}**"]
    parts += ["\n".join([HEAD, *(line(row, rows, slow) for row in here)]), LEGEND]
    planned = [row for row in here if "offload" in rows[row["name"]]]
    if planned:
        parts.append("\n".join(plan_line(row, rows[row["name"]]) for row in planned))
    if kernel_table.NAME in rows:
        parts.append(kernel_table.table(rows[kernel_table.NAME]))
    return "\n\n".join(part for part in parts if part)


def targets(
    here: Sequence[Row], rows: Mapping[str, Row], slow: Mapping[str, Slow]
) -> dict[str, list[Told]]:
    """Every target with its verdict, by row and number of threads. One of FluxTrain that failed
    counts once."""
    told: dict[str, list[Told]] = {}
    for row in here:
        if "error" not in rows[row["name"]]:
            told[row["name"]] = verdicts(row, rows, slow)
        elif "engine" not in row:
            told[row["name"]] = [Told(rows[row["name"]]["error"], "open")]
    if kernel_table.NAME in rows:
        told |= kernel_table.targets(rows[kernel_table.NAME])
    return told


def brief(name: str, found: Row) -> str:
    """That it is done; verdicts follow when all are."""
    if "step_s" in found:
        took = f" ({found['wall_s']:.0f} s in all)" if "wall_s" in found else ""
        return f"{name}: {found['step_s']:.3f} s, {found['nvml_gib']:.2f} GiB by NVML{took}"
    return f"{name}: {found.get('error', 'done')}"


def gpu() -> str:
    """The identity of the GPU: rows of one table are of one machine."""
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        return "none"


def earlier(names: Iterable[str], out: Path, here: str) -> dict[str, Row]:
    """Results that commands before this one left in `out`, but for those of another GPU."""
    rows = {}
    for name in names:
        path = out / f"{name}.json"
        try:
            found = json.loads(path.read_text()) if path.exists() else {}
        except ValueError:
            print(f"{path}: left out, it was not written to its end", file=sys.stderr)
            continue
        if found and found.get("gpu") != here:
            print(f"{path}: left out, it is not known to be of this GPU", file=sys.stderr)
        elif found:
            rows[name] = found
    return rows


def measure(
    name: str, run: Callable[[], Row], rows: dict[str, Row], out: Path, known: Mapping[str, str]
) -> None:
    """Run one and put its result, with what is `known` of the command, where a later command finds
    it; of an earlier one nothing stays. Where this one is stopped, what it had written does."""
    path = out / f"{name}.json"
    rows.pop(name, None)
    path.unlink(missing_ok=True)
    started_s = time.perf_counter()
    try:
        found = run()
        rows[name] = found | {"wall_s": round(time.perf_counter() - started_s, 1)} | dict(known)
    except Stopped:
        if path.exists():
            rows[name] = json.loads(path.read_text()) | dict(known)
            path.write_text(json.dumps(rows[name], indent=1))
        raise
    path.write_text(json.dumps(rows[name], indent=1))


def run_rows(
    jobs: Mapping[str, Callable[[], Row]], rows: dict[str, Row], out: Path, known: Mapping[str, str]
) -> tuple[int, Stopped | None]:
    """Measure them in turn; how many were done, and what ended that before all were."""
    done = 0
    try:
        with stoppable():
            for name, run in jobs.items():
                measure(name, run, rows, out, known)
                print(brief(name, rows[name]), flush=True)
                done += 1
    except Stopped as stopped:
        return done, stopped
    return done, None


def write_docs(table: str) -> None:
    """Put it between the markers of docs/benchmarks.md."""
    text = DOCS.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    DOCS.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END, 1)[1]}")


def main() -> None:
    """Run the rows and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of rows; others are read from --out")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--limit-s", type=float, default=240.0, help="for one row")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    out: Path = options.out
    wanted: list[Row] = yaml.safe_load((HERE / "gpu_rows.yaml").read_text())
    jobs = {row["name"]: partial(measured, row, out, options.limit_s) for row in wanted}
    jobs[kernel_table.NAME] = partial(kernel_table.measured, out)  # last: nothing beside it
    chosen = [name for name in jobs if options.only is None or name in options.only]
    if unknown := sorted(set(options.only or ()) - set(jobs)):
        parser.error(f"no rows {', '.join(unknown)}: there are {', '.join(jobs)}")
    here = gpu()
    if options.only is None:  # all of it anew
        for name in jobs:
            (out / f"{name}.json").unlink(missing_ok=True)
    if not has_liger():
        print(LIGER_IS_MISSING, flush=True)
    rows = earlier(jobs, out, here)
    known = {"gpu": here, "command": command(sys.argv[1:])}
    done, stopped = run_rows({name: jobs[name] for name in chosen}, rows, out, known)
    told = machine()
    if stopped is not None:
        told += f" Ended by {stopped} with {done} rows done."
    table = section(told, wanted, rows)
    (out / "table.md").write_text(table + "\n")
    print(table)
    if stopped is not None:
        sys.exit(stopped.exit_code)
    if options.write:
        write_docs(table)


if __name__ == "__main__":
    main()
