"""Adapters in slots of one opened base: alone, together, swapped while others answer."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxtrain.events.answers.generation import (
    Answered,
    Ask,
    Event,
    Mount,
    Mounted,
    Refused,
    Stop,
    Text,
    Unmount,
    encoded,
)
from fluxtrain.models.generate.batch import write
from fluxtrain.models.generate.prompts import Prompting, UserPrompt
from fluxtrain.models.generate.sampling import Sampling
from fluxtrain.models.generate.writing import UntilStop
from fluxtrain.results.generation_session import GenerationSession
from fluxtrain.results.opened import OpenedModel
from fluxtrain.results.serving import Stopping, serve
from tests.engine.adapter_folders import make_adapter
from tests.engine.conftest import VOCABULARY
from tests.engine.used_models import opened

Folder = Callable[..., Path]
GREEDY = Sampling(max_new_tokens=12, temperature=0)
QUESTIONS = ("the fox", "a dog and the cat", "hello", "what is this to you and me")


@pytest.fixture
def base(model_folder: Folder) -> Path:
    return model_folder("llama", torch.float32)


@pytest.fixture
def adapters(base: Path, tmp_path: Path) -> dict[str, Path]:
    made: dict[str, dict[str, Any]] = {
        "four": {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 64},
        "eight": {"r": 8, "lora_alpha": 48},
        "sixteen": {"r": 16, "lora_alpha": 64, "use_rslora": True},
    }
    return {name: make_adapter(base, tmp_path / name, **more) for name, more in made.items()}


def session(model: OpenedModel) -> GenerationSession:
    return GenerationSession.of(model, Prompting(model), GREEDY)


def alone(named: Path, question: str, **settings: Any) -> str:
    with opened(named, **settings) as model:
        tokens = Prompting(model).tokens(UserPrompt(text=question))
        return write(model, [tokens], GREEDY)[0].text


class Talking:
    """Lines for `serve`, which come when the test says so, and what it answers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.when: Callable[[Event], None] = lambda _: None

    def say(self, *requests: Any) -> None:
        for one in requests:
            self._lines.put(None if one is None else encoded(one))

    def run(self, model: OpenedModel) -> None:
        serve(session(model), self._read(), self._hear, Stopping())

    def answers(self) -> dict[str, str]:
        return {one.id: one.text for one in self.events if isinstance(one, Answered)}

    def refusals(self) -> dict[str, str]:
        return {one.id: one.message for one in self.events if isinstance(one, Refused)}

    def _read(self) -> Iterator[bytes]:
        while (line := self._lines.get()) is not None:
            yield line

    def _hear(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events.append(event)
            self.when(event)


@pytest.mark.parametrize("packed", [None, "nf4-double"])
@pytest.mark.thinned(1)
def test_adapters_and_their_base_answer_together_as_each_alone(
    base: Path, adapters: dict[str, Path], packed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxtrain.plan.states.LEAST_PACKED", 512)
    names: list[str | None] = [*adapters, None]
    expected = {
        str(number): alone(adapters[name] if name else base, question, packed=packed)
        for number, (name, question) in enumerate(zip(names, QUESTIONS, strict=True))
        if name or packed is None
    }
    talk = Talking()
    talk.say(*(Mount(name=name, path=str(path)) for name, path in adapters.items()))
    asks = [
        Ask(id=str(number), prompt=question, adapter=name)
        for number, (name, question) in enumerate(zip(names, QUESTIONS, strict=True))
    ]
    talk.say(*asks[:2])

    def later(event: Event) -> None:  # two rows join when the others have begun
        if isinstance(event, Text) and len(asks) > 2:
            talk.say(asks.pop(), asks.pop(), None)

    talk.when = later
    settings = {"slots": 3, "slot_rank": 16, "offload": "max", "packed": packed}
    with opened(base, **settings) as model:
        assert model.slots is not None and model.slots.facts()["slot_bytes"] > 0
        is_packed = any(group.packed_segments for group in model.engine.groups)
        assert is_packed == (packed is not None)
        talk.run(model)
    assert len(set(expected.values())) > 2  # the adapters do change the answers
    assert talk.answers() | expected == talk.answers()
    told: dict[str, str] = {}
    for one in talk.events:
        if isinstance(one, Text):
            told[one.id] = told.get(one.id, "") + one.text
    assert told == talk.answers()


def test_a_slot_changes_its_adapter_while_others_answer(
    base: Path, adapters: dict[str, Path]
) -> None:
    talk = Talking()
    talk.say(Mount(name="four", path=str(adapters["four"])))
    talk.say(Mount(name="eight", path=str(adapters["eight"])))
    talk.say(Ask(id="long", prompt="the fox", adapter="eight", max_new_tokens=60))
    begun = []

    def later(event: Event) -> None:
        if isinstance(event, Text) and not begun:
            begun.append(event)
            talk.say(Mount(name="sixteen", path=str(adapters["sixteen"])))  # "four" leaves
            talk.say(Ask(id="new", prompt="a dog and the cat", adapter="sixteen"))
            talk.say(Ask(id="gone", prompt="hello", adapter="four"))
            talk.say(Ask(id="fills", prompt="hello", adapter="sixteen", max_new_tokens=30))
            talk.say(Mount(name="four", path=str(adapters["four"])))  # both slots answer
            talk.say(Unmount(name="eight"), Stop(id="new"), Stop(id="fills"))
        if isinstance(event, Answered) and event.id == "long":
            talk.say(Ask(id="again", prompt="a dog and the cat", adapter="sixteen"), None)

    talk.when = later
    with opened(base, slots=2, slot_rank=16) as model:
        talk.run(model)
    busy = next(one for one in talk.events if isinstance(one, Refused) and one.id == "four")
    assert busy.later and "--slots" in busy.message
    assert "not mounted" in talk.refusals()["gone"] and "answers now" in talk.refusals()["eight"]
    assert talk.answers()["again"] == alone(adapters["sixteen"], "a dog and the cat")
    assert talk.answers()["long"][:5] == alone(adapters["eight"], "the fox")[:5]
    swaps = [one.seconds for one in talk.events if isinstance(one, Mounted)]
    assert len(swaps) == 3 and max(swaps) < 0.5
    (stopped,) = (one for one in talk.events if isinstance(one, Answered) and one.id == "new")
    assert stopped.ended == "stopped"


def test_what_has_no_place_in_a_slot_is_refused_with_the_cure(
    base: Path, model_folder: Folder, adapters: dict[str, Path], tmp_path: Path
) -> None:
    other = make_adapter(model_folder("gpt2"), tmp_path / "other")
    dora = make_adapter(base, tmp_path / "dora", use_dora=True)
    heads = make_adapter(base, tmp_path / "heads", modules_to_save=["lm_head"])
    paths = {**adapters, "other": other, "dora": dora, "heads": heads, "none": tmp_path / "none"}
    talk = Talking()
    talk.say(*(Mount(name=name, path=str(path)) for name, path in paths.items()))
    talk.say(Ask(id="unknown", prompt="hello", adapter="unknown"))
    talk.say(Ask(id="known", prompt="hello", adapter="eight"), None)
    with opened(base, slots=1, slot_rank=8) as model:
        talk.run(model)
    refused = talk.refusals()
    assert set(refused) == {"sixteen", "other", "dora", "heads", "none", "unknown"}
    assert "--slot-rank 16" in refused["sixteen"] and "--merge" in refused["dora"]
    assert talk.answers() == {"known": alone(adapters["eight"], "hello")}


def test_a_model_whose_states_rows_cannot_leave_answers_one_after_the_other(
    tiny: Callable[..., Any], tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mamba"
    shutil.copytree(tokenizer_folder, folder)
    ends = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    tiny("mamba", **ends, vocab_size=VOCABULARY).save_pretrained(folder)
    talk = Talking()
    talk.say(*(Ask(id=question, prompt=question) for question in QUESTIONS[:2]))
    talk.say(Ask(id="stopped", prompt="hello"), Stop(id="stopped"), None)
    with opened(folder) as model:
        talk.run(model)
    stopped = next(one for one in talk.events if isinstance(one, Answered) and one.id == "stopped")
    assert stopped.ended == "stopped"
    for question in QUESTIONS[:2]:
        assert talk.answers()[question] == alone(folder, question)


@pytest.mark.parametrize("pieces", [("one two", " three"), tuple("one two three")])
def test_a_text_ends_before_a_stop_and_hands_out_nothing_of_it(pieces: tuple[str, ...]) -> None:
    told: list[str] = []
    until = UntilStop(("two", "zzz"), told.append)
    for piece in pieces:
        until.add(piece)
    until.end()
    assert ("".join(told), until.text, until.found) == ("one ", "one ", True)
