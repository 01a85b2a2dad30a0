"""What the app costs: CPU share at 4 Hz, key to paint, first paint, memory, bytes to the terminal.

    python bench/bench_tui.py [JOURNAL] [--seconds 20] [--json]

A recorded journal is replayed in real time in a pseudo-terminal of each size, in a process of its
own, and measured from outside: CPU time and resident memory from /proc, bytes and paint times from
the terminal's other end. The app's modules are compiled before, as an installation does; the first
paint is the median of several starts. The budgets are those of docs/extending.md.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).parent.parent
STARTS = 5
JOURNAL = HERE / "tests" / "tui" / "recorded" / "demo" / "events.ndjson"
SIZES = ((80, 24), (120, 40), (200, 60))
KEYS = b"4512361"
SCREEN_BYTES = 2000  # more than an update of a few lines, less than any whole screen
SKIPPED_S = 10.0  # of the recording, given at once: loading is not the steady state

APP = """
import sys
from pathlib import Path
from fluxtui.launch import show

def make():
    from fluxtui.app import FluxApp
    from fluxtui.sources.replay import ReplaySource
    return FluxApp(ReplaySource(Path(sys.argv[1]), from_s=float(sys.argv[2])))

show(make)
"""


@dataclass(frozen=True)
class Cost:
    """What one size costs."""

    width: int
    height: int
    first_paint_s: float
    cpu_share: float  # of one core, while nothing is pressed
    kib_per_s: float
    key_to_paint_p50_s: float
    key_to_paint_p95_s: float
    rss_mib: float


class Terminal:
    """The app in a pseudo-terminal that we hold the other end of."""

    def __init__(self, journal: Path, width: int, height: int) -> None:
        self._end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        for name in ("COLUMNS", "LINES"):  # they would outweigh the terminal's own size
            environment.pop(name, None)
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", APP, str(journal), str(SKIPPED_S)],
            stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(other)
        self.info = psutil.Process(self.process.pid)

    def read(self, wait_s: float) -> bytes:
        """What it draws within `wait_s`, or b""."""
        if not select.select([self._end], [], [], wait_s)[0]:
            return b""
        return os.read(self._end, 1 << 16)

    def drain(self, seconds: float) -> int:
        """Bytes drawn in the next `seconds`."""
        end_s, count = time.monotonic() + seconds, 0
        while (left_s := end_s - time.monotonic()) > 0:
            count += len(self.read(left_s))
        return count

    def first_paint_s(self) -> float:
        """Time from the start of the process until the dashboard's panels are there."""
        seen = b""
        while b"Blocks" not in seen:
            seen += self.read(1.0)
            if time.monotonic() - self.started_s > 20.0:
                raise SystemExit(f"no dashboard in 20 s; its last bytes: {seen[-300:]!r}")
        return time.monotonic() - self.started_s

    def key_to_paint_s(self, key: int) -> float:
        """Time from a key until the screen that it brings is drawn."""
        self.drain(0.3)
        pressed_s = time.monotonic()
        os.write(self._end, bytes([key]))
        count = 0
        while time.monotonic() - pressed_s < 5.0:
            count += len(self.read(0.05))
            if count > SCREEN_BYTES:
                return time.monotonic() - pressed_s
        raise SystemExit(f"no screen was drawn for the key {chr(key)!r}, {count} bytes")

    def close(self) -> None:
        """End the app; the terminal end goes with it."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError):  # EIO: nobody holds the other end any more
            while self.read(10.0):  # it has the terminal restored before it ends
                pass
        self.process.wait(10)
        os.close(self._end)


def measure(journal: Path, width: int, height: int, seconds: float) -> Cost:
    """One size: start a few times, watch the last one, press keys."""
    paints_s = []
    for _ in range(STARTS - 1):
        terminal = Terminal(journal, width, height)
        try:
            paints_s.append(terminal.first_paint_s())
        finally:
            terminal.close()
    terminal = Terminal(journal, width, height)
    try:
        paints_s.append(terminal.first_paint_s())
        terminal.drain(3.0)  # imports and the first full paints are not the steady state
        before, started_s = terminal.info.cpu_times(), time.monotonic()
        count = terminal.drain(seconds)
        after, spent_s = terminal.info.cpu_times(), time.monotonic() - started_s
        used_s = after.user + after.system - before.user - before.system
        waits = sorted(terminal.key_to_paint_s(key) for _ in range(3) for key in KEYS)
        rss_mib = terminal.info.memory_info().rss / (1 << 20)
    finally:
        terminal.close()
    return Cost(
        width, height, statistics.median(paints_s), used_s / spent_s, count / spent_s / 1024,
        waits[len(waits) // 2], waits[int(len(waits) * 0.95)], rss_mib,
    )  # fmt: skip


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("journal", nargs="?", type=Path, default=JOURNAL)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for package in ("fluxtui", "engine/fluxtrain"):
        compileall.compile_dir(HERE / package, quiet=1)
    costs = [measure(options.journal, *size, options.seconds) for size in SIZES]
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=1))
        return
    print("size     first paint  CPU share  KiB/s  key to paint p50  p95     resident")
    for cost in costs:
        size, p50_ms = f"{cost.width}x{cost.height}", cost.key_to_paint_p50_s * 1e3
        print(
            f"{size:<8} {cost.first_paint_s:9.2f} s {cost.cpu_share * 100:9.1f}%"
            f" {cost.kib_per_s:6.1f} {p50_ms:14.0f} ms {cost.key_to_paint_p95_s * 1e3:5.0f} ms"
            f" {cost.rss_mib:5.0f} MiB"
        )


if __name__ == "__main__":
    main()
