"""Everything measured about this machine, once: `probe(run_dir)` takes 20 s at most, then a cache.

Sizes that change from minute to minute (free memory, free disk) are always read anew; rates are
cached per machine and disk below $XDG_CACHE_HOME/fluxtrain and measured again after a week, after a
change of the hardware, or with `fresh`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from fluxtrain.errors import FluxTrainError
from fluxtrain.hardware.bandwidth import BUS_RATES, bus_rates, host_copy_rate, matmul_rate
from fluxtrain.hardware.disk import Disk, read_disk
from fluxtrain.hardware.disk_rate import disk_rates
from fluxtrain.hardware.machine import Machine, read_machine
from fluxtrain.hardware.rate import Rate
from fluxtrain.telemetry.storage import write_json
from fluxtrain.units import GIB, UNKNOWN, bytes_text, duration_text, rate_text

PROBE_LIMIT_S = 20.0
LAST_START_S = 15.0  # each measurement takes 5 s at most, but the bus, which is the first
MAX_AGE_S = 7 * 86_400.0
FORMAT = 1  # of the cache; a reader ignores another one

Report = Callable[[str], None]
Measurement = Callable[[], Mapping[str, Rate]]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The machine, the disk of the runs, and measured rates by name."""

    machine: Machine
    disk: Disk
    rates: dict[str, Rate] = field(default_factory=dict)
    measured_at_s: float  # Unix time of the rates
    measuring_s: float  # what that took
    from_cache: bool = False

    def rate(self, name: str) -> float | None:
        """Bytes (for a matmul: operations) a second, or None when that was not measured."""
        found = self.rates.get(name)
        return None if found is None else found.per_s

    @property
    def age_s(self) -> float:
        """How old the rates are."""
        return max(0.0, time.time() - self.measured_at_s)

    def to_json(self) -> str:
        """All of it, for programs."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def table(self) -> list[tuple[str, str, str]]:
        """(what, value, how it is known) for people."""
        return [*self._machine_rows(), *self._disk_rows(), *self._rate_rows()]

    def text(self) -> str:
        """The table in columns, and the age of the rates."""
        rows = self.table()
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        if self.from_cache:
            age = duration_text(self.age_s)
            lines.append(f"rates measured {age} ago in {duration_text(self.measuring_s)}")
        else:
            lines.append(f"rates measured now in {duration_text(self.measuring_s)}")
        return "\n".join(lines)

    def _machine_rows(self) -> list[tuple[str, str, str]]:
        machine, unknown = self.machine, self.machine.unknown
        quota = "" if machine.cpu_quota is None else f", quota {machine.cpu_quota:g}"
        limit = machine.memory_limit_bytes
        rows = [
            ("cores", str(machine.cores), f"{machine.cpu_name or UNKNOWN}{quota}"),
            ("instruction set", machine.instruction_set, ""),
            (
                "host memory",
                bytes_text(machine.memory_total_bytes),
                unknown.get("memory_total_bytes", "" if limit is None else "container limit"),
            ),
            ("host memory available", bytes_text(machine.memory_available_bytes), ""),
        ]
        for gpu in machine.gpus:
            others = gpu.other_processes or ()
            users = f"{len(others)} other programs use it, " if others else ""
            bus = f"PCIe {gpu.pcie_generation or UNKNOWN} x{gpu.pcie_width or UNKNOWN}"
            name = gpu.name or gpu.unknown.get("name", UNKNOWN)
            total = bytes_text(gpu.memory_total_bytes)
            rows.append((f"GPU {gpu.index}", total, f"{name}, {bus}, driver {machine.driver}"))
            free = bytes_text(gpu.memory_free_bytes)
            rows.append((f"GPU {gpu.index} free", free, users.removesuffix(", ")))
        if not machine.gpus:
            rows.append(("GPU", UNKNOWN, unknown.get("gpus", "none visible")))
        return rows

    def _disk_rows(self) -> list[tuple[str, str, str]]:
        kind = self.disk.file_system or self.disk.unknown.get("file_system", UNKNOWN)
        notes = [kind, self.disk.path]
        notes += ["takes host memory"] if self.disk.in_memory else []
        notes += ["over the network"] if self.disk.on_network else []
        return [("disk free", bytes_text(self.disk.free_bytes), ", ".join(notes))]

    def _rate_rows(self) -> list[tuple[str, str, str]]:
        rows = []
        for name, rate in self.rates.items():
            value = rate_text(rate.per_s)
            if name.endswith("matmul"):
                value = _operations_text(rate.per_s)
            rows.append((name.replace("_", " "), value, rate.how))
        return rows


def probe(run_dir: Path | str, fresh: bool = False, report: Report | None = None) -> Probe:
    """Facts and rates of this machine and of the disk that holds `run_dir`.

    `report` is told what is being measured. What does not fit in 20 s is left out and says so.
    """
    say = report or _say_nothing
    say("reading the machine")
    folder = _existing(Path(run_dir))
    machine, disk = read_machine(), read_disk(folder)
    place = _cache_path(machine, disk)
    cached = None if fresh else _cached(place)
    if cached is not None:
        return replace(cached, machine=machine, disk=disk, from_cache=True)
    start_s = time.monotonic()
    rates = _measure(_measurements(machine, folder), start_s + LAST_START_S, say)
    measured = Probe(
        machine=machine,
        disk=disk,
        rates=rates,
        measured_at_s=time.time(),
        measuring_s=time.monotonic() - start_s,
    )
    _keep(place, measured, say)
    return measured


def _measurements(machine: Machine, folder: Path) -> dict[str, tuple[tuple[str, ...], Measurement]]:
    """What to say, and the names and the function of each measurement, the most useful first."""
    found: dict[str, tuple[tuple[str, ...], Measurement]] = {}
    if machine.gpus:
        found["bus"] = (BUS_RATES, bus_rates)
        found["GPU arithmetic"] = (("gpu_matmul",), lambda: {"gpu_matmul": matmul_rate("cuda")})
    found["host memory"] = (("host_copy",), lambda: {"host_copy": host_copy_rate()})
    found["CPU arithmetic"] = (("cpu_matmul",), lambda: {"cpu_matmul": matmul_rate("cpu")})

    def disk() -> dict[str, Rate]:
        write, read = disk_rates(folder)
        return {"disk_write": write, "disk_read": read}

    found["disk"] = (("disk_write", "disk_read"), disk)
    return found


def _measure(
    measurements: Mapping[str, tuple[tuple[str, ...], Measurement]], end_s: float, say: Report
) -> dict[str, Rate]:
    rates: dict[str, Rate] = {}
    for what, (names, measurement) in measurements.items():
        if time.monotonic() > end_s:
            late = Rate(None, f"not measured: the {PROBE_LIMIT_S:g} s were used up")
            rates |= dict.fromkeys(names, late)
            continue
        say(f"measuring {what}")
        try:
            rates |= measurement()
        except (ImportError, RuntimeError, MemoryError) as error:  # no torch, or no memory for it
            why = str(error).partition("\n")[0] or type(error).__name__
            rates |= dict.fromkeys(names, Rate(None, f"not measured: {why}"))
    return rates


def _cached(place: Path) -> Probe | None:
    try:
        kept = msgspec.json.decode(place.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    from_the_future = kept.probe.measured_at_s > time.time() + 60  # the clock was set back
    usable = kept.format == FORMAT and not from_the_future and kept.probe.age_s < MAX_AGE_S
    return kept.probe if usable else None


class _Kept(msgspec.Struct, frozen=True):
    format: int
    probe: Probe


def _keep(place: Path, measured: Probe, say: Report) -> None:
    """A cache that cannot be written costs a new measurement next time, no more."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, _Kept(FORMAT, measured))
    except (OSError, FluxTrainError) as error:
        say(f"the rates are not kept: {error}")


def _cache_path(machine: Machine, disk: Disk) -> Path:
    """One file for each combination of host, CPU, memory, cards and disk."""
    memory = machine.memory_total_bytes
    facts = [
        os.uname().nodename,
        machine.cpu_name,
        machine.cores,
        None if memory is None else round(memory / GIB),  # a kernel update moves it by a little
        [(gpu.uuid, gpu.name) for gpu in machine.gpus],
        machine.driver,
        (disk.file_system, os.stat(disk.path).st_dev),
    ]
    digest = hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fluxtrain" / f"probe-{digest}.json"


def _existing(folder: Path) -> Path:
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())


def _operations_text(per_s: float | None) -> str:
    """Decimal, as processors are rated: 744 TFLOP/s."""
    if per_s is None:
        return UNKNOWN
    unit, scale = ("TFLOP/s", 1e12) if per_s >= 1e12 else ("GFLOP/s", 1e9)
    return f"{per_s / scale:.3g} {unit}"


def _say_nothing(_: str) -> None:
    pass
