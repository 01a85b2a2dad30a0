"""The typed client: what it reads, what it refuses, and how it ends what it started."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
from typing import Any, ClassVar

import msgspec
import psutil
import pytest

from fluxtrain.events.answers.answers import Answer, DryRunAnswer, InspectionAnswer
from fluxtrain.events.answers.asking import EngineRefused, ask_engine, decoded, last_words
from fluxtrain.events.answers.machine import ProbeAnswer
from fluxtrain.events.answers.plan import PlanAnswer
from tests.tui import wizard_pilot

ANSWERS: tuple[tuple[type[Answer], dict[str, Any]], ...] = (
    (PlanAnswer, wizard_pilot.PLAN),
    (InspectionAnswer, wizard_pilot.INSPECTION),
    (DryRunAnswer, wizard_pilot.TRIAL),
    (ProbeAnswer, wizard_pilot.PROBE),
)


class Echo(Answer, frozen=True, kw_only=True):
    """An answer of a command that there is not."""

    COMMAND: ClassVar[str] = "echo"

    number: int


def printing(text: str) -> tuple[str, ...]:
    """A program that prints `text` whatever it is asked."""
    return (sys.executable, "-c", f"print({text!r})")


@pytest.mark.parametrize(("answer", "told"), ANSWERS)
def test_an_answer_that_was_written_is_read_as_the_same(
    answer: type[Answer], told: dict[str, Any]
) -> None:
    first = decoded(answer, json.dumps(told))
    assert decoded(answer, msgspec.json.encode(first)) == first


@pytest.mark.parametrize(("answer", "told"), ANSWERS)
def test_fields_of_a_newer_engine_are_ignored(answer: type[Answer], told: dict[str, Any]) -> None:
    newer = decoded(answer, json.dumps({**told, "added_later": [1]}))
    assert newer == decoded(answer, json.dumps(told))


@pytest.mark.parametrize(("answer", "told"), ANSWERS)
def test_a_field_that_is_missing_or_of_another_type_is_named(
    answer: type[Answer], told: dict[str, Any]
) -> None:
    name = next(iter(told))
    without = {key: value for key, value in told.items() if key != name}
    for text in (json.dumps(without), json.dumps({**told, name: [[]]})):
        with pytest.raises(EngineRefused, match=f"its answer cannot be understood: .*{name}"):
            decoded(answer, text)


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (b"", "exit code 3"),
        (b"warning: x\nerror: too big\n", "too big"),
        (b"this is a bug of FluxTrain: X\nrun it again with --debug\n", "a bug of FluxTrain: X"),
        (b"\xff last words \n\n", "last words"),
        (b"Fatal Python error: Aborted\n\n  File x\n", "native code ended the process (Aborted)"),
    ],
)
def test_the_last_words_of_the_engine_are_its_reason(errors: bytes, said: str) -> None:
    assert said in last_words(errors, 3)


async def test_the_engine_answers_or_is_refused_with_its_own_exit_code() -> None:
    assert await ask_engine(Echo, program=printing('{"number": 1}')) == Echo(number=1)
    for output in ("no json", "[1]"):
        with pytest.raises(EngineRefused):
            await ask_engine(Echo, program=printing(output))
    fails = "import sys; print('error: full', file=sys.stderr); sys.exit(5)"
    with pytest.raises(EngineRefused) as refused:
        await ask_engine(Echo, program=(sys.executable, "-c", fails))
    assert (str(refused.value), refused.value.exit_code) == ("full", 5)


async def test_the_engine_is_given_its_command_the_arguments_and_the_environment() -> None:
    script = (
        "import os, sys; print(*sys.argv[1:], os.environ['X'], file=sys.stderr); "
        "print('{\"number\": 2}')"
    )
    said: list[str] = []
    await ask_engine(
        Echo,
        "--set",
        "a=b",
        program=(sys.executable, "-c", script),
        said=said.append,
        environment={"X": "y"},
    )
    assert said == ["echo --json --set a=b y"]


async def asked_and_dropped() -> tuple[asyncio.Future[Any], int]:
    """A question to an engine that answers nothing, cancelled, and the engine's process."""
    script = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)"
    pids: list[int] = []
    asking = asyncio.ensure_future(
        ask_engine(
            Echo,
            program=(sys.executable, "-c", script),
            said=lambda line: pids.append(int(line)),
        )
    )
    while not pids:
        await asyncio.sleep(0.02)
    asking.cancel()
    return asking, pids[0]


async def test_a_question_that_is_dropped_ends_its_process() -> None:
    asking, pid = await asked_and_dropped()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_question_that_is_dropped_as_the_app_ends_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An app that ends cancels what it asked, and its loop whatever still ends: twice."""
    left: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", left.append)
    _, pid = asyncio.run(asked_and_dropped())
    gc.collect()
    assert [str(one.exc_value) for one in left] == []
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)
