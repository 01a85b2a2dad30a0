"""The native AdamW beside the streams that move what it does, as bench_cpu.py measures both."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from children import run_python
from verdicts import Told, outcome_of, verdict

HERE = Path(__file__).parent
NAME = "kernels"
MOST_S = 75.0  # for arrays and rounds; to import torch comes before
LIMIT_S = 100.0
ROUNDS = 15  # of each kernel behind its stream: one differs from the next by some percent
MILLION = 64  # 1.7 GB of fp32 states and weights: no cache holds them

Found = dict[str, Any]


def measured(out: Path) -> Found:
    """Run the kernels on one, half and all threads in a process of their own; what it had written
    where it was not done, or `error`."""
    path = out / f"{NAME}.json"
    arguments = [str(HERE / "bench_cpu.py"), "--million", str(MILLION), "--json", str(path)]
    arguments += ["--most-s", str(MOST_S), "--rounds", str(ROUNDS)]
    with (out / f"{NAME}.log").open("w") as log, TemporaryFile("w+") as errors:
        try:
            code = run_python(
                arguments, stdout=log, stderr=errors, environment=os.environ, limit_s=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            code, why = None, f"not done in {LIMIT_S:.0f} s"
        errors.seek(0)
        message = errors.read()
    if code is not None:
        why = (message.strip().splitlines() or ["no message"])[-1][:160]
    if code != 0 and not path.exists():
        return {"error": why}
    found: Found = json.loads(path.read_text())
    return found if code == 0 else found | {"cut": why}


def table(found: Found) -> str:
    """Return the rates, shares and verdicts, one line a kernel and number of threads."""
    if "error" in found:
        return f"The native AdamW was not measured: {found['error']}."
    cut = "" if found.get("done", True) else f"Cut short ({found.get('cut', 'stopped')}). "
    lines = [
        f"{cut}The native AdamW ({found['isa']}, {found['million']:.0f} M parameters, "
        f"{found['processors']} processors), beside a stream that reads and writes the same and "
        "computes nothing:",
        "",
        "| kernel | threads | ms | billions of parameters a second | of its stream | beside fp32 "
        "states | wanted |",
        "|---" * 7 + "|",
    ]
    lines += [
        f"| {row['name']} | {row['threads']} | {row['seconds'] * 1e3:.1f} "
        f"| {row['per_s'] / 1e9:.3f} | {row['of_stream']:.1%} | {row['of_fp32']:.2f}x "
        f"| {_words(row)} |"
        for row in found["rows"]
    ]
    return "\n".join(lines)


def targets(found: Found) -> dict[str, list[Told]]:
    """Return every target with its verdict, by number of threads."""
    if "error" in found:
        return {NAME: [Told(found["error"], "open")]}
    told: dict[str, list[Told]] = {}
    for row in found["rows"]:
        if row["wanted"]:
            good = row["verdict"] == "met"
            one = Told(f"{row['name']}, {_words(row)}", outcome_of(good))
            told.setdefault(f"{NAME}, threads: {row['threads']}", []).append(one)
    return told


def _words(row: Found) -> str:
    return f"{row['wanted']}: {verdict(row['verdict'] == 'met')}" if row["wanted"] else "-"
