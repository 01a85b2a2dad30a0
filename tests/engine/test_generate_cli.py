"""`fluxtrain generate` as it is typed, and as a program speaks to it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.cli import main
from fluxtrain.commands.generation import Chat, show_piece, stopped_by_interrupts
from fluxtrain.errors import BadInput
from fluxtrain.events.answers.asking import EngineRefused, Talk
from fluxtrain.events.answers.generation import (
    Answered,
    Ask,
    Event,
    Expected,
    Progress,
    Ready,
    Refused,
    Stop,
    Text,
    encoded,
    read_event,
)
from fluxtrain.models.generate.prompts import Prompting, read_prompts
from fluxtrain.models.generate.sampling import Sampling
from fluxtrain.results.generation_session import GenerationSession
from fluxtrain.results.serving import TOGETHER_S, Stopping, serve
from tests.engine.used_models import greedy, opened, plain

Folder = Callable[..., Path]
GREEDY = ("--max-new-tokens", 6, "--temperature", 0, "--device", "cpu")


class Typed:
    """The command with what is typed into it, and what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object, typed: str = "") -> tuple[int, str, str]:
        self._capsys.readouterr()
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        with pytest.raises(SystemExit) as caught:
            main([str(one) for one in arguments])
        said = self._capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, said.out, said.err


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Typed:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))
    return Typed(monkeypatch, capsys)


