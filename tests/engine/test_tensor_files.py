"""Files of tensors, written by several threads, are what the library writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fluxtrain.models import tensor_files
from fluxtrain.models.tensor_files import DTYPE_NAMES, save_tensors


def test_every_dtype_and_shape_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "_PIECE_BYTES", 40)  # tensors of several pieces
    tensors = {
        f"{dtype}.{number}": torch.randint(0, 2, shape).to(dtype)
        for dtype in DTYPE_NAMES
        for number, shape in enumerate([(), (0, 3), (5, 7)])
    }
    save_tensors(tensors | {"turned": torch.randn(4, 9).T}, tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs")
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert ours.pop("turned").shape == (9, 4)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape
        assert ours[name].view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8))
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_disk_that_takes_bytes_in_parts_and_then_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.pwrite, 4000

    def some(file: int, data: memoryview, at: int) -> int:
        if at > room:
            raise OSError(errno.ENOSPC, "full")
        return real(file, data[:100], at)

    monkeypatch.setattr(tensor_files.os, "pwrite", some)
    save_tensors({"a": torch.arange(300)}, tmp_path / "small")
    assert load_file(tmp_path / "small")["a"].equal(torch.arange(300))
    with pytest.raises(OSError, match="full"):
        save_tensors({"a": torch.arange(3000)}, tmp_path / "large")


def test_a_thread_that_is_late_after_a_signal_writes_to_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[tuple[Any, Any]] = []

    def interrupted(work: Any, pieces: Any) -> None:
        left.append((work, next(pieces)))
        raise KeyboardInterrupt

    monkeypatch.setattr(tensor_files, "several_at_once", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_tensors({"a": torch.arange(9)}, tmp_path / "model")
    with (tmp_path / "other").open("xb") as other:  # gets the number of the closed file
        with pytest.raises(ValueError, match="closed file"):
            left[0][0](0, left[0][1])
        assert other.tell() == 0 and not (tmp_path / "other").stat().st_size
