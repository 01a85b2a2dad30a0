"""Samples memory, traffic, residency and moves in a thread during the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import psutil

from fluxtrain.errors import FluxTrainError
from fluxtrain.events.answers.machine import TOGETHER
from fluxtrain.events.emitter import Announcer
from fluxtrain.events.events import (
    CardTraffic,
    Event,
    MemorySampled,
    MovesMade,
    TrafficSampled,
)
from fluxtrain.events.run_folder.run_dir import runs_root
from fluxtrain.measure.probe.probe import known_rates

if TYPE_CHECKING:
    from fluxtrain.methods.engine import TrainingEngine

LIVE_PERIOD_S = 0.1  # 10 Hz while an app watches
JOURNAL_PERIOD_S = 1.0  # samples that the journal keeps
_MOVES_A_FRAME = 24
_NOTHING = MemorySampled(  # before there is an engine
    device_total_bytes=None,
    device_used_bytes=None,
    device_peak_bytes=None,
    device_budget_bytes=None,
    device_by={},
    host_rss_bytes=None,
    host_peak_bytes=None,
    host_arena_bytes=0,
    host_pinned_bytes=0,
    host_limit_bytes=None,
)


class DiskUse(Protocol):
    """The bytes that a reader and writer of checkpoints moved so far."""

    read_bytes: int
    written_bytes: int


class GaugeThread:
    """Takes samples until `close`; the trainer's own threads never wait for it."""

    def __init__(
        self,
        announcer: Announcer,
        *,
        live: bool,
        host_limit_bytes: int | None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Start sampling; `look` is called with each sample."""
        self._look = look
        self._announcer = announcer
        self._period_s = LIVE_PERIOD_S if live else JOURNAL_PERIOD_S
        self._host_limit_bytes = host_limit_bytes
        self._process = psutil.Process()
        self._engine: TrainingEngine | None = None
        self._counted: list[dict[str, int]] = []  # at the last sample: of all, and of each card
        self._sampled_s = 0.0
        self._stopped = threading.Event()
        self._sampling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="gauges", daemon=True)
        self._disk: DiskUse | None = None
        self._ceilings: tuple[float | None, float | None] = (None, None)
        self._failed: set[str] = set()  # gauges whose failure was reported
        self.host_peak_bytes = 0

    def start(self) -> None:
        """Begin with heartbeats and host memory; the engine's gauges follow `watch`."""
        self._thread.start()

    def watch(self, engine: TrainingEngine, disk: DiskUse) -> None:
        """Sample the engine, now that it is built, and the counts of `disk`."""
        on_gpu = engine.device.torch_device.type == "cuda"
        ceilings = bus_ceilings(engine.card_count) if on_gpu else (None, None)
        with self._sampling:
            self._engine, self._disk, self._ceilings = engine, disk, ceilings
            self._sampled_s = time.monotonic()

    def close(self) -> None:
        """Take a last sample, so that a finished run's journal ends with true totals."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self.sample()

    def sample(self) -> None:
        """Sample every gauge once; skip one that cannot be read, and report that the first time."""
        with self._sampling:
            self._take("heartbeat", self._announcer.heartbeat)
            self._take("memory", self.memory)
            self._take("host memory", self._look)
            engine, disk = self._engine, self._disk
            if engine is None or disk is None:
                return
            self._take("traffic", lambda: self._traffic(engine, disk))
            self._take("residency", engine.residency)
            self._take("moves", lambda: _moves(engine))

    def _take(self, name: str, read: Callable[[], Event | None] | Callable[[], None]) -> None:
        try:
            event = read()
            if event is not None:
                self._announcer.gauge(event)
        except Exception as error:  # noqa: BLE001 - what watches a training must not end it
            self._tell(name, error)

    def _tell(self, name: str, error: Exception) -> None:
        """Report once for each gauge: one that fails ten times a second would fill the log."""
        if name in self._failed:
            return
        self._failed.add(name)
        with suppress(FluxTrainError):  # a full disk, which the training itself reports
            self._announcer.warn(
                f"a sample of {name} is left out: {type(error).__name__}: {error}; the training "
                "goes on, and if it fails again that is not told"
            )

    def memory(self) -> MemorySampled:
        """Sample where the bytes are now; works before there is an engine."""
        rss = int(self._process.memory_info().rss)
        self.host_peak_bytes = max(self.host_peak_bytes, rss)
        held = _NOTHING if self._engine is None else self._engine.memory()
        return msgspec.structs.replace(
            held,
            host_rss_bytes=rss,
            host_peak_bytes=self.host_peak_bytes,
            host_limit_bytes=self._host_limit_bytes,
        )

    def _traffic(self, engine: TrainingEngine, disk: DiskUse) -> TrafficSampled:
        """Count the bytes moved so far, with their rates since the last sample."""
        traffic, now_s = engine.traffic(), time.monotonic()
        window_s = max(now_s - self._sampled_s, 1e-9)
        moved = {
            "h2d_bytes": traffic.h2d_bytes,
            "d2h_bytes": traffic.d2h_bytes,
            "disk_read_bytes": disk.read_bytes + traffic.disk_read_bytes,
            "disk_written_bytes": disk.written_bytes + traffic.disk_written_bytes,
        }
        names = ("h2d_bytes", "d2h_bytes", "landed_bytes")
        counted = [moved, *(dict(zip(names, card, strict=True)) for card in traffic.cards)]
        before = self._counted or [{}] * len(counted)
        self._counted, self._sampled_s = counted, now_s
        whole, *cards = (
            {**now, **{f"{n}_per_s": (now[n] - earlier.get(n, 0)) / window_s for n in now}}
            for now, earlier in zip(counted, before, strict=True)
        )
        up, down = self._ceilings
        facts: dict[str, Any] = {**whole, "window_s": window_s}
        return TrafficSampled(
            **facts,
            h2d_ceiling_bytes_per_s=up,
            d2h_ceiling_bytes_per_s=down,
            h2d_frozen_bytes=traffic.h2d_frozen_bytes,
            h2d_packed_bytes=traffic.h2d_packed_bytes,
            cards=tuple(
                msgspec.convert({"number": number, **card}, CardTraffic)
                for number, card in enumerate(cards)
            ),
        )

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            self.sample()


def _moves(engine: TrainingEngine) -> MovesMade | None:
    moves, total = engine.take_moves(_MOVES_A_FRAME)
    return MovesMade(moves=tuple(moves), total=total) if moves else None


def bus_ceilings(cards: int = 1) -> tuple[float | None, float | None]:
    """Return the page-locked bytes a second to the GPU and back, as `fluxtrain probe` measured
    them on this machine; None if it has not. For several cards: the sum over all, while all copy.
    """
    found = known_rates(runs_root())
    names = ("h2d_pinned", "d2h_pinned") if cards == 1 else TOGETHER[:2]
    probed = sum(1 for name in found if name.endswith("h2d_pinned"))
    rates = found if cards in (1, probed) else {}
    up, down = (rates.get(name) for name in names)
    return up.per_s if up else None, down.per_s if down else None
