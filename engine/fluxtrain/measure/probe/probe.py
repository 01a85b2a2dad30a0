"""Measures this machine once: `probe(run_dir)` takes 20 s at most, afterwards it reads a cache.

Sizes that change from minute to minute (free memory, free disk) are always read anew; rates are
cached per machine and disk below $XDG_CACHE_HOME/fluxtrain and measured again after a week, after a
change of the hardware, of torch, OMP_NUM_THREADS or FLUXTRAIN_ISA, with `fresh`, or if other
programs slowed the measurement down and are gone now. Rates that could not be measured are tried
again alone after some minutes, or as soon as more of the memory that was lacking is free.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Mapping
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec.structs import replace

from fluxtrain.errors import FluxTrainError
from fluxtrain.events.answers.machine import TOGETHER, Disk, Machine, Rate
from fluxtrain.events.answers.probe import ProbeAnswer
from fluxtrain.machine.disk import read_disk
from fluxtrain.machine.machine import read_machine
from fluxtrain.machine.seen_cards import cards_seen
from fluxtrain.measure.probe.adamw_rate import adamw_rate
from fluxtrain.measure.probe.bandwidth import (
    BUS_RATES,
    bus_rates,
    host_copy_rate,
    matmul_rate,
    sample_bytes,
)
from fluxtrain.measure.probe.cache import cache_file, keep, read_kept
from fluxtrain.measure.probe.card_rates import (
    current,
    further_card_names,
    further_card_rates,
    rates_together,
)
from fluxtrain.measure.probe.disk_rate import disk_rates
from fluxtrain.measure.probe.others import is_calm_after, others_share, read_use
from fluxtrain.measure.probe.peers import NO_ACCESS, WRONG, peer_names, peer_rates
from fluxtrain.measure.probe.pin_rate import pin_rate
from fluxtrain.measure.probe.rate import failed
from fluxtrain.measure.probe.table import no_gpu_reason
from fluxtrain.units import GIB

PROBE_LIMIT_S = 20.0
LAST_START_S = 15.0  # each measurement takes 5 s at most, except the bus, which comes first
FAILED_AGE_S = 300.0  # before a failed measurement is tried again
MORE_BYTES = GIB // 2  # or, if memory was lacking, until so much more is free
FORMAT = 4  # of the cache; a reader ignores another one
GPU_RATES = (*BUS_RATES, "gpu_matmul", "pin")
LATE = Rate(None, f"not measured: the {PROBE_LIMIT_S:g} s were used up")

Report = Callable[[str], None]
Measurement = Callable[[], Mapping[str, Rate]]


def probe(run_dir: Path | str, fresh: bool = False, report: Report | None = None) -> ProbeAnswer:
    """Return facts and rates of this machine and of the disk that holds `run_dir`.

    `report` is told what is being measured. A measurement that does not fit in 20 s is skipped, and
    its rate says so.
    """
    say = report or _say_nothing
    say("reading the machine")
    folder = _existing(Path(run_dir))
    machine, disk = read_machine(), read_disk(folder)
    place = _cache_path(machine, disk)
    cached = None if fresh else _cached(place)
    return replace(_found(cached, machine, disk, folder, say), cards=cards_seen(machine))


def _found(
    cached: ProbeAnswer | None, machine: Machine, disk: Disk, folder: Path, say: Report
) -> ProbeAnswer:
    """Return cached rates that are still good, or measure."""
    place = _cache_path(machine, disk)
    if cached is not None and not is_calm_after(cached.others_share):
        cached = replace(cached, disk=disk, from_cache=True)
        failed_before = _worth_another_try(cached, machine)
        if not failed_before:
            return replace(cached, machine=machine)
        measured = _tried_again(cached, failed_before, machine, folder, say)
    else:
        measured = _measured(machine, disk, folder, say)
    is_whole = LATE not in measured.rates.values()
    if is_whole and (failure := keep(place, _Kept(FORMAT, measured))):
        say(f"the rates are not kept: {failure}")
    return measured


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


def _tried_again(
    cached: ProbeAnswer, names: Container[str], machine: Machine, folder: Path, say: Report
) -> ProbeAnswer:
    """Measure the failed rates (`names`) again, if that works now; others stay, with their age."""
    start_s, before = time.monotonic(), read_use()
    every = _measurements(machine, folder)
    wanted = {what: one for what, one in every.items() if any(name in names for name in one[0])}
    found = _measure(wanted, start_s + LAST_START_S, say)
    better = {n: rate for n, rate in found.items() if rate.per_s is not None or n in names}
    shares = (cached.others_share, others_share(before))
    return replace(
        cached,
        machine=machine,
        rates={**cached.rates, **better},
        tried_again_at_s=time.time(),
        others_share=max((share for share in shares if share is not None), default=None),
        from_cache=False,
    )


def known_rates(run_dir: Path | str) -> dict[str, Rate]:
    """Return rates measured before on this machine, by name; empty without any."""
    machine, disk = read_machine(), read_disk(_existing(Path(run_dir)))
    cached = _cached(_cache_path(machine, disk))
    return {} if cached is None else dict(cached.rates)


def _worth_another_try(cached: ProbeAnswer, machine: Machine) -> frozenset[str]:
    """Return the rates that could not be measured but may be now: all after some minutes, and rates
    that lacked memory as soon as more is free."""
    missing = {
        name: rate
        for name, rate in cached.rates.items()
        if rate.per_s is None
        and (machine.gpus or name not in GPU_RATES)
        and not rate.how.startswith((NO_ACCESS, WRONG))  # a card's answer, not a failure
    }
    tried_at_s = cached.tried_again_at_s or cached.measured_at_s
    if time.time() - tried_at_s > FAILED_AGE_S:
        return frozenset(missing)
    then, now = ([one.memory_available_bytes, *(gpu.memory_free_bytes for gpu in one.gpus)]
                 for one in (cached.machine, machine))  # fmt: skip
    grown = (b - a for a, b in zip(then, now, strict=False) if a is not None and b is not None)
    if not any(more >= MORE_BYTES for more in grown):
        return frozenset()
    return frozenset(name for name, rate in missing.items() if rate.lacked_memory)


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
    """Measure what is told without a number, whichever card is torch's current one."""
    import torch

    if not torch.cuda.is_available():
        return measurement()
    with current(0):
        return measurement()


def _between_cards(cards: int, size: int) -> dict[str, tuple[tuple[str, ...], Measurement]]:
    """Return what is measured where there are several cards."""
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
        """When the oldest of its rates was measured."""
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


def _say_nothing(_: str) -> None:
    pass
