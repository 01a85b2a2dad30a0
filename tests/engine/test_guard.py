"""What a machine cannot hold to the end is refused before anything is loaded, by plan and train."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fluxtrain.commands.preview import preview
from fluxtrain.config.schema import load_config
from fluxtrain.errors import EXIT_DOES_NOT_FIT, DoesNotFit
from fluxtrain.machine.disk import read_disk
from fluxtrain.machine.machine import read_machine
from fluxtrain.models import loading as models
from fluxtrain.train import run
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.placing import preflight
from fluxtrain.train.placing.preflight import disk_room
from fluxtrain.train.run import train
from fluxtrain.units import MIB

MakeConfig = Callable[..., Path]


def refused_by_both(path: Path, run_dir: Path) -> list[str]:
    """The words of the plan and of the run."""
    config = load_config(path)
    with pytest.raises(DoesNotFit) as planned:
        preview(config, run_dir=run_dir)
    with pytest.raises(DoesNotFit) as trained:
        train(config, locate(None, run_dir, config))
    assert planned.value.exit_code == trained.value.exit_code == EXIT_DOES_NOT_FIT
    return [str(planned.value), str(trained.value)]


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(models, "_weights", load)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_disk_too_small_for_the_checkpoints_is_refused_before_the_weights_are_read(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(folder: Path) -> Any:
        return replace(read_disk(folder), free_bytes=12 * MIB, in_memory=False)

    monkeypatch.setattr(preflight, "read_disk", small)
    path = run_config(train__keep_checkpoints=50, train__steps=1000)
    text, same = refused_by_both(path, tmp_path / "run")
    assert text == same
    assert "51 checkpoints" in text and "12.0 MiB is free" in text
    assert "train.keep_checkpoints=" in text and "--run-dir" in text
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_run_on_a_ram_disk_counts_its_files_as_host_memory(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ram(folder: Path) -> Any:
        return replace(read_disk(folder), file_system="tmpfs", in_memory=True, free_bytes=1 << 40)

    machine = replace(read_machine(), memory_available_bytes=12 * MIB)
    monkeypatch.setattr(preflight, "read_disk", ram)
    monkeypatch.setattr(run, "read_machine", lambda: machine)
    monkeypatch.setattr("fluxtrain.commands.preview._measured", lambda *_: (machine, {}))
    path = run_config(train__keep_checkpoints=50, train__steps=1000)
    for text in refused_by_both(path, tmp_path / "run"):
        assert "(tmpfs)" in text and "12.0 MiB is available" in text
        assert "choose a --run-dir on a disk, which fits" in text


def test_a_resumed_run_needs_no_room_for_what_it_has_already(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "shard").write_bytes(b"x" * 3000)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x" * 500)
    (tmp_path / "model" / "loop").symlink_to(tmp_path)
    room = disk_room(tmp_path)
    assert 3500 <= room.held_bytes < 4000
    assert room.free_bytes and room.free_bytes > 0
    assert disk_room(tmp_path / "not" / "there").held_bytes == 0


# --- a real small disk ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`small_disk(size)`: a folder with a file system of its own; skips where that is forbidden."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk-{size}"
        folder.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_small_disk_ends_the_command_with_3_and_one_line(
    run_config: MakeConfig, fluxtrain: Any, small_disk: Callable[[str], Path]
) -> None:
    run_dir = small_disk("2m") / "run"
    path = run_config()
    for command in ("plan", "train"):
        ended = fluxtrain(command, path, "--run-dir", run_dir)
        assert ended.returncode == EXIT_DOES_NOT_FIT, ended.stderr
        complaint = [line for line in ended.stderr.splitlines() if "error:" in line]
        assert len(complaint) == 1 and "does not fit its disk" in complaint[0]
        assert "2.00 MiB is free" in complaint[0] or "1.9" in complaint[0]
