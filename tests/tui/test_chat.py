"""The Chat screen: a conversation with a model in a process of its own, and an evaluation of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from fluxtrain.events.answers.generation import Answered, Ready, Refused, Text
from fluxtui.app import FluxApp
from fluxtui.chat.screen import ChatScreen, conversation, took, turn_lines
from fluxtui.chat.state import ChatState, Turn
from fluxtui.screens.panel_screen import PanelScreen
from fluxtui.screens.results import EvaluationDialog, ExportDialog
from fluxtui.widgets.spans import width_of

# Speaks the protocol of `fluxtrain generate --json`; what it was asked is kept beside it. An answer
# repeats the question word by word; one with "long" goes on until it is stopped.
MODEL = """
import json, os, pathlib, sys, threading, time
here = pathlib.Path(__file__).parent
(here / "pid").write_text(str(os.getpid()))
def say(**event):
    print(json.dumps(event), flush=True)
if "evaluate" in sys.argv:
    say(model="m", base=None, data="d.txt (held out)", loss=1.25, perplexity=3.49, tokens=2048,
        rows=16, sequence_length=128, batch_rows=4, dtype="bfloat16", device="cpu",
        placed="in memory", seconds=2.5, notes=["4 rows are cut"])
    sys.exit()
if "export" in sys.argv:
    (here / "exported").write_text(json.dumps(sys.argv[1:]))
    if (here / "refuse").exists():
        sys.exit("error: the disk is full")
    say(kind="merged", folder="/out", bytes=2048, files=6, base="m", dtype="bfloat16",
        onto="original", changed=4, layers=None, logits=None, quantisation=None, seconds=1.0,
        notes=[])
    sys.exit()
if (here / "refuse").exists():
    sys.exit("error: the model needs 80 GiB and 24 GiB is free: use --offload max")
say(kind="ready", model="m", base=None, has_template=not (here / "plain").exists(), context=64,
    ends=["</s>"], dtype="bfloat16", device="cpu", placed="in memory", pass_s=0.04,
    max_new_tokens=512)
stop = threading.Event()
asks = []
def read():
    for line in sys.stdin:
        (here / "asked").open("a").write(line)
        request = json.loads(line)
        stop.set() if request["kind"] == "stop" else asks.append(request)
    os._exit(0)
threading.Thread(target=read, daemon=True).start()
while True:
    while not asks:
        time.sleep(0.01)
    ask = asks.pop(0)
    stop.clear()
    words = ask["messages"][-1]["content"] if ask.get("messages") else ask["prompt"]
    if "refuse" in words:
        say(kind="refused", id=ask["id"], message="70 tokens are more than the model's 64")
        continue
    if "die" in words:
        sys.exit("this is a bug: it died")
    said = ""
    for word in ([f"w{n}" for n in range(10**6)] if "long" in words else words.split()):
        if stop.is_set():
            break
        said += word + " "
        say(kind="text", id=ask["id"], text=word + " ")
        time.sleep(0.02)
    say(kind="answer", id=ask["id"], text=said, ended="stopped" if stop.is_set() else "end",
        tokens=len(said.split()), prompt_tokens=3, seconds=0.5)
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    """A stand-in for the engine; the real one answers in the last tests."""
    (tmp_path / "model.py").write_text(MODEL)
    return (sys.executable, str(tmp_path / "model.py"))


@pytest.fixture
def finished(tmp_path: Path, made: ModuleType) -> Path:
    """A finished run with a model."""
    run = tmp_path / "runs" / "tales"
    events = made.finished()
    made.write(run / "events.ndjson", events)
    (run / "model").mkdir()
    (run / "result.json").write_text(json.dumps({"exit_code": 0, "message": "finished"}))
    return run


def asked(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]


def app_on(app_pilot: Any, made: ModuleType, run: Path, program: tuple[str, ...]) -> FluxApp:
    app: FluxApp = app_pilot.app_on(run, made)
    app.engine = program
    return app


# --- the value ------------------------------------------------------------------------------------


