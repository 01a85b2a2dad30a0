"""Weights and optimizer states of a benchmark on disk: the folders, and their measured rates."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.packed import kept_name
from fluxtrain.core.quantization.packed_cache import PackedCache, cache_folder
from fluxtrain.measure.probe.disk_rate import disk_rates
from fluxtrain.plan.capacity import DiskHome
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.rates import Rates


def home_for(facts: ModelFacts) -> DiskHome | None:
    """Return the folder of packed models, with its measured rate, for a model with frozen blocks;
    None for another one."""
    if not any(group.file_bytes for group in facts.blocks):
        return None
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return DiskHome(folder=str(folder), read_bytes_per_s=disk_rates(folder)[1].per_s)


def rates_with(rates: Rates | None, home: DiskHome | None) -> Rates | None:
    """Return the rates with those of the disk."""
    if rates is None or home is None:
        return rates
    disk: dict[str, Any] = {"disk_bytes_per_s": home.read_bytes_per_s}
    if home.write_bytes_per_s:
        disk["disk_write_bytes_per_s"] = home.write_bytes_per_s
    return replace(rates, **disk)


def spill_home(folder: Path) -> DiskHome:
    """Return the folder of optimizer states on disk, with its measured rates."""
    write, read = disk_rates(folder)
    return DiskHome(folder=str(folder), read_bytes_per_s=read.per_s, write_bytes_per_s=write.per_s)


class BenchFiles:
    """Opens the files of weights on disk in a folder of this process, which `remove` removes."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bench-", dir=cache_folder()))

    def __call__(self, groups: Iterable[Group]) -> PackedCache:
        """Open the cache for the groups of a model; every start packs."""
        blocks = [group for group in groups if group.kind == "block"]
        sizes = {kept_name(s, g.name): s.size_bytes for g in blocks for s in g.file_segments}
        return PackedCache("weights", sizes, print, self._folder)

    def remove(self) -> None:
        """Remove the files, of which the engine keeps its own open."""
        shutil.rmtree(self._folder, ignore_errors=True)
