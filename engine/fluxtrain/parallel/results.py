"""`results.jsonl`: one line a run, by which runs with different compression are compared."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from fluxtrain.config.schema import RunConfig
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.parallel.compress.exchange import Counts, Exchange
from fluxtrain.parallel.profile import Communication

FILE = "results.jsonl"
WARM_STEPS = 3  # left out of times
MOST_POINTS = 500  # of a curve
GIB = 1 << 30


def record(
    config: RunConfig,
    run_dir: RunDir,
    batch_rows: int,
    world: int,
    exchanges: Sequence[Exchange],
    profiled: Communication | None,
    device: torch.device,
) -> dict[str, Any]:
    """Return the line of a run, with its steps and evaluations from the journal; what was not
    measured is null.

    Bytes are those that one rank sent for gradients, as the wire format has them, against two bytes
    a number (bf16); both are 0 where torch reduces and nothing of ours counts. Bytes and times are
    those since the last start, losses and evaluations those of all.
    """
    curves = _journal(run_dir.journal)
    counts = exchanges[0].seconds() if exchanges else Counts()
    timed = curves.since_start[WARM_STEPS:] or curves.since_start
    times_ms = sorted(step["step_s"] * 1e3 for step in timed)
    steps = max(1, len(curves.since_start))
    last = curves.evaluations[-1][2] if curves.evaluations else None
    on_gpu = device.type == "cuda"
    memory = torch.cuda.memory_stats(device) if on_gpu else {}
    tokens = sum(step["tokens"] for step in timed)
    return {
        "run_name": run_dir.run_id, "world_size": world, "model": config.model.path,
        "dataset": str(config.data.path), "max_length": config.data.row_tokens,
        "batch_size": batch_rows, "compress_method": config.comm.compress,
        "compress_config": config.comm.config, "seed": config.train.seed,
        "step_time_ms_mean": statistics.fmean(times_ms) if times_ms else None,
        "step_time_ms_p50": _at(times_ms, 0.5), "step_time_ms_p90": _at(times_ms, 0.9),
        "tokens_per_s": tokens / (sum(times_ms) / 1e3) if times_ms else None,
        "comm_time_ms_total": profiled.comm_ms * steps if profiled else None,
        "comm_ratio": profiled.comm_share if profiled else None,
        "comm_time_ms_by_op": profiled.by_operation_ms if profiled else None,
        "bytes_raw_total": counts.raw_bytes, "bytes_compressed_total": counts.wire_bytes,
        "compression_ratio": counts.raw_bytes / counts.wire_bytes if counts.wire_bytes else None,
        "train_loss": curves.steps[-1]["loss"] if curves.steps else None,
        "val_loss": last, "val_ppl": math.exp(min(last, 700.0)) if last is not None else None,
        "compress_time_ms": counts.encode_s * 1e3, "decompress_time_ms": counts.decode_s * 1e3,
        "extra_collectives": counts.extra_collectives, "index_bytes": counts.index_bytes,
        "extra_collective_time_ms": counts.agree_s * 1e3,
        "density": counts.density, "residual_norm": _norm(exchanges),
        "grad_rel_error": counts.relative_error, "grad_cos_sim": counts.cosine,
        "mem_peak_alloc_gb": _gib(memory, "allocated_bytes.all.peak"),
        "mem_peak_reserved_gb": _gib(memory, "reserved_bytes.all.peak"),
        "mode": "fsdp", "cards": world, "sharding": config.fsdp.sharding_strategy,
        "exposed_comm_ms": profiled.exposed_ms if profiled else None,
        "overlap": profiled.overlap if profiled else None,
        "effective_bw": _bandwidth(counts, profiled, steps),
        "torch": torch.__version__, "timing_valid": on_gpu, "warm_steps": WARM_STEPS,
        "losses": _thinned([
            (step["step"], step["t_s"] - curves.steps[0]["t_s"], step["loss"])
            for step in curves.steps
        ]),
        "evaluations": curves.evaluations,
    }  # fmt: skip


@dataclass
class _Curves:
    steps: list[dict[str, Any]]
    since_start: list[dict[str, Any]]  # of the last start
    evaluations: list[tuple[int, float, float]]  # step, seconds since the first step, loss


def _journal(path: Path) -> _Curves:
    """Read steps and evaluations; a step that was made again after a resume counts once."""
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, tuple[int, float, float]] = {}
    since_start: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        event = msgspec.json.decode(line)
        if event.get("event") == "hello":
            since_start = []
        elif event.get("event") == "step":
            steps[event["step"]] = event
            since_start.append(event)
        elif event.get("event") == "evaluation":
            first_s = next(iter(steps.values()), event)["t_s"]
            evaluations[event["step"]] = (event["step"], event["t_s"] - first_s, event["loss"])
    return _Curves([*steps.values()], since_start, [*evaluations.values()])


def append(folder: Path, line: dict[str, Any]) -> Path:
    """Add a line to the results of a run's folder; return the file."""
    path = folder / FILE
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return path


def _at(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _norm(exchanges: Sequence[Exchange]) -> float | None:
    kept = [tensor for exchange in exchanges for tensor in exchange.residuals.values()]
    return math.sqrt(sum(float(t.square().sum()) for t in kept)) if kept else None


def _gib(memory: dict[str, int], name: str) -> float | None:
    return memory[name] / GIB if name in memory else None


def _bandwidth(counts: Counts, profiled: Communication | None, steps: int) -> float | None:
    """Return the bytes a second that communication was worth, as if nothing was compressed."""
    if profiled is None or not profiled.comm_ms or not counts.raw_bytes:
        return None
    return counts.raw_bytes / (profiled.comm_ms * steps / 1e3)


def _thinned(points: list[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    step = -(-len(points) // MOST_POINTS) or 1
    return points[::step]
