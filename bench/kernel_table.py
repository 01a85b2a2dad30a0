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
IN_CACHE = dict(
    zip((*STREAMED, NARROW), ("fp32", "weights", "moments", "bf16", "8bit"), strict=True)
)

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
    names = tuple(IN_CACHE)
    head = ["threads", *(name.removeprefix("adamw, ") for name in names), "8-bit beside fp32"]
    lines = [
        f"{cut}The native AdamW ({found['isa']}, {found['million']:.0f} M parameters, "
        f"{found['processors']} processors), billions of parameters a second, and the share of a "
        "kernel with the same streams and no arithmetic; in cache is what arithmetic allows (of "
        f"{', '.join(name.removeprefix('adamw, ') for name in names)}), with as many processes at "
        "a time that each update what their core's cache holds:",
        "",
        f"| {' | '.join([*head, 'in cache', 'wanted'])} |",
        "|---" * (len(head) + 2) + "|",
    ]
    for threads in _threads(found):
        rows, most_per_s = _of_threads(found, threads)
        cells = [f"{rows[n]['per_s'] / 1e9:.3f} ({rows[n]['of_stream']:.1%})" for n in names]
        cells.append(f"{rows[NARROW]['of_fp32']:.2f}x")
        in_cache = (f"{most_per_s[n] / 1e9:.3f}" if n in most_per_s else "-" for n in names)
        cells.append(", ".join(in_cache))
        wanted = "; ".join(told.words for told in _told(rows, most_per_s))
        lines.append(f"| {' | '.join([str(threads), *cells, wanted])} |")
    return "\n".join(lines)


def targets(found: Found) -> dict[str, list[Told]]:
    """Every target with its verdict, by number of threads; one where nothing was measured."""
    if "error" in found:
        return {NAME: [Told(found["error"], "open")]}
    return {f"{NAME}, threads: {n}": _told(*_of_threads(found, n)) for n in _threads(found)}


def _threads(found: Found) -> list[int]:
    return sorted({row["threads"] for row in found["rows"]})


def _of_threads(found: Found, threads: int) -> tuple[dict[str, Found], dict[str, float]]:
    """Rows by name, and what arithmetic allows of them, where that is known."""
    rows = {row["name"]: row for row in found["rows"] if row["threads"] == threads}
    known = found["in_cache_per_s"].get(str(threads), {})
    return rows, {name: known[kind] for name, kind in IN_CACHE.items() if kind in known}


def _told(rows: dict[str, Found], most_per_s: dict[str, float]) -> list[Told]:
    return [_streamed(rows, most_per_s), _narrow(rows[NARROW], most_per_s.get(NARROW))]


def _streamed(rows: dict[str, Found], most_per_s: dict[str, float]) -> Told:
    """The shares of the streams. Missed where one is below it that arithmetic does not bind."""
    below = [name for name in STREAMED if rows[name]["of_stream"] < OF_STREAM]
    bound = {n: _share(rows[n], most_per_s[n]) for n in below if n in most_per_s}
    bound = {name: share for name, share in bound.items() if share >= BOUND}
    if missed := [name for name in below if name not in bound]:
        which = ", ".join(name.removeprefix("adamw, ") for name in missed)
        return Told(f"{OF_STREAM:.0%}: {verdict(False)} ({which})", outcome_of(False))
    if not bound:
        return Told(f"{OF_STREAM:.0%}: {verdict(True)}", outcome_of(True))
    told = (f"{name.removeprefix('adamw, ')} at {share:.1%}" for name, share in bound.items())
    return Told(f"{OF_STREAM:.0%}: BOUND, {', '.join(told)} of what arithmetic allows", "bound")


def _narrow(row: Found, most_per_s: float | None) -> Told:
    """The gain of 8-bit states. Where it is too small, arithmetic may be what allows no more."""
    wanted = f"{NARROW_BESIDE_FP32}x"
    if row["of_fp32"] < NARROW_BESIDE_FP32 and most_per_s:
        share = _share(row, most_per_s)
        if share >= BOUND:
            return Told(f"{wanted}: BOUND, at {share:.1%} of what arithmetic allows", "bound")
    enough = row["of_fp32"] >= NARROW_BESIDE_FP32
    return Told(f"{wanted}: {verdict(enough)}", outcome_of(enough))


def _share(row: Found, most_per_s: float) -> float:
    return float(row["per_s"] / most_per_s)
