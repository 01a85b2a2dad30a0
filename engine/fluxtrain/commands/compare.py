"""`fluxtrain compare`: runs side by side, from the lines that they wrote to results.jsonl."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fluxtrain.errors import BadInput
from fluxtrain.events.printable import printable
from fluxtrain.files.opening import read_named


class ComparedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that differ in their seeds alone: means over them, and changes against the base."""

    method: str
    ranks: int
    seeds: int
    tokens_per_s: float | None
    step_ms: float | None
    comm_share: float | None  # of a step
    exposed_ms: float | None
    compression: float | None  # times fewer bytes than bf16
    val_ppl: float | None
    val_ppl_spread: float | None  # standard deviation over seeds
    ppl_change: float | None  # against bf16 on as many ranks, as a share
    speed_change: float | None
    scaling: float | None  # tokens a second, against as many times those of one rank
    timing_valid: bool


Point = tuple[float | None, float | None, float | None]  # step, seconds, loss


class _Written(msgspec.Struct):
    """What is used of a line, of which the first four have to be there."""

    compress_method: str
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    seed: int
    tokens_per_s: float | None
    compress_config: dict[str, Any] | None = None
    losses: list[Point] | None = None
    evaluations: list[Point] | None = None


NEEDED = _Written.__struct_fields__[:4]
BASE = ("bf16", "none")  # what the others are compared with: the first that is there
FEW_SEEDS = 3


@dataclass(frozen=True)
class _Kind:
    """Runs that differ in their seeds alone."""

    name: str
    ranks: int
    lines: tuple[dict[str, Any], ...]

    def mean(self, key: str) -> float | None:
        """Return the mean of a number over the runs that have it."""
        found = [line[key] for line in self.lines if isinstance(line.get(key), int | float)]
        return statistics.fmean(found) if found else None

    def spread(self, key: str) -> float | None:
        """Return the standard deviation over the runs."""
        found = [line[key] for line in self.lines if isinstance(line.get(key), int | float)]
        return statistics.stdev(found) if len(found) > 1 else None


