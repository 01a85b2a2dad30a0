"""Weights in files: read in blocks past the page cache, checked, read again, or refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.core.device import disk
from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.device.disk import BLOCK_BYTES, WeightsFile, sums_of
from fluxtrain.errors import ReadFailed

TRAILER = b"x" * 32


def content(size: int, seed: int = 0) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=drawn, dtype=torch.uint8)


def written(path: Path, weights: Tensor) -> WeightsFile:
    path.write_bytes(weights.numpy().tobytes() + TRAILER)
    return WeightsFile(path, weights.nbytes, sums_of(weights))


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    opened = CpuDevice()
    yield opened
    opened.close()


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(disk, "set_direct", lambda _: False)
    return bool(request.param)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("sizes", [(1,), (4096, 3), (BLOCK_BYTES,), (9 * BLOCK_BYTES + 5, 70_001)])
def test_files_land_at_their_offsets_and_nothing_else_is_written(
    tmp_path: Path, device: CpuDevice, sizes: tuple[int, ...]
) -> None:
    parts, wanted, at = [], [content(100)], 100
    for number, size in enumerate(sizes):
        weights = content(size, number)
        parts.append((at, written(tmp_path / str(number), weights)))
        wanted.append(weights)
        at += size
    to = content(at)
    for _ in range(2):  # the ring goes on where it was
        transfer = device.upload_files(to, parts, None, [])
        transfer.wait_host()
        assert torch.equal(to, torch.cat(wanted))
        to[100:] = 0
    assert device.disk_read_bytes == 2 * sum(sizes)
    assert all(
        torch.equal(file.read_all(), one) for (_, file), one in zip(parts, wanted[1:], strict=True)
    )


def test_a_file_that_was_removed_or_replaced_is_read_on(tmp_path: Path, device: CpuDevice) -> None:
    weights = content(BLOCK_BYTES + 7)
    file = written(tmp_path / "w", weights)
    (tmp_path / "new").write_bytes(b"another program packs the same model")
    (tmp_path / "new").replace(tmp_path / "w")
    (tmp_path / "w").unlink()
    to = torch.zeros_like(weights)
    device.upload_files(to, [(0, file)], None, []).wait_host()
    assert torch.equal(to, weights)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(BLOCK_BYTES + 3)
        byte = file.read(1)[0]
        file.seek(BLOCK_BYTES + 3)
        file.write(bytes([byte ^ 16]))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize(
    ("damage", "says"),
    [(flip, "not the bytes that were written"), (lambda p: os.truncate(p, BLOCK_BYTES + 9), "cut")],
    ids=["bit", "cut"],
)
def test_what_stays_damaged_is_refused_by_name_with_the_cure_and_reading_goes_on(
    tmp_path: Path, device: CpuDevice, damage: Any, says: str
) -> None:
    weights = content(3 * BLOCK_BYTES)
    bad, good = written(tmp_path / "bad", weights), written(tmp_path / "good", weights)
    damage(tmp_path / "bad")
    to = torch.zeros_like(weights)
    transfer = device.upload_files(to, [(0, bad)], None, [])
    with pytest.raises(ReadFailed, match=says) as refused:
        transfer.wait_compute("disk")
    assert str(tmp_path / "bad") in str(refused.value) and "--resume auto" in str(refused.value)
    assert transfer.failed() and refused.value.exit_code == 8
    device.upload_files(to, [(0, good)], None, []).wait_host()
    assert torch.equal(to, weights)


@pytest.mark.parametrize("fails", ["error", "bit", "short"])
def test_a_read_that_failed_once_is_made_again_and_noted(
    tmp_path: Path, device: CpuDevice, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    weights = content(2 * BLOCK_BYTES)
    file = written(tmp_path / "w", weights)
    real, failed = os.preadv, []

    def preadv(fd: int, buffers: list[Any], offset: int) -> int:
        count = real(fd, buffers, offset)
        if offset == BLOCK_BYTES and not failed:
            failed.append(offset)
            if fails == "error":
                raise OSError(5, "Input/output error")
            if fails == "short":
                return 100
            buffers[0][77] ^= 1
        return count

    monkeypatch.setattr(disk.os, "preadv", preadv)
    to = torch.zeros_like(weights)
    device.upload_files(to, [(0, file)], None, []).wait_host()
    assert torch.equal(to, weights) and file.mended == [1]
    device.upload_files(to, [(0, file)], None, []).wait_host()
    assert file.mended == [1]


def test_reads_leave_nothing_in_the_page_cache(tmp_path: Path, device: CpuDevice) -> None:
    weights = content(2 * BLOCK_BYTES)
    file = written(tmp_path / "w", weights)
    if not file.is_direct:
        pytest.skip("this file system has no direct reads")
    with (tmp_path / "w").open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    device.upload_files(torch.zeros_like(weights), [(0, file)], None, []).wait_host()
    assert _cached_pages(tmp_path / "w") == 0


def _cached_pages(path: Path) -> int:
    """Count pages of a file in memory, by mincore(2)."""
    import ctypes
    import mmap

    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=2)
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
    return sum(one & 1 for one in found)