def ready(**changes: Any) -> Ready:
    facts: dict[str, Any] = {
        "model": "m", "base": None, "has_template": True, "context": 64, "ends": ("</s>",),
        "dtype": "bf16", "device": "cpu", "placed": "in memory", "pass_s": 0.04,
        "max_new_tokens": 512,
    }  # fmt: skip
    return Ready(**(facts | changes))


def answer(number: int, text: str, **changes: Any) -> Answered:
    facts: dict[str, Any] = {
        "id": str(number), "text": text, "ended": "end", "tokens": 2, "prompt_tokens": 1,
        "seconds": 0.5,
    }  # fmt: skip
    return Answered(**(facts | changes))


def test_a_question_carries_what_was_said_before_but_not_what_was_refused() -> None:
    state = ChatState().after(ready())
    state, first = state.asked("one?")
    assert first.messages == ({"role": "user", "content": "one?"},) and first.prompt is None
    state = state.after(Text(id="1", text="It ")).after(Text(id="1", text="is."))
    assert state.answering and state.turns[-1].answer == "It is."
    state = state.after(answer(1, "It is."))
    assert not state.answering
    state, _ = state.asked("two?")
    state, third = state.after(Refused(id="2", message="no")).asked("three?")
    said = [(one["role"], one["content"]) for one in third.messages or ()]
    assert said == [("user", "one?"), ("assistant", "It is."), ("user", "three?")]


def test_a_model_without_a_template_gets_the_text_alone() -> None:
    state = ChatState().after(ready(has_template=False))
    state, _ = state.asked("Once")
    _, ask = state.after(answer(1, " upon")).asked("Then")
    assert (ask.messages, ask.prompt) == (None, "Then")


def test_events_of_a_conversation_that_was_given_up_change_nothing() -> None:
    state, _ = ChatState().after(ready()).asked("one?")
    fresh = state.anew()
    assert fresh.after(Text(id="1", text="late")) == fresh
    again, _ = fresh.asked("new?")
    assert again.after(Text(id="9", text="late")) == again


def test_temperature_and_top_p_go_to_their_ends_and_into_the_next_question() -> None:
    state = ChatState().after(ready())
    for _ in range(20):
        state = state.warmer(1).wider(1)
    _, ask = state.asked("?")
    assert (ask.temperature, ask.top_p) == (2.0, 1.0)
    for _ in range(20):
        state = state.warmer(-1).wider(-1)
    _, ask = state.asked("?")
    assert (ask.temperature, ask.top_p) == (None, None), "the model's own"


def test_a_turn_keeps_its_width_and_says_what_it_took() -> None:
    turn = Turn("why " * 40, "so\n\nit is " * 30, ended="length", tokens=512, seconds=2.0)
    for width in (30, 80, 120):
        assert all(width_of(line) <= width for line in turn_lines(turn, width))
    assert took(turn) == "512 tokens in 2.00 s, 256 tokens/s; cut at the most tokens of an answer"
    text = "".join(t for line in conversation(ChatState(turns=(turn,)), 80) for t, _ in line)
    assert "\x1b" not in text


# --- in the app -----------------------------------------------------------------------------------


async def talking(pilot: Any, app: FluxApp, app_pilot: Any) -> ChatScreen:
    await pilot.press("C")
    await app_pilot.until(pilot, lambda: isinstance(app.screen, ChatScreen))
    await app_pilot.until(pilot, lambda: app.screen.state.ready or app.screen.state.problem)
    screen = app.screen
    assert isinstance(screen, ChatScreen)
    return screen


