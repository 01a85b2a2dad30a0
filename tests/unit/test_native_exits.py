"""A native library that ends the process leaves words, and no exit code that means a bug."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEGIN = """
import ctypes, os, sys, threading
from fluxtrain.bounded import tell_last_words_to
from fluxtrain.native_exits import tell_native_exits
tell_native_exits()
tell_native_exits()  # which changes nothing
tell_last_words_to(lambda refusal: print(f"recorded {refusal.exit_code}", flush=True))
"""
EXIT = "ctypes.CDLL(None).exit(1)"
HELD = "ctypes.PyDLL(None).exit(1)"  # with the interpreter held
REFUSED = "def no(*_): raise RuntimeError\nthreading.Thread.start = no\n"


def ended(program: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + program, *options], capture_output=True, text=True,
        check=False, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [EXIT, HELD, REFUSED + EXIT, f"one = threading.Thread(target=lambda: {EXIT})\none.start()\n"
     "one.join()", f"open('/dev/null').close()\nos.environ['A'] = 'b'\n{EXIT}"],
)  # fmt: skip
def test_an_exit_of_a_native_library_is_told_recorded_and_no_bug(program: str) -> None:
    found = ended(program)
    assert found.returncode == 3 and found.stdout == "recorded 3\n"
    assert found.stderr.startswith("error: a native library ended the process")


def test_what_is_held_while_it_ends_does_not_keep_it() -> None:
    found = ended(f"{REFUSED}import time\ntell_last_words_to(lambda _: time.sleep(60))\n{EXIT}")
    assert found.returncode != 1 and "a native library ended" in found.stderr


@pytest.mark.parametrize("code", [0, 1, 2])
@pytest.mark.parametrize("how", ["sys.exit({})", "os._exit({})", "raise SystemExit({})"])
def test_an_end_of_our_own_is_none_of_a_library(how: str, code: int) -> None:
    found = ended(how.format(code))
    assert (found.returncode, found.stdout, found.stderr) == (code, "", "")


def test_a_forked_process_ends_as_it_likes() -> None:
    found = ended(f"if not os.fork():\n {EXIT}\nprint(os.waitstatus_to_exitcode(os.wait()[1]))")
    assert (found.returncode, found.stdout, found.stderr) == (0, "1\n", "")


# -- signals ---------------------------------------------------------------------------------------


ABORT = "ctypes.CDLL(None).abort()"
SEGFAULT = "ctypes.string_at(8)"
BUS = """
import mmap, tempfile
with tempfile.TemporaryFile() as file:
    file.truncate(1 << 16)
    mapped = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
    print(mapped[5])
"""
IN_A_MODEL = "from fluxtrain.bounded import within\nwith within('its tokenizer', 0, 'copy it'):\n "


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        (ABORT, 3, "a native library ended the process"),
        ("ctypes.PyDLL(None).abort()", 3, "a native library ended the process"),
        (REFUSED + ABORT, 3, "a native library ended the process"),
        (SEGFAULT, 3, "a native library ended the process"),
        (BUS, 2, "a file that is mapped into memory cannot be read any more"),
        (IN_A_MODEL + ABORT, 2, "its tokenizer made a native library abort: copy it"),
        (f"one = threading.Thread(target=lambda: {ABORT})\none.start()\none.join()", 3, "native"),
    ],
)
def test_a_signal_of_a_native_library_is_told_and_recorded(
    program: str, code: int, words: str
) -> None:
    found = ended(program)
    assert found.returncode == code and found.stdout == f"recorded {code}\n"
    assert words in found.stderr and "Traceback" not in found.stderr


def test_a_forked_process_dies_of_its_own_signals() -> None:
    found = ended(f"if not os.fork():\n {ABORT}\nprint(os.waitstatus_to_exitcode(os.wait()[1]))")
    assert (found.returncode, found.stdout, found.stderr) == (0, "-6\n", "")


def test_to_find_faults_signals_stay_as_they_are() -> None:
    found = ended(ABORT, "--debug")
    assert (found.returncode, found.stdout) == (-6, "")
    found = ended(SEGFAULT, PYTHONFAULTHANDLER="1")
    assert found.returncode == -11 and "Segmentation fault" in found.stderr
