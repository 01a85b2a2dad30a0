"""What a model's folder brings to run ends, or is ended with words."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from fluxtrain import bounded
from fluxtrain.bounded import within
from fluxtrain.errors import EXIT_BAD_INPUT, BadInput


class PanicException(BaseException):
    """What they raise."""


def spin() -> None:
    while True:
        pass


def test_what_never_ends_is_refused_with_its_name_the_limit_and_the_cure() -> None:
    began_s = time.monotonic()
    said = r"the thing did not end within 0 s on 7 B .*: mend it"
    with pytest.raises(BadInput, match=said), within("the thing", 7, "mend it", limit_s=0.2):
        spin()
    assert time.monotonic() - began_s < 5


def test_code_that_catches_every_exception_is_ended_too() -> None:
    with pytest.raises(BadInput, match="did not end"), within("the thing", limit_s=0.2):
        try:
            spin()
        except Exception:  # noqa: BLE001 - as templates' helpers do
            pytest.fail("it was caught")


def test_what_takes_memory_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "GROWTH_BYTES", 64 << 20)
    held = []
    until_s = time.monotonic() + 60
    said = r"took more than 64\.0 MiB of memory"
    with pytest.raises(BadInput, match=said), within("the thing"):
        while time.monotonic() < until_s:
            held.append(bytearray(b"x") * (1 << 20))
            time.sleep(0.002)
    assert len(held) < 1000


def test_what_ends_in_time_is_left_alone_and_nothing_comes_afterwards() -> None:
    for _ in range(1000):
        with within("the thing", limit_s=0.06):
            pass
    until_s = time.monotonic() + 0.3
    while time.monotonic() < until_s:
        pass
    with pytest.raises(KeyError), within("the thing", limit_s=0.06):
        raise KeyError("its own")


def test_a_race_at_the_limit_gives_words_or_nothing_and_never_a_bare_exception() -> None:
    for spent_s in (0.15, 0.19, 0.2, 0.205, 0.21, 0.25):
        try:
            with within("the thing", limit_s=0.15):
                until_s = time.monotonic() + spent_s
                while time.monotonic() < until_s:
                    pass
        except BadInput as error:
            assert "did not end" in str(error)
        until_s = time.monotonic() + 0.1
        while time.monotonic() < until_s:
            pass


def test_a_panic_of_a_library_is_bad_input_with_its_words() -> None:
    said = "the thing failed .index out of range.: mend it"
    with pytest.raises(BadInput, match=said), within("the thing", cure="mend it"):
        raise PanicException("index out of range\nnote: more")


NATIVE = """
import sys, threading, time
from fluxtrain import bounded
bounded.GRACE_S = 0.3
bounded.tell_last_words_to(lambda refusal: print("told:", refusal, flush=True))
with bounded.within("the thing", cure="mend it", limit_s=0.2):
    {native}
"""


@pytest.mark.parametrize(
    "native", ["threading.Lock().acquire() and (x := threading.Lock()).acquire() and x.acquire()",
               "time.sleep(100)"],
)  # fmt: skip
def test_native_code_that_never_ends_ends_with_the_process_and_its_words(native: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NATIVE.format(native=native)], capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_BAD_INPUT
    assert done.stderr == "error: the thing did not end within 0 s: mend it\n"
    assert "told: the thing did not end" in done.stdout


def test_a_forked_process_has_a_watch_of_its_own() -> None:
    with within("the thing"):
        pass
    child = os.fork()
    if not child:
        try:
            with within("the thing", limit_s=0.2):
                spin()
        except BadInput:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