async def test_a_finished_run_says_where_its_model_is_and_talks(
    tmp_path: Path, finished: Path, program: tuple[str, ...], made: ModuleType, app_pilot: Any
) -> None:
    app = app_on(app_pilot, made, finished, program)
    async with app.run_test(size=(80, 24)) as pilot:
        await app_pilot.drawn(pilot)
        await app_pilot.until(
            pilot, lambda: "C chats with it" in " ".join(app_pilot.text_of(app).split())
        )
        assert "the model is in" in " ".join(app_pilot.text_of(app).split())
        screen = await talking(pilot, app, app_pilot)
        await app_pilot.until(pilot, lambda: "READY" in app_pilot.text_of(app))
        assert "a token takes 40 ms (measured), 512 tokens 20.5 s at most" in app_pilot.text_of(app)
        await pilot.press(*"Who?", "enter")
        await app_pilot.until(pilot, lambda: screen.state.turns and not screen.state.answering)
        await app_pilot.until(pilot, lambda: "1 token in 500 ms" in app_pilot.text_of(app))
        await pilot.press("f3", "f5", *"And q?", "enter")  # letters are no keys here
        await app_pilot.until(
            pilot, lambda: len(screen.state.turns) == 2 and not screen.state.answering
        )
        last = asked(tmp_path)[-1]
        assert (last["temperature"], last["top_p"]) == (0.0, 0.1)
        assert [one["content"] for one in last["messages"]] == ["Who?", "Who? ", "And q?"]
        pid = int((tmp_path / "pid").read_text())
        assert os.getsid(pid) == pid, "in a session of its own"
        await pilot.press("escape")
        await app_pilot.until(pilot, lambda: "again to leave" in str(app_pilot.notes(app)))
        assert app.screen is screen
        await pilot.press("escape")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, PanelScreen))
        await app_pilot.until(pilot, lambda: not psutil.pid_exists(pid))


async def test_escape_stops_an_answer_and_what_there_is_stays(
    tmp_path: Path, finished: Path, program: tuple[str, ...], made: ModuleType, app_pilot: Any
) -> None:
    app = app_on(app_pilot, made, finished, program)
    async with app.run_test(size=(100, 30)) as pilot:
        await app_pilot.drawn(pilot)
        screen = await talking(pilot, app, app_pilot)
        await pilot.press(*"a long one", "enter")
        await app_pilot.until(pilot, lambda: "w5" in app_pilot.text_of(app))
        assert "ANSWERING" in app_pilot.text_of(app) and "esc stop" in app_pilot.text_of(app)
        await pilot.press(*"next", "enter")
        assert len(screen.state.turns) == 1, "one answer at a time; what was typed stays"
        await pilot.press("escape")
        await app_pilot.until(pilot, lambda: not screen.state.answering)
        assert screen.state.turns[0].ended == "stopped" and "w5" in screen.state.turns[0].answer
        await app_pilot.until(pilot, lambda: "; stopped" in app_pilot.text_of(app))
        await pilot.press("enter")
        await app_pilot.until(pilot, lambda: len(screen.state.turns) == 2)
        await pilot.press("ctrl+n")
        assert screen.state.turns == ()


async def test_a_refusal_and_the_end_of_the_process_are_told(
    tmp_path: Path, finished: Path, program: tuple[str, ...], made: ModuleType, app_pilot: Any
) -> None:
    app = app_on(app_pilot, made, finished, program)
    async with app.run_test(size=(80, 24)) as pilot:
        await app_pilot.drawn(pilot)
        await talking(pilot, app, app_pilot)
        await pilot.press(*"refuse", "enter")
        await app_pilot.until(
            pilot, lambda: "✗ 70 tokens are more than the model's 64" in app_pilot.text_of(app)
        )
        await pilot.press(*"die", "enter")
        await app_pilot.until(pilot, lambda: "it died" in app_pilot.text_of(app))
        assert "ENDED" in app_pilot.text_of(app)
        await pilot.press(*"more", "enter")
        assert len(app.screen.state.turns) == 2


async def test_a_model_that_does_not_fit_says_so_with_the_cure(
    tmp_path: Path, finished: Path, program: tuple[str, ...], made: ModuleType, app_pilot: Any
) -> None:
    (tmp_path / "refuse").touch()
    app = app_on(app_pilot, made, finished, program)
    async with app.run_test(size=(80, 24)) as pilot:
        await app_pilot.drawn(pilot)
        await talking(pilot, app, app_pilot)
        await app_pilot.until(pilot, lambda: "use --offload max" in app_pilot.text_of(app))
        await pilot.press("escape")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, PanelScreen))


