"""Bad data through the command: exit code 2, one line with file and place, nothing lost."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib
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
ENGINE = Path(__file__).parents[2] / "engine"


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
    "bytes that are no UTF-8": (
        one("a.jsonl", GOOD + b'{"text": "caf\xe9"}\n'), "line 2 is not UTF-8"),
    "UTF-16": (one("a.jsonl", GOOD.decode().encode("utf-16")), "iconv -f UTF-16"),
    "a NUL in a line": (
        one("a.jsonl", GOOD + b'{"text": "a\0b"}\n'), "line 2 is binary: a NUL byte"),
    "nothing but nulls": (
        one("a.jsonl", lines({"messages": CHAT}, {"messages": [None]})), "message 1 is null"),
    "nulls within": (
        one("a.jsonl", lines({"messages": [CHAT[0], {"role": "assistant", "content": None}]})),
        "`content` is null or missing"),
    "a folder with nothing to read": (
        files(a__docx=b"x", README__md=b"x"), "no file that can be read"),
    "mixed shapes": (one("a.jsonl", lines({"text": "a"}, {"messages": CHAT})), "of another shape"),
    "one object with a list": (one("a.json", b'{"data": [{"text": "x"}]}'), "its keys: data"),
    "an array that is cut": (one("a.json", b'[{"text": "x"}, {"te'), "where the file ends"),
    "an unclosed quote": (one("a.csv", b'text\n"abc\n' + b"x\n" * 99), "a quote that is opened"),
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


def test_ids_that_occur_twice_are_told_and_do_not_stop_a_run(
    fluxtrain: Callable[..., subprocess.CompletedProcess[str]],
    run_config: RunConfig,
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(*({"text": f"the fox {i} jumps", "id": i % 9} for i in range(40))))
    config = run_config(data__path=str(path), data__sequence_length=16)
    done = fluxtrain("inspect", config)
    assert done.returncode == 0, done.stderr
    assert "repeated ids: 31 rows have the `id` of an earlier row of their file" in done.stdout


READ = """
import resource, sys
from fluxtrain.data.reading.corpus import Reading
from fluxtrain.data.reading.request import read_request
from fluxtrain.errors import BadInput
resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
try:
    list(Reading(read_request({"path": sys.argv[1], "max_bad_rows": int(sys.argv[2])}).corpus()))
except BadInput as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize("head", [b'{"text": "', b""])
def test_a_line_of_two_gigabytes_is_refused_or_left_out_within_400_megabytes(
    tmp_path: Path, head: bytes
) -> None:
    path = tmp_path / ("a.jsonl.gz" if head else "a.txt.gz")
    good = GOOD if head else b"a line of words\n"
    packer = zlib.compressobj(1, wbits=31)
    with path.open("wb") as file:
        file.write(packer.compress(good + head))
        for _ in range(2048):
            file.write(packer.compress(b"x" * (1 << 20)))
        file.write(packer.compress(b"\n" + good) + packer.flush())
    told = [
        subprocess.run(
            [sys.executable, "-c", READ, str(path), str(limit)],
            env={"PYTHONPATH": str(ENGINE)},
            capture_output=True,
            text=True,
            check=False,
        )
        for limit in (0, 1)
    ]
    assert "line 2 is longer than 64.0 MiB" in told[0].stderr
    assert told[1].returncode == (0 if head else 1), told[1].stderr
