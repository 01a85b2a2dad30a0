"""The native AdamW beside the streams that move what it does, as bench_cpu.py measures both."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from children import run_python
from verdicts import BOUND, Told, outcome_of, verdict

HERE = Path(__file__).parent
NAME = "kernels"
MOST_S = 75.0  # for arrays, rounds and caches; to import torch comes before
LIMIT_S = 100.0
ROUNDS = 15  # of each kernel behind its stream: one differs from the next by some percent
MILLION = 64  # 1.7 GB of fp32 states and weights: no cache holds them
OF_STREAM = 0.95
NARROW_BESIDE_FP32 = 1.5
FP32, NARROW = "adamw, fp32 states", "adamw, 8-bit states"
# Those that memory is to bind, in the table's order; where one is below its stream, arithmetic may
# bind it instead. 8 bits are judged by their gain, for their arithmetic costs more than what they
# move.
STREAMED = (FP32, "adamw, weights alone", "adamw, moments alone", "adamw, bf16 states")
NAMES = (*STREAMED, NARROW)

Found = dict[str, Any]


def measured(out: Path) -> Found:
    """Run the kernels on one, half and all threads in a process of their own; what it had written
    where it was not done, or `error`."""
    path = out / f"{NAME}.json"
    arguments = [str(HERE / "bench_cpu.py"), "--million", str(MILLION), "--json", str(path)]
    arguments += ["--most-s", str(MOST_S), "--rounds", str(ROUNDS), "--kernels-only"]
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
    """Rates, shares and verdicts, one line a number of threads."""
    if "error" in found:
        return f"The native AdamW was not measured: {found['error']}."
    cut = "" if found.get("done", True) else f"Cut short ({found.get('cut', 'stopped')}). "
    head = ["threads", *(name.removeprefix("adamw, ") for name in NAMES), "8-bit beside fp32"]
    lines = [
        f"{cut}The native AdamW ({found['isa']}, {found['million']:.0f} M parameters, "
        f"{found['processors']} processors), billions of parameters a second, and the share of a "
        "kernel with the same streams and no arithmetic; in cache is what arithmetic allows (of "
        f"{', '.join(name.removeprefix('adamw, ') for name in NAMES)}), with as many processes at "
        "a time that each update what their core's cache holds, in turn with the others and at "
        "the clock that cores have behind an update:",
        "",
        f"| {' | '.join([*head, 'in cache', 'wanted'])} |",
        "|---" * (len(head) + 2) + "|",
    ]
    for threads in _threads(found):
        rows = _of_threads(found, threads)
        cells = [f"{rows[n]['per_s'] / 1e9:.3f} ({rows[n]['of_stream']:.1%})" for n in NAMES]
        cells.append(f"{rows[NARROW]['of_fp32']:.2f}x")
        in_cache = (rows[n].get("in_cache_per_s") for n in NAMES)
        cells.append(", ".join("-" if x is None else f"{x / 1e9:.3f}" for x in in_cache))
        wanted = "; ".join(told.words for told in _told(rows))
        lines.append(f"| {' | '.join([str(threads), *cells, wanted])} |")
    return "\n".join(lines)


def targets(found: Found) -> dict[str, list[Told]]:
    """Every target with its verdict, by number of threads; one where nothing was measured."""
    if "error" in found:
        return {NAME: [Told(found["error"], "open")]}
    return {f"{NAME}, threads: {n}": _told(_of_threads(found, n)) for n in _threads(found)}


def _threads(found: Found) -> list[int]:
    return sorted({row["threads"] for row in found["rows"]})


def _of_threads(found: Found, threads: int) -> dict[str, Found]:
    """Rows by name."""
    return {row["name"]: row for row in found["rows"] if row["threads"] == threads}


def _told(rows: dict[str, Found]) -> list[Told]:
    return [_streamed(rows), _narrow(rows[NARROW])]


def _streamed(rows: dict[str, Found]) -> Told:
    """The shares of the streams. Missed where one is below it that arithmetic does not bind."""
    below = [name for name in STREAMED if rows[name]["of_stream"] < OF_STREAM]
    if missed := [name for name in below if not _bound(rows[name])]:
        which = ", ".join(name.removeprefix("adamw, ") for name in missed)
        return Told(f"{OF_STREAM:.0%}: {verdict(False)} ({which})", outcome_of(False))
    if not below:
        return Told(f"{OF_STREAM:.0%}: {verdict(True)}", outcome_of(True))
    told = (f"{n.removeprefix('adamw, ')} at {rows[n]['of_cache']:.1%}" for n in below)
    return Told(f"{OF_STREAM:.0%}: BOUND, {', '.join(told)} of what arithmetic allows", "bound")


def _narrow(row: Found) -> Told:
    """The gain of 8-bit states. Where it is too small, arithmetic may be what allows no more."""
    wanted, enough = f"{NARROW_BESIDE_FP32}x", row["of_fp32"] >= NARROW_BESIDE_FP32
    if not enough and _bound(row):
        return Told(f"{wanted}: BOUND, at {row['of_cache']:.1%} of what arithmetic allows", "bound")
    return Told(f"{wanted}: {verdict(enough)}", outcome_of(enough))


def _bound(row: Found) -> bool:
    """Whether arithmetic takes the time; not known where no processes ran in their caches."""
    share = row.get("of_cache")
    return share is not None and share >= BOUND
