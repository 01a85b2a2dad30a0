"""How many buffers of one size gradients pass through, on the device and on the host."""

from __future__ import annotations

LANES = 2  # compute streams of a card that neighbouring blocks have in turn
DISK_BLOCK_BYTES = 8 << 20  # read from a file at once
DISK_READERS = 4  # threads of a device that read files; two more blocks cross the bus meanwhile
DISK_RING_BYTES = (DISK_READERS + 2) * DISK_BLOCK_BYTES
RECORD_BYTES = 128 << 20  # of optimizer states on disk, read and written as a whole
RECORD_BUFFERS = 4  # one is updated, one is written, and two are read ahead
LOOKS_AHEAD = 16  # parts of the model, at most, for the next ones that are to be copied
LARGE_STAGING_BYTES = 128 << 20  # downloaded gradients are this large in few groups
LARGE_GRADIENT_BYTES = 512 << 20  # those on the host: only an embedding's or a head's


def staging_depth(gradient_bytes: int) -> int:
    """Return the number of device buffers of one size for gradients on their way out: one where
    they are large, and so in few groups."""
    return 1 if gradient_bytes >= LARGE_STAGING_BYTES else 2


def sum_depth(gradient_bytes: int, *, is_block: bool) -> int:
    """Return the number of device buffers of one size for sums of several backward passes, which
    pass through them both ways, in halves where gradients are bf16. A block has both halves at
    once, so none waits for the other to be downloaded."""
    return 2 if is_block else staging_depth(gradient_bytes)


def sums_at_once(processes: int) -> int:
    """Return the number of fp32 sums of groups that the device holds at once: of several processes
    a second one is computed while they add up the first."""
    return 1 if processes == 1 else 2


HOST_SUM_BUFFERS = 3  # of a process whose sums the host adds: one is filled while one is added


def ring_depth(gradient_bytes: int) -> int:
    """Return the number of host buffers of one size for gradients of a step in backward: one in
    transfer, one in use, one for jitter; one alone for the largest (embedding, head), which come
    singly."""
    return 1 if gradient_bytes >= LARGE_GRADIENT_BYTES else 3