async def test_a_run_that_saved_no_model_is_not_talked_with(
    run: Path, made: ModuleType, app_pilot: Any
) -> None:
    app = app_pilot.app_on(run, made)
    async with app.run_test(size=(80, 24)) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("C", "V")
        await pilot.press("m")
        await app_pilot.until(pilot, lambda: len(app_pilot.notes(app)) == 3)
        assert all("has saved no model" in note for note in app_pilot.notes(app))
        (run / "checkpoints" / "step-00000040").mkdir(parents=True)
        await pilot.press("m")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, ExportDialog))
        await app_pilot.until(pilot, lambda: "Model   the weights of" in app_pilot.text_of(app))


async def test_a_finished_run_is_evaluated_and_its_numbers_are_shown(
    finished: Path, program: tuple[str, ...], made: ModuleType, app_pilot: Any
) -> None:
    app = app_on(app_pilot, made, finished, program)
    async with app.run_test(size=(80, 24)) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("V")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, EvaluationDialog))
        await app_pilot.until(pilot, lambda: "1.2500 nats a token" in app_pilot.text_of(app))
        for said in ("perplexity  3.490", "2,048 in 16 sequences", "4 rows are cut"):
            assert said in app_pilot.text_of(app)
        await pilot.press("escape")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, PanelScreen))


@pytest.mark.parametrize("start_screen", ["dashboard", "runs"])
async def test_a_model_is_merged_and_where_it_fails_it_can_be_tried_again(
    tmp_path: Path,
    finished: Path,
    program: tuple[str, ...],
    made: ModuleType,
    app_pilot: Any,
    start_screen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (finished / "merged").mkdir()
    journal = finished / "events.ndjson"
    journal.write_bytes(journal.read_bytes().replace(b'"method":"full"', b'"method":"lora"'))
    (tmp_path / "refuse").touch()
    app = app_pilot.app_on(finished, made, start_screen=start_screen)
    app.engine = program
    async with app.run_test(size=(80, 24)) as pilot:
        await app_pilot.drawn(pilot)
        if start_screen == "runs":
            await app_pilot.until(pilot, lambda: app.screen.selected)
        await pilot.press("m")
        await app_pilot.until(pilot, lambda: isinstance(app.screen, ExportDialog))
        monkeypatch.chdir(finished.parent)
        app.screen.action_pick(1)
        await app_pilot.until(pilot, lambda: "tales/adapter" in app_pilot.text_of(app))
        app.screen.action_pick(-1)
        await app_pilot.until(pilot, lambda: "tales/merged-2" in app_pilot.text_of(app))
        await pilot.press("enter")
        await app_pilot.until(pilot, lambda: "✗ the disk is full" in app_pilot.text_of(app))
        (tmp_path / "refuse").unlink()
        await pilot.press("enter")
        await app_pilot.until(pilot, lambda: "2.00 KiB in 6 files" in app_pilot.text_of(app))
        arguments = json.loads((tmp_path / "exported").read_text())
        assert arguments[2] == str(finished) and "--merge" in arguments
        assert arguments[-2:] == ["--to", "tales/merged-2"]
        await pilot.press("enter")
        await app_pilot.until(pilot, lambda: not isinstance(app.screen, ExportDialog))


@pytest.mark.slow  # serve/test_adapters.py asks the real engine in each run
async def test_the_real_engine_answers_on_the_screen(
    app_pilot: Any, made: ModuleType, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    app = app_pilot.app_on(run, made)
    async with app.run_test(size=(80, 24)) as pilot:
        await app_pilot.drawn(pilot)
        screen = ChatScreen("demo", "demo")
        app.push_screen(screen)
        await app_pilot.until(pilot, lambda: screen.state.ready or screen.state.problem)
        assert screen.state.problem == ""
        await pilot.press(*"Once", "enter")
        until: Callable[..., Any] = app_pilot.until
        await until(pilot, lambda: screen.state.turns and screen.state.turns[0].answer)
        await pilot.press("escape")
        await until(pilot, lambda: not screen.state.answering)
        turn = screen.state.turns[0]
        assert turn.refused == "" and turn.tokens > 0 and turn.seconds > 0
