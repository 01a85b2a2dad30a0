"""The live pipe: frames for the app that watches now; the trainer never waits for it."""

from __future__ import annotations

import contextlib
import fcntl
import os

from fluxtrain.errors import BadInput

PIPE_BYTES = 1 << 20
PENDING_FRAMES = 512  # 2 MiB at most: about a minute of events while a reader is stopped

F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)


def widen_pipe(descriptor: int) -> None:
    """Ask for a 1 MiB buffer; if the kernel refuses (user limit, no pipe), keep the default."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, F_SETPIPE_SZ, PIPE_BYTES)


class LivePipe:
    """The writing end. Not thread safe: the emitter holds its lock.

    A frame of at most PIPE_BUF bytes is written whole or not at all, so nothing is ever torn. While
    the pipe is full frames wait here, in order: one per kind of gauge (the latest) and a bounded
    number of others. Frames pushed out are counted in `dropped`; the journal has all lifecycle
    frames.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            os.set_blocking(descriptor, False)
        except OSError as error:
            raise BadInput(
                f"--live-fd {descriptor} is not an open descriptor ({error.strerror}): "
                "the app passes it; leave it out on the command line"
            ) from error
        os.set_inheritable(descriptor, False)
        widen_pipe(descriptor)
        self._descriptor: int | None = descriptor
        self._pending: dict[object, bytes] = {}  # in order; the key of a gauge is its type
        self.dropped = 0

    @property
    def is_open(self) -> bool:
        """Return False after the reader went away; frames are then no longer written."""
        return self._descriptor is not None

    def send(self, frame: bytes, gauge: type | None = None) -> None:
        """Write `frame` now or as soon as there is room; `gauge` is the kind that it replaces."""
        if self._descriptor is None:
            return
        if gauge is not None and self._pending.pop(gauge, None) is not None:
            self.dropped += 1
        self._pending[gauge or object()] = frame
        self.flush()
        if len(self._pending) > PENDING_FRAMES:
            del self._pending[next(iter(self._pending))]
            self.dropped += 1

    def flush(self) -> None:
        """Write waiting frames, oldest first, until the pipe is full or the reader is gone."""
        while self._pending and self._descriptor is not None:
            oldest = next(iter(self._pending))
            try:
                os.write(self._descriptor, self._pending[oldest])
            except BlockingIOError:
                return
            except OSError:  # EPIPE: the reader died, and the run goes on without it
                self.close()
                return
            del self._pending[oldest]

    def close(self) -> None:
        """Close the pipe; frames that still wait are counted as dropped."""
        self.dropped += len(self._pending)
        self._pending.clear()
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
