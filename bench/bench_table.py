"""The table of docs/benchmarks.md: FluxTrain beside the loops without it, one process a row.

    make bench-gpu                              every row of gpu_rows.yaml that is possible here
    python bench/bench_table.py --only 3b-8-exact 3b-8-fp32 --out DIR

Writes DIR/table.md and one JSON a row, and with `--write` the section of docs/benchmarks.md. A row
whose first 20 losses differ from those of the loop with fp32 masters by more than 1e-3 fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import yaml
from children import Stopped, run_python, stoppable

from fluxtrain.hardware.allocator import NAMES, SETTING

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- table of bench_table.py -->", "<!-- end of the table -->"
SAME_LOSSES = 1e-3  # relative
COMPARED_STEPS = 20
LEARNING_RATE = 1e-5  # random weights leap at more, and then no two loops agree
HEAD = (
    "| row | s/step | tokens/s | TFLOP/s | of the loop compared with | wanted | GPU (NVML) "
    "| host | plan | bound |\n|---|---|---|---|---|---|---|---|---|---|"
)

Row = dict[str, Any]


def measured(row: Row, out: Path, limit_s: float) -> Row:
    """Run one row; its numbers, or `error` in words."""
    if "needs" in row and importlib.util.find_spec(row["needs"]) is None:
        return {"error": f"{row['needs']} is not installed"}
    path = out / f"{row['name']}.json"
    arguments = [
        str(HERE / "bench_gpu.py"), "--json", str(path),
        "--shape", row["shape"], "--batch", str(row["batch"]), "--steps", str(row["steps"]),
        "--engine", row.get("engine", "flux"), "--learning-rate", str(LEARNING_RATE),
        *row.get("flags", []),
    ]  # fmt: skip
    if "budget" in row:
        arguments += ["--budget-gib", str(row["budget"])]
        arguments += ["--trace", str(out / f"{row['name']}.trace.json.gz")]
    environment = {NAMES[0]: SETTING, **os.environ}  # as the trainer sets it; the same for all
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


def judged(row: Row, rows: dict[str, Row]) -> tuple[str, str]:
    """The share of the other loop's throughput, and what was wanted with the verdict."""
    mine = rows[row["name"]]
    share, verdicts = "", []
    other = rows.get(row.get("against", ""), {})
    if "tokens_per_s" in other:
        reached = mine["tokens_per_s"] / other["tokens_per_s"]
        share = f"{reached:.1%} of {row['against']}"
        if "least" in row:
            verdicts.append(f"{row['least']:.0%}: {_word(reached >= row['least'])}")
    if "most_s" in row:
        verdicts.append(f"{row['most_s']:.2f} s: {_word(mine['step_s'] <= row['most_s'])}")
    reference = rows.get(row.get("losses", ""), {})
    if "losses" in reference:
        worst = furthest(mine["losses"], reference["losses"])
        same = _word(worst <= SAME_LOSSES, "same", "NOT the same")
        verdicts.append(f"losses {same} ({worst:.1e})")
    return share, "; ".join(verdicts)


def furthest(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference within the first steps."""
    pairs = list(zip(losses, reference, strict=False))[:COMPARED_STEPS]
    return max(abs(mine - other) / abs(other) for mine, other in pairs)


def _word(good: bool, yes: str = "met", no: str = "MISSED") -> str:
    return yes if good else no


def line(row: Row, rows: dict[str, Row]) -> str:
    """One row of the table."""
    found = rows[row["name"]]
    if "error" in found:
        return f"| {row['name']} | {found['error']} |" + " |" * 8
    share, wanted = judged(row, rows)
    return (
        f"| {row['name']} | {found['step_s']:.3f} | {found['tokens_per_s']:,} | {found['tflops']} "
        f"| {share} | {wanted} | {found['nvml_gib']:.1f} GiB | {found['host_gib']:.1f} GiB "
        f"| {_plan(found)} | {found.get('bound', '')} |"
    )


def _plan(found: Row) -> str:
    if "offload" not in found:
        return ""
    words = [
        f"{found['offload']}, {found['device_groups']} groups and {found['resident_blocks']} "
        f"blocks' weights on the GPU, chunks of {found['chunk_rows']}, boundaries on the "
        f"{found['boundaries']}, {found['kept_blocks']} blocks keep activations"
    ]
    if "host_bytes_each" in found:
        words.append(f"{found['host_bytes_each']} bytes of host memory a parameter at home")
    words += ["embedding by rows"] if found.get("embedding") == "rows" else []
    words += ["head in slices"] if found.get("head") == "slices" else []
    words += ["moments deferred"] if found.get("deferred_moments") else []
    if "predicted_step_s" in found:
        words.append(f"{found['predicted_step_s']:.3f} s predicted")
    else:
        words.append(f"no time known ({found.get('constants', '')})")
    return ", ".join(words)


def machine() -> str:
    """What the table was measured on."""
    import torch

    card = torch.cuda.get_device_properties(0)
    versions = [f"torch {torch.__version__}"]
    for name in ("transformers", "liger-kernel", "deepspeed"):
        if importlib.util.find_spec(name.replace("-", "_")) is not None:
            versions.append(f"{name} {importlib.metadata.version(name)}")
    today = datetime.now(UTC).date().isoformat()
    return f"{today}. {card.name} ({card.total_memory / 2**30:.0f} GiB). {', '.join(versions)}."


def main() -> None:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of rows; others are read from --out")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--limit-s", type=float, default=240.0, help="for one row")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted: list[Row] = yaml.safe_load((HERE / "gpu_rows.yaml").read_text())
    rows: dict[str, Row] = {}
    lines: list[str] = []
    stopped: Stopped | None = None
    try:
        with stoppable():
            for row in wanted:
                kept = options.out / f"{row['name']}.json"
                if options.only is None or row["name"] in options.only:
                    rows[row["name"]] = measured(row, options.out, options.limit_s)
                elif kept.exists():
                    rows[row["name"]] = json.loads(kept.read_text())
                else:
                    continue
                lines.append(line(row, rows))
                print(lines[-1], flush=True)
    except Stopped as error:
        stopped = error
    told = machine()
    if stopped is not None:
        told += f" Ended by {stopped} with {len(lines)} rows done."
    table = "\n".join([told, "", HEAD, *lines])
    (options.out / "table.md").write_text(table + "\n")
    if stopped is not None:
        sys.exit(stopped.exit_code)
    if options.write:
        text = DOCS.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN, 1)
        DOCS.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    main()
