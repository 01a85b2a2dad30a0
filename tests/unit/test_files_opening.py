"""Files that somebody else may have made are opened only if they are regular and no links."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain.errors import BadInput
from fluxtrain.files.opening import (
    kind_of,
    leaves,
    open_plain,
    open_to_write,
    read_named,
    read_plain,
    refuse_foreign,
    refuse_odd,
)


def a_link(path: Path) -> None:
    path.with_name("precious").write_bytes(b"precious")
    path.symlink_to("precious")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.fspath(path))


ODD: dict[str, Callable[[Path], None]] = {
    "a symbolic link": a_link,
    "a named pipe": os.mkfifo,
    "a socket": a_socket,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", ODD)
def test_only_regular_files_are_opened_and_nothing_waits(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    ODD[kind](path)
    for opened in (
        lambda: open_plain(path),
        lambda: os.close(open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)),
        lambda: open_plain(path, follow=kind != "a symbolic link"),
    ):
        with pytest.raises(OSError):
            opened()
    assert kind_of(path) == ("a symbolic link" if path.is_symlink() else kind)
    if kind == "a symbolic link":
        assert read_plain(path, follow=True) == b"precious", "nothing was cut off"


# -- files that the user names ---------------------------------------------------------------------


def test_what_a_shell_gives_as_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "wb", buffering=0) as file:
        writer = threading.Timer(0.1, lambda: (file.write(b"late"), file.close()))
        writer.start()
        assert read_named(Path(f"/dev/fd/{reading}"), begun_s=0.05) == b"late"
        writer.join()
    (tmp_path / "file").write_bytes(b"plain")
    (tmp_path / "link").symlink_to("file")
    assert read_named(tmp_path / "link") == b"plain"
    assert read_named(Path(os.devnull)) == b""


@pytest.mark.parametrize("opened", [False, True])
def test_a_pipe_in_which_nothing_comes_is_given_up(tmp_path: Path, opened: bool) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR) if opened else None
    with pytest.raises(OSError, match=f"nothing came for {0.2 if opened else 0.1} s"):
        read_named(path, begun_s=0.1, silent_s=0.2)
    if held is not None:
        os.close(held)


# -- files found in folders ------------------------------------------------------------------------


def test_a_file_is_read_up_to_its_limit_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_plain(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes") as raised:
        read_plain(path, 4)
    assert raised.value.errno == errno.EOVERFLOW, "which is no full disk"
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError):
        read_plain(path)


def test_what_a_run_writes_may_be_missing_but_nothing_else(tmp_path: Path) -> None:
    file, folder = tmp_path / "run.json", tmp_path / "checkpoints"
    refuse_odd([file], [folder])
    file.write_text("{}")
    folder.mkdir()
    refuse_odd([file], [folder])
    with pytest.raises(BadInput, match="is a folder, and a run writes it itself"):
        refuse_odd([folder])
    with pytest.raises(BadInput, match="is a file, and a run writes it itself"):
        refuse_odd([], [file])
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(BadInput, match=f"is a symbolic link to {folder}"):
        refuse_odd([], [tmp_path / "link"])


# --- model folders --------------------------------------------------------------------------------


def test_links_of_a_model_stay_in_its_folder_or_lead_to_the_hubs_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1f0c"
    (snapshot / "original").mkdir(parents=True)
    (blobs := tmp_path / "models--a--b" / "blobs").mkdir()
    (blobs / "77aa").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/77aa")
    (snapshot / "original" / "model").symlink_to("../../../blobs/77aa")
    (snapshot / "again").symlink_to("model.safetensors")
    (snapshot / ".git").symlink_to("/dev")
    refuse_foreign(snapshot)
    (tmp_path / "named").symlink_to(snapshot)
    refuse_foreign(tmp_path / "named")


@pytest.mark.parametrize(
    "target",
    ["../../../precious", "/dev/zero", "../../blobs", "../../blobs/../../precious", "../other/x"],
)
@pytest.mark.parametrize("at", ["config.json", "inner/x"])
def test_links_that_lead_elsewhere_are_refused(tmp_path: Path, target: str, at: str) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1f0c"
    (snapshot / "inner").mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "precious").write_text("precious")
    deeper = at == "inner/x" and not target.startswith("/")
    (link := snapshot / at).symlink_to(f"../{target}" if deeper else target)
    assert leaves(link, snapshot) is not None
    with pytest.raises(BadInput, match="outside of the model's folder"):
        refuse_foreign(snapshot)
