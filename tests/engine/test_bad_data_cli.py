"""Bad data through the command: exit code 2, one line with file and place, nothing lost."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.cli import main

RunConfig = Callable[..., Path]
Plant = Callable[[Path], Path]

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
GOOD = b'{"text": "the fox jumps over the dog"}\n'
LFS = b"version https://git-lfs"
CUT_GZIP = gzip.compress(GOOD * 999, mtime=0)[:-20]


def lines(*records: Any) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def files(**named: bytes) -> Plant:
    """Write a folder of files."""

    def plant(folder: Path) -> Path:
        for name, data in named.items():
            (folder / name.replace("__", ".")).write_bytes(data)
        return folder

    return plant


def one(name: str, data: bytes) -> Plant:
    def plant(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return plant


BAD: dict[str, tuple[Plant, str]] = {
    "truncated gz": (one("a.jsonl.gz", CUT_GZIP), "is cut off in the middle"),
    "damaged gz": (one("a.jsonl.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\0" + b"\xff" * 40), "is damaged"),
    "a folder with nothing to read": (
        files(a__docx=b"x", README__md=b"x"), "no file that can be read"),
    "mixed shapes": (one("a.jsonl", lines({"text": "a"}, {"messages": CHAT})), "of another shape"),
    "a pointer in place of data": (one("a.parquet", LFS), "run `git lfs pull`"),
    "compared answers": (
        one("a.jsonl", lines({"prompt": "a", "chosen": "b", "rejected": "c"})), "preference row"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_data_is_refused_in_one_line_and_nothing_is_lost(
    run_config: RunConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))
    plant, expected = BAD[kind]
    folder = tmp_path / "data"
    folder.mkdir()
    path = plant(folder)
    before = {file: file.read_bytes() for file in folder.iterdir()}
    config = run_config(data__path=str(path), data__sequence_length=16)
    for verb in ("inspect", "plan"):
        with pytest.raises(SystemExit) as ended:
            main([verb, str(config)])
        said = capsys.readouterr().err
        told = [line for line in said.splitlines() if line.startswith("error: ")]
        assert ended.value.code == 2, said
        assert len(told) == 1 and expected in told[0] and "Traceback" not in said
        assert str(folder) in told[0]
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
