"""`SharedMemory`: one file without a name, mapped by all ranks of a machine, and their counters.

The first rank makes the file and hands its descriptor to the others over a socket. Nothing of it is
in /dev/shm, whose size containers limit, and it ends with the last process that has it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time

from fluxtrain.core.ranks.join import Ranks, lost_text
from fluxtrain.errors import BadInput, RankLost
from fluxtrain.machine.fresh_memory import of_file, touch

_LOOK_S = 0.0002  # between two looks at the counters
_MISSED_S = 1.0  # between two looks whether the other ranks still live
_MEETING_S = 60.0
_PEER = "3i"  # process, user, group


class SharedMemory:
    """Memory that the ranks of one machine share, taken by all of them in one order."""

    def __init__(self, mates: Ranks) -> None:
        """Meet the `mates`, which are all ranks of this machine (`Ranks.of_machine`)."""
        self.mates, self._end = mates, 0
        self._file: int | None = _handed_over(mates)
        self._counts = memoryview(self.take(mmap.PAGESIZE)).cast("q")

    def take(self, size_bytes: int) -> mmap.mmap:
        """Return zeroed memory of the size, the same on each rank; all ranks ask at once."""
        assert self._file is not None, "closed"
        start = self._end
        self._end += -(-max(1, size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.mates.is_first:
            os.ftruncate(self._file, self._end)
            touch(of_file(self._file, self._end - start, start))
        self.meet()
        return of_file(self._file, self._end - start, start)

    def close(self) -> None:
        """Take no more; what was taken stays while it is used."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def meet(self) -> None:
        """Wait for all ranks of this machine to come here, too."""
        self.mates.most([0])

    def post(self, counter: int, count: int) -> None:
        """Let the others see how often this rank has done something, after what it wrote."""
        self._counts[counter * self.mates.world + self.mates.rank] = count

    def wait(self, counter: int, count: int) -> None:
        """Block until each rank has posted `count`. Raises RankLost where one has ended before."""
        first, looked_s = counter * self.mates.world, time.monotonic()
        while min(self._counts[first : first + self.mates.world]) < count:
            time.sleep(_LOOK_S)
            if time.monotonic() - looked_s > _MISSED_S:
                looked_s = time.monotonic()
                gone = self.mates.ended()
                if gone and min(self._counts[first : first + self.mates.world]) < count:
                    raise RankLost(lost_text(self.mates))


def _handed_over(mates: Ranks) -> int:
    """Return the descriptor of the file, which the first rank makes for all."""
    with socket.socket(socket.AF_UNIX) as meeting:
        meeting.settimeout(_MEETING_S)
        address = "\0" + mates.gather(secrets.token_hex(16))[0]
        if not mates.is_first:
            mates.most([0])
            meeting.connect(address)
            _, files, _, _ = socket.recv_fds(meeting, 1, 1, socket.MSG_CMSG_CLOEXEC)
            return files[0]
        try:
            file = os.memfd_create("fluxtrain")
        except OSError as error:  # a sandbox, or vm.memfd_noexec=2
            raise BadInput(
                "the processes of this machine cannot share memory (memfd_create: "
                f"{error.strerror}): allow it, or use parallel.params=shard"
            ) from error
        meeting.bind(address)
        meeting.listen(mates.world)
        mates.most([0])
        waiting = mates.world - 1
        while waiting:
            other, _ = meeting.accept()
            with other:
                told = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                if struct.unpack(_PEER, told)[1] == os.getuid():  # the address is no secret
                    socket.send_fds(other, [b"1"], [file])
                    waiting -= 1
        return file