def read_lines(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the lines of files, or of run folders. Raises BadInput for what is none."""
    lines = []
    for given in paths:
        path = given / "results.jsonl" if given.is_dir() else given
        try:
            rows = read_named(path).decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"{path} cannot be read ({error}): name a run folder, or a results.jsonl that a "
                "run with parallel.mode=fsdp wrote"
            ) from None
        if not rows:
            raise BadInput(f"{path} has no line: a run adds one when it ends")
        lines += [_line(row, f"{path}, line {number}") for number, row in enumerate(rows, 1)]
    return lines


def _line(row: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(row)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"{where} is no JSON ({error}): remove the line") from None
    lacks = [key for key in NEEDED if not isinstance(found, dict) or key not in found]
    if lacks:
        raise BadInput(f"{where} lacks {', '.join(lacks)}: it is not a line that a run wrote")
    try:
        msgspec.convert(found, _Written)
    except msgspec.ValidationError as error:
        raise BadInput(f"{where} is not one that a run wrote ({error}): remove the line") from None
    return dict(found)


def compared(lines: Sequence[dict[str, Any]]) -> list[ComparedRuns]:
    """Return a row a kind of run, over its seeds, with what changes against the base."""
    kinds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        kinds.setdefault((_name(line), int(line["world_size"])), []).append(line)
    every = [_Kind(name, ranks, tuple(found)) for (name, ranks), found in kinds.items()]
    return [_row(kind, _base(kind, every), every) for kind in every]


def _name(line: dict[str, Any]) -> str:
    options = line.get("compress_config") or {}
    return str(line["compress_method"]) + (f" {json.dumps(options)}" if options else "")


def _base(kind: _Kind, every: Sequence[_Kind]) -> _Kind | None:
    names = {other.name: other for other in every if other.ranks == kind.ranks}
    return next((names[name] for name in BASE if name in names), None)


def _row(kind: _Kind, base: _Kind | None, every: Sequence[_Kind]) -> ComparedRuns:
    perplexity, rate = kind.mean("val_ppl"), kind.mean("tokens_per_s")
    alone = next(
        (k.mean("tokens_per_s") for k in every if (k.name, k.ranks) == (kind.name, 1)), None
    )
    return ComparedRuns(
        method=kind.name,
        ranks=kind.ranks,
        seeds=len({line["seed"] for line in kind.lines}),
        tokens_per_s=rate,
        step_ms=kind.mean("step_time_ms_p50"),
        comm_share=kind.mean("comm_ratio"),
        exposed_ms=kind.mean("exposed_comm_ms"),
        compression=kind.mean("compression_ratio"),
        val_ppl=perplexity,
        val_ppl_spread=kind.spread("val_ppl"),
        ppl_change=_change(perplexity, None if base is None else base.mean("val_ppl")),
        speed_change=_change(rate, None if base is None else base.mean("tokens_per_s")),
        scaling=rate / alone / kind.ranks if rate and alone and kind.ranks > 1 else None,
        timing_valid=all(bool(line.get("timing_valid")) for line in kind.lines),
    )


def _change(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base - 1


def table(rows: Sequence[ComparedRuns]) -> str:
    """Return the rows as text."""
    head = ("method", "ranks", "seeds", "tokens/s", "", "step ms", "comm", "fewer bytes", "ppl", "")
    cells = [head]
    cells += [
        (
            printable(row.method), str(row.ranks), str(row.seeds), _told(row.tokens_per_s, ",.0f"),
            _told(row.speed_change, "+.1%"), _told(row.step_ms, ".1f"),
            _told(row.comm_share, ".0%"), _told(row.compression, ".2f"),
            _told(row.val_ppl, ".3f"), _told(row.ppl_change, "+.2%"),
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(w) if not at else cell.rjust(w)
            for at, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    lines.append("changes are against bf16 on as many ranks, or against none where it was not run")
    if any(row.seeds < FEW_SEEDS for row in rows):
        lines.append(f"fewer than {FEW_SEEDS} seeds: small differences of perplexity are chance")
    if not all(row.timing_valid for row in rows):
        lines.append("times of gloo, on processors, say nothing about a GPU; bytes and losses do")
    return "\n".join(lines)


def _told(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def draw(lines: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw loss over steps and over time, and quality against bytes; return the SVG files.

    Raises BadInput without matplotlib, and where the folder cannot be written.
    """
    try:
        return _drawn(lines, folder)
    except ImportError:
        raise BadInput(
            "plots need matplotlib: pip install 'fluxtrain[plots]', or leave --plots out"
        ) from None
    except OSError as error:
        raise BadInput(
            f"{folder} cannot be written ({error.strerror}): name another folder with --plots"
        ) from None


def _drawn(lines: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, key, at, label in (
        ("loss-by-step", "losses", 0, "step"),
        ("loss-by-time", "losses", 1, "seconds"),
        ("evaluation-by-time", "evaluations", 1, "seconds"),
    ):
        figure = Figure(figsize=(7, 4))
        axes = figure.subplots()
        for line in lines:
            points = line.get(key) or []
            if points:
                axes.plot([p[at] for p in points], [p[2] for p in points], label=_name(line))
        axes.set_xlabel(label)
        axes.set_ylabel("loss, nats a token")
        if axes.lines:
            axes.legend(fontsize=7)
        figure.savefig(path := folder / f"{name}.svg")
        made.append(path)
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for row in compared(lines):
        if row.compression and row.val_ppl:
            axes.errorbar(row.compression, row.val_ppl, row.val_ppl_spread or 0.0, fmt="o")
            axes.annotate(row.method, (row.compression, row.val_ppl), fontsize=7)
    axes.set_xlabel("times fewer bytes than bf16")
    axes.set_ylabel("perplexity")
    figure.savefig(path := folder / "quality-by-bytes.svg")
    return [*made, path]
