"""Measures this machine once: `probe(run_dir)` takes 20 s at most, afterwards it reads a cache.

Sizes that change from minute to minute (free memory, free disk) are always read anew; rates are
cached per machine and disk below $XDG_CACHE_HOME/fluxtrain and measured again after a week, after a
change of the hardware, of torch, OMP_NUM_THREADS or FLUXTRAIN_ISA, with `fresh`, or if other
programs slowed the measurement down and are gone now. Where a rate could not be measured, all are
measured again after an hour.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec.structs import replace

from fluxtrain.errors import FluxTrainError
from fluxtrain.events.answers.machine import TOGETHER, Disk, Machine, ProbeAnswer, Rate
from fluxtrain.machine.disk import read_disk
from fluxtrain.machine.machine import read_machine
from fluxtrain.machine.seen_cards import cards_seen
from fluxtrain.measure.probe.adamw_rate import adamw_rate
from fluxtrain.measure.probe.bandwidth import (
    BUS_RATES,
    bus_rates,
    host_copy_rate,
    matmul_rate,
    pin_rate,
    sample_bytes,
)
from fluxtrain.measure.probe.cache import cache_file, keep, read_kept
from fluxtrain.measure.probe.cards import (
    NO_ACCESS,
    WRONG,
    further_card_names,
    further_card_rates,
    peer_names,
    peer_rates,
    rates_together,
)
from fluxtrain.measure.probe.disk_rate import disk_rates
from fluxtrain.measure.probe.others import is_calm_after, others_share, read_use
from fluxtrain.measure.probe.rate import failed
from fluxtrain.measure.probe.table import no_gpu_reason

PROBE_LIMIT_S = 20.0
LAST_START_S = 15.0  # each measurement takes 5 s at most, except the bus, which comes first
FAILED_AGE_S = 3600.0  # before all is measured again where a measurement failed
FORMAT = 4  # of the cache; a reader ignores another one
GPU_RATES = (*BUS_RATES, "gpu_matmul", "pin")
LATE = Rate(None, f"not measured: the {PROBE_LIMIT_S:g} s were used up")

Report = Callable[[str], None]
Measurement = Callable[[], Mapping[str, Rate]]


def probe(run_dir: Path | str, fresh: bool = False, report: Report | None = None) -> ProbeAnswer:
    """Return facts and rates of this machine and of the disk that holds `run_dir`.

    `report` gets each measurement's name. A measurement that does not fit in 20 s is skipped, and
    its rate says so.
    """
    say = report or (lambda _: None)
    say("reading the machine")
    folder = _existing(Path(run_dir))
    machine, disk = read_machine(), read_disk(folder)
    place = _cache_path(machine, disk)
    found = None if fresh else _cached(place)
    if found is not None and not _should_measure_again(found, machine):
        found = replace(found, machine=machine, disk=disk, from_cache=True)
    else:
        found = _measured(machine, disk, folder, say)
        is_whole = LATE not in found.rates.values()
        if is_whole and (failure := keep(place, _Kept(FORMAT, found))):
            say(f"the rates are not kept: {failure}")
    return replace(found, cards=cards_seen(machine))


def _measured(machine: Machine, disk: Disk, folder: Path, say: Report) -> ProbeAnswer:
    start_s, before = time.monotonic(), read_use()
    rates = {
        **_unmeasurable(machine),
        **_measure(_measurements(machine, folder), start_s + LAST_START_S, say),
    }
    return ProbeAnswer(
        machine=machine,
        disk=disk,
        rates=rates,
        measured_at_s=time.time(),
        measuring_s=time.monotonic() - start_s,
        others_share=others_share(before),
    )


def known_rates(run_dir: Path | str) -> dict[str, Rate]:
    """Return rates measured before on this machine, by name; empty without any."""
    machine, disk = read_machine(), read_disk(_existing(Path(run_dir)))
    cached = _cached(_cache_path(machine, disk))
    return {} if cached is None else dict(cached.rates)


def _should_measure_again(cached: ProbeAnswer, machine: Machine) -> bool:
    """Return whether the cause of a slow or missing measurement may be gone."""
    if is_calm_after(cached.others_share):
        return True
    failed_before = any(
        rate.per_s is None
        and (machine.gpus or name not in GPU_RATES)
        and rate.how not in (NO_ACCESS, WRONG)  # a card's answer, not a failure
        for name, rate in cached.rates.items()
    )
    return failed_before and cached.age_s > FAILED_AGE_S


def _measurements(machine: Machine, folder: Path) -> dict[str, tuple[tuple[str, ...], Measurement]]:
    """Return message, rate names and function of each measurement, the most useful first."""
    available = machine.memory_available_bytes
    threads = sustained_threads(machine)
    size = sample_bytes(available)

    def copies() -> dict[str, Rate]:
        return {"host_copy": host_copy_rate(size, threads=threads)}

    def arithmetic() -> dict[str, Rate]:
        return {"cpu_matmul": matmul_rate("cpu", threads=threads)}

    def adamw() -> dict[str, Rate]:
        return {
            "adamw": adamw_rate(available, threads=threads),
            "adamw_8bit": adamw_rate(available, threads=threads, eight_bit=True),
        }

    def disk() -> dict[str, Rate]:
        write, read = disk_rates(folder)
        return {"disk_write": write, "disk_read": read}

    on_gpu: dict[str, tuple[tuple[str, ...], Measurement]] = {
        "bus": (BUS_RATES, lambda: _on_first_card(lambda: bus_rates(size_bytes=size))),
        "GPU arithmetic": (
            ("gpu_matmul",),
            lambda: _on_first_card(lambda: {"gpu_matmul": matmul_rate("cuda")}),
        ),
        "page locks": (("pin",), lambda: {"pin": pin_rate(available)}),
        **_between_cards(len(machine.gpus), size),
    }
    return {
        **(on_gpu if machine.gpus else {}),
        "host memory": (("host_copy",), copies),
        "AdamW": (("adamw", "adamw_8bit"), adamw),
        "CPU arithmetic": (("cpu_matmul",), arithmetic),
        "disk": (("disk_write", "disk_read"), disk),
    }


def _on_first_card(measurement: Measurement) -> Mapping[str, Rate]:
    """Run a measurement without a card's number, whichever card is torch's current one."""
    import torch

    if not torch.cuda.is_available():
        return measurement()
    with torch.cuda.device(0):
        return measurement()


def _between_cards(cards: int, size: int) -> dict[str, tuple[tuple[str, ...], Measurement]]:
    """Return the measurements between several cards."""
    if cards < 2:
        return {}
    return {
        "copies between cards": (peer_names(cards), lambda: peer_rates(cards)),
        "all cards at once": (TOGETHER, lambda: rates_together(cards, size)),
        "the other cards": (further_card_names(cards), lambda: further_card_rates(cards, size)),
    }


def sustained_threads(machine: Machine) -> int | None:
    """Return how many threads a CPU quota keeps running (fewer with OMP_NUM_THREADS); None: all."""
    if machine.cpu_quota is None:
        return None
    return min(machine.cores, machine.threads_wished or machine.cores)


def _unmeasurable(machine: Machine) -> dict[str, Rate]:
    """Return the rates that cannot be measured on this machine, with the reason."""
    why = Rate(None, f"not measured: {no_gpu_reason(machine)}")
    return {} if machine.gpus else dict.fromkeys(GPU_RATES, why)


def _measure(
    measurements: Mapping[str, tuple[tuple[str, ...], Measurement]], end_s: float, say: Report
) -> dict[str, Rate]:
    rates: dict[str, Rate] = {}
    for what, (names, measurement) in measurements.items():
        if time.monotonic() > end_s:
            rates |= dict.fromkeys(names, LATE)
            continue
        say(f"measuring {what}")
        try:
            rates |= measurement()
        except (ImportError, RuntimeError, MemoryError, FluxTrainError) as error:  # nothing to use
            rates |= dict.fromkeys(names, failed(error))
    return rates


class _Kept(msgspec.Struct, frozen=True):
    format: int
    probe: ProbeAnswer

    @property
    def measured_at_s(self) -> float:
        """Return when the oldest of its rates was measured."""
        return self.probe.measured_at_s


def _cached(place: Path) -> ProbeAnswer | None:
    kept = read_kept(place, _Kept, FORMAT)
    return None if kept is None else kept.probe


def _cache_path(machine: Machine, disk: Disk) -> Path:
    """Return the file for this machine, disk, requested number of threads and torch: a torch that
    cannot use the card leaves its rates unknown, and the cure is to install another one."""
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch_version = None
    where = (disk.file_system, os.stat(disk.path).st_dev)
    return cache_file("probe", machine, where, machine.threads_wished, torch_version)


def _existing(folder: Path) -> Path:
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