def expected_text(folder: Path, conversation: list[dict[str, str]], tokens: int = 6) -> str:
    """What transformers alone answers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    (row,) = greedy(plain(folder), [ids], tokens)
    return str(tokenizer.decode(row, skip_special_tokens=True))


# -- a chat ----------------------------------------------------------------------------------------


def test_a_chat_remembers_what_was_said_until_it_is_told_to_forget(
    model_folder: Folder, command: Typed
) -> None:
    folder = model_folder("qwen3")
    lines = "the fox\nover\n/new\nover\n/help\n\n/quit\nnobody hears this\n"
    code, out, err = command("generate", folder, *GREEDY, typed=lines)
    first = {"role": "user", "content": "the fox"}
    answer = expected_text(folder, [first])
    second = {"role": "user", "content": "over"}
    later = [first, {"role": "assistant", "content": answer}, second]
    expected = [answer, expected_text(folder, later), expected_text(folder, [second])]
    assert code == 0
    assert out == "".join(f"{text}\n" for text in expected)
    assert "a token takes" in err and "(measured)" in err and "answers end at <|endoftext|>" in err
    assert err.count("[6 tokens in") == 3 and "stopped at --max-new-tokens" in err
    assert "a new conversation" in err and err.count("Ctrl-D or /quit leaves") == 2


def test_text_is_continued_where_there_is_no_template(model_folder: Folder, command: Typed) -> None:
    folder = model_folder("llama")
    (folder / "chat_template.jinja").unlink()
    code, out, err = command("generate", folder, *GREEDY, typed="the fox\n")
    with opened(folder) as model:
        ids = model.tokenizer("the fox")["input_ids"]
        (row,) = greedy(plain(folder), [ids], 6)
        assert out == model.tokenizer.decode(row) + "\n"
    assert code == 0 and "no chat template: each line is continued" in err


def test_a_conversation_that_outgrows_the_context_says_so_and_goes_on(
    model_folder: Folder, command: Typed
) -> None:
    long = "the quick brown fox " * 40
    code, out, err = command("generate", model_folder("llama"), *GREEDY, typed=f"{long}\na\n")
    assert code == 0 and out.count("\n") >= 1
    assert "positions, of which an answer needs some: shorten it by" in err


def test_ctrl_c_stops_an_answer_and_the_next_one_is_written(model_folder: Folder) -> None:
    said: list[str] = []
    lines = iter(["the fox", "over"])
    pieces: list[str] = []

    def ask() -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    def show(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with opened(model_folder("qwen3")) as model, stopped_by_interrupts() as stopping:
        session = GenerationSession.of(
            model, Prompting(model), Sampling(max_new_tokens=60, temperature=0)
        )
        chat = Chat(session, ask, show, said.append, stopping)
        chat.run()
    assert "; stopped]" in said[0] and "[60 tokens" in said[1]
    assert int(said[0].split()[0][1:]) < 60
    assert chat._said[1]["role"] == "assistant" and len(chat._said) == 4


def test_what_an_answer_holds_does_not_reach_the_terminal_as_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_piece("a\x1b[2Jb\nc\x07")
    assert capsys.readouterr().out == "a�[2Jb\nc�"


# -- prompts of a file -----------------------------------------------------------------------------


def test_the_prompts_of_a_file_are_answered_in_their_order(
    model_folder: Folder, command: Typed, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    file = tmp_path / "prompts.jsonl"
    turn = {"role": "user", "content": "over"}
    file.write_text(f'"the fox"\n{{"prompt": "a model"}}\n\n{json.dumps({"messages": [turn]})}\n')
    arguments = ("generate", folder, "--prompts", file, "--rows", 1, *GREEDY)
    code, out, err = command(*arguments)
    words = ["the fox", "a model", "over"]
    texts = [expected_text(folder, [{"role": "user", "content": one}]) for one in words]
    assert code == 0
    assert out == "".join(f"> {w}\n{t}\n\n" for w, t in zip(words, texts, strict=True))
    assert "3 prompts in 3 batches of 1: " in err and "a token (measured)" in err
    code, out, err = command("generate", folder, "--prompt", "the fox", *GREEDY)
    assert (code, out) == (0, f"{texts[0]}\n")
    code, out, _ = command(*arguments, "--json")
    events = [read_event(line) for line in out.splitlines()]
    ready, expected, *answers = (one for one in events if not isinstance(one, Progress))
    assert isinstance(ready, Ready) and ready.has_template and ready.context == 128
    assert isinstance(expected, Expected) and (expected.prompts, expected.batches) == (3, 3)
    assert [one.text for one in answers if isinstance(one, Answered)] == texts
    assert [one.id for one in answers if isinstance(one, Answered)] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.txt", "\n \n", "holds no prompts: write one a line"),
        ("bad.jsonl", '"a"\n{nope\n', "line 2 is not JSON"),
        ("key.jsonl", '{"question": "a"}\n', "line 1 has no prompt: write a JSON string"),
        ("empty.jsonl", '"a"\n{"prompt": " "}\n', "line 2 is empty"),
        ("turns.jsonl", '{"messages": []}\n', "line 1 is a conversation without messages"),
        ("turn.jsonl", '{"messages": [{"role": "user"}]}\n', "each needs role and content"),
        ("number.jsonl", '{"messages": [{"role": "user", "content": 3}]}\n', "which is text"),
        ("null.jsonl", '{"messages": [{"role": "assistant", "content": null}]}\n', "which is text"),
        ("last.jsonl", '{"messages": [{"role": "user", "content": ""}]}\n', "line 1 is empty"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used_is_refused_by_its_line(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=words):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./nowhere"], "./nowhere does not exist: name a run"),
        (["MODEL", "--prompts", "nowhere.txt"], "nowhere.txt does not exist: check --prompts"),
        (["MODEL", "--rows", "2"], "--rows is of --prompts"),
        (["MODEL", "--prompt", " "], "--prompt is empty"),
        (["MODEL", "--temperature", "-1"], "temperature is -1.0: use 0"),
        (["MODEL", "--top-p", "0"], "top_p is 0.0: use more than 0"),
        (["MODEL", "--max-new-tokens", "0"], "max_new_tokens is 0: use at least 1"),
        (["MODEL", "--seed", "-3"], "seed is -3"),
        (["MODEL", "--dtype", "int4"], "--dtype is 'int4'"),
        (["MODEL", "--plain", "--system", "be short"], "--system needs a chat template"),
        (["MODEL", "--prompts", "LONG"], "line 2: the prompt has"),
    ],
)
def test_what_cannot_be_asked_ends_with_code_2_and_one_line(
    arguments: list[str], words: str, model_folder: Folder, command: Typed, tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text("a\n" + "the quick brown fox " * 40)
    given = {"MODEL": model_folder("llama"), "LONG": long}
    named = [given.get(one, one) for one in arguments]
    code, out, err = command("generate", *named, "--device", "cpu")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and out == ""
    assert len(errors) == 1 and words in errors[0] and "Traceback" not in err


# -- lines of JSON ---------------------------------------------------------------------------------


def test_asks_are_answered_as_lines_and_what_is_wrong_is_refused(
    model_folder: Folder, command: Typed
) -> None:
    folder = model_folder("llama")
    turn = {"role": "user", "content": "the fox"}
    lines = [
        encoded(Ask(id="a", messages=(turn,))).decode(),
        encoded(Ask(id="b", prompt="the fox", max_new_tokens=2)).decode(),
        encoded(Ask(id="c")).decode(),
        encoded(Ask(id="d", prompt="x " * 400)).decode(),
        encoded(Ask(id="e", prompt="x", temperature=-2)).decode(),
        "not json\n", '{"kind": "dance"}\n', "\n",
    ]  # fmt: skip
    code, out, _ = command("generate", folder, *GREEDY, "--json", typed="".join(lines))
    events = [read_event(line) for line in out.splitlines()]
    ready = next(one for one in events if not isinstance(one, Progress))
    assert (
        code == 0
        and isinstance(events[0], Progress)
        and isinstance(ready, Ready)
        and ready.pass_s > 0
    )
    answers = (one for one in events if isinstance(one, Answered))
    whole, short = sorted(answers, key=lambda one: one.id)  # the shorter one is whole first
    assert (whole.id, whole.text, whole.tokens) == ("a", expected_text(folder, [turn]), 6)
    assert (short.id, short.text, short.ended) == ("b", expected_text(folder, [turn], 2), "length")
    told = "".join(one.text for one in events if isinstance(one, Text) and one.id == "a")
    assert told == whole.text
    refused = {one.id: one.message for one in events if isinstance(one, Refused)}
    assert "either `messages` or `prompt`" in refused["c"]
    assert "the model knows 128 positions" in refused["d"] and "temperature is -2" in refused["e"]
    assert sum(isinstance(one, Refused) and not one.id for one in events) == 2


def test_a_stop_is_heard_while_an_answer_is_written(model_folder: Folder) -> None:
    events: list[Event] = []
    begun = threading.Event()

    def lines() -> Any:
        yield encoded(Ask(id="a", prompt="the fox"))
        begun.wait(60)
        yield encoded(Stop())
        yield encoded(Ask(id="b", prompt="the fox", max_new_tokens=3))

    def hear(told: Sequence[Event]) -> None:
        events.extend(told)
        if any(isinstance(event, Text) for event in told):
            begun.set()

    with opened(model_folder("qwen3")) as model:
        session = GenerationSession.of(
            model, Prompting(model), Sampling(max_new_tokens=100, temperature=0)
        )
        serve(session, lines(), hear, Stopping())
    first, second = (event for event in events if isinstance(event, Answered))
    assert (first.ended, first.id) == ("stopped", "a") and first.tokens < 100
    assert (second.ended, second.tokens) == ("length", 3)


def test_asks_that_keep_coming_do_not_hold_up_the_first(model_folder: Folder) -> None:
    begun, waited = threading.Event(), list[bool]()

    def lines() -> Any:
        yield encoded(Ask(id="a", prompt="the fox"))
        for _ in range(100):
            if begun.wait(TOGETHER_S / 4):
                break
            yield encoded(Stop(id="another"))
        waited.append(not begun.is_set())

    def hear(told: Sequence[Event]) -> None:
        if any(isinstance(event, Text) for event in told):
            begun.set()

    with opened(model_folder("qwen3")) as model:
        session = GenerationSession.of(model, Prompting(model), Sampling(max_new_tokens=9))
        serve(session, lines(), hear, Stopping())
    assert waited == [False]


def test_a_stop_reaches_an_ask_that_waits_and_none_that_comes_later(model_folder: Folder) -> None:
    events: list[Event] = []
    asks = [Ask(id=name, prompt="the fox", max_new_tokens=50) for name in "abc"]
    lines = [encoded(one) for one in (asks[0], asks[1], Stop(), asks[2])]
    with opened(model_folder("qwen3")) as model:
        session = GenerationSession.of(model, Prompting(model), Sampling(temperature=0))
        serve(session, lines, events.extend, Stopping())
    ended = {one.id: (one.ended, one.tokens) for one in events if isinstance(one, Answered)}
    assert ended["a"][0] == ended["b"][0] == "stopped"
    assert ended["b"][1] < 50 and ended["c"] == ("length", 50)


async def test_a_program_talks_with_a_model_without_torch(model_folder: Folder) -> None:
    folder = model_folder("llama")
    said: list[str] = []
    options = [str(one) for one in GREEDY]
    talk = await Talk.begin(str(folder), *options, said=said.append)
    answers = []
    async for event in talk.events():
        if isinstance(event, Ready):
            await talk.ask(Ask(id="1", prompt="the fox"))
        if isinstance(event, Answered):
            answers.append(event.text)
            await talk.stop()
            break
    await talk.close()
    assert answers == [expected_text(folder, [{"role": "user", "content": "the fox"}])]


async def test_a_program_hears_why_a_model_does_not_answer(tmp_path: Path) -> None:
    gone = await Talk.begin(str(tmp_path / "nowhere"))
    with pytest.raises(EngineRefused, match="nowhere does not exist") as refused:
        async for _ in gone.events():
            pass
    assert refused.value.exit_code == 2
    await gone.ask(Ask(prompt="anybody?"))
    await gone.close()
    words = (sys.executable, "-c", "print('hello')")
    other = await Talk.begin("x", program=words)
    with pytest.raises(EngineRefused, match="its answer cannot be understood"):
        async for _ in other.events():
            pass
    await other.close()


def test_a_model_that_is_not_there_is_told_before_torch_is_read() -> None:
    code = (
        "import sys; from fluxtrain.cli import main\n"
        "try: main(['generate', './nowhere'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "2 False\n", done.stderr
