"""Builds of the native library beside each other: is a change of a kernel a gain?

    python bench/compare_native.py OLD.so NEW.so --kernels "8-bit states" --threads 1 8

Each build runs the same kernels over the same arrays, in the same order and in rounds: how fast,
how many times the first build in the same round, and the share of the build's own stream. Builds
are compared for their bits by `make test`, not here.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench_cpu import faster, turns
from kernel_rows import ROWS, Part, Row, arena_of

from fluxtrain._native import library as native
from fluxtrain.errors import FluxTrainError

LEAST_S = 5.0  # of rounds, with each number of threads


@dataclass
class Build:
    """One library, and what its kernels took in each round."""

    name: str
    library: ctypes.CDLL
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def runner(self, row: Row, arena: Part, threads: int) -> Callable[[], object]:
        """One kernel of this build."""
        function = getattr(self.library, f"flux_{row.kernel}")
        return partial(function, *row.arguments(arena, threads))


def name_of(path: Path, paths: Sequence[Path]) -> str:
    """The name of a file, or the last folder above it by which it differs from all others."""
    for name in (path.stem, *(folder.name for folder in path.parents)):
        if sum(name in (other.stem, *other.parts) for other in paths) == 1:
            return name
    return str(path)


def chosen(rows: Sequence[Row], words: Sequence[str]) -> list[Row]:
    """Kernels with one of the words in their names, each behind its stream; all without words."""
    kernels = [row for row in rows if not row.is_stream]
    wanted = [row for row in kernels if not words or any(word in row.name for word in words)]
    streams = {row.name: row for row in rows}
    return [one for row in wanted for one in (*([streams[row.stream]] if row.stream else []), row)]


def compare(builds: Sequence[Build], arena: Part, rows: Sequence[Row], threads: int) -> None:
    """Rounds of all of them; into the builds."""
    passes = [row for row in rows for _ in range(2 if row.is_stream else 1)]
    runs = [build.runner(row, arena, threads) for build in builds for row in passes]
    taken = iter(turns(runs, 3, LEAST_S))
    for build in builds:
        build.seconds = {row.name: next(taken) for row in passes}  # of streams the second run


def table(builds: Sequence[Build], rows: Sequence[Row], n: int, threads: int) -> list[str]:
    """One line a kernel and build."""
    lines = []
    for row in rows:
        for build in builds:
            of_row = build.seconds[row.name]
            per_s, times = (
                n / statistics.median(of_row),
                faster(builds[0].seconds[row.name], of_row),
            )
            share = f"{faster(build.seconds[row.stream], of_row):9.1%}" if row.stream else ""
            told = f"{row.name:24} {build.name:16} {per_s / 1e9:8.3f} {times:7.3f} {share}"
            lines.append(f"{threads:7d}  {told}")
    return lines


def main() -> None:
    """Parse the command line and print a line a kernel and build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="+", type=Path, help="libflux_native.so of each build")
    parser.add_argument("--kernels", nargs="*", default=[], help="words of their names")
    parser.add_argument("--threads", type=int, nargs="*", default=[1])
    parser.add_argument("--million", type=float, default=32.0, help="elements, in millions")
    options = parser.parse_args()
    paths: list[Path] = [path.resolve() for path in options.libraries]
    if len(set(paths)) < len(paths):
        parser.error("one of the files is there twice")
    try:
        builds = [Build(name_of(path, paths), native.load(path)) for path in paths]
    except FluxTrainError as error:
        parser.error(str(error))
    native._library = lambda: builds[0].library
    arena = arena_of(int(options.million * 1e6))
    rows = chosen(ROWS, options.kernels)
    if not rows:
        names = (row.name for row in ROWS if not row.is_stream)
        parser.error(f"no kernel has these words in its name: {', '.join(names)}")
    print("threads  kernel                   build            Gparam/s   times  /stream")
    for threads in options.threads:
        compare(builds, arena, rows, threads)
        print("\n".join(table(builds, rows, arena.n, threads)), flush=True)


if __name__ == "__main__":
    main()
