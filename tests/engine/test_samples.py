"""Samples of fixed prompts while a model trains: true to the model, and without a trace in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fluxtrain.errors import BadInput
from fluxtrain.events import events as ev
from fluxtrain.models.generate import batch
from tests.engine.runs import MakeConfig, of, run, weights

PROMPTS = ["the quick brown", "a model is trained block by block, and", "what"]


def sampled(events: list[Any]) -> list[ev.SampleGenerated]:
    """Those of the prompts; the one at the end of each run has no seconds."""
    return [event for event in of(ev.SampleGenerated, events) if event.seconds is not None]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt2", {}),  # with dropout, so that a random state that moved would show
        ("gpt2", {"train__max_grad_norm": None, "train__accumulation": 1}),
        ("llama", {"method__name": "lora", "method__rank": 4, "method__dropout": 0.2}),
    ],
)
def test_losses_and_weights_are_the_same_bits_with_samples_and_without(
    run_config: MakeConfig, model_folder: Callable[..., Path], tmp_path: Path, family: str,
    settings: dict[str, object],
) -> None:  # fmt: skip
    config = run_config(model__path=str(model_folder(family)), train__steps=4, **settings)
    without = run(config, tmp_path / "without")
    prompts = f"samples.prompts={json.dumps(PROMPTS)}"
    events = run(config, tmp_path / "with", prompts, "samples.every=1",
                 "samples.temperature=1.0", "samples.max_new_tokens=6")  # fmt: skip
    assert [e.step for e in sampled(events)] == [s for s in range(5) for _ in PROMPTS]
    assert len(sampled(without)) == 0
    told = [
        [(e.loss, e.grad_norm) for e in of(ev.StepFinished, found)] for found in (events, without)
    ]
    assert told[0] == told[1] and len(told[0]) == 4
    evaluated = [[e.loss for e in of(ev.EvaluationFinished, found)] for found in (events, without)]
    assert evaluated[0] == evaluated[1]
    one, other = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_answers_are_those_of_the_model_alone_and_come_with_each_evaluation(
    run_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(train__steps=4, train__learning_rate=0.02, placement__chunk_rows=2,
                        samples__prompts=PROMPTS, samples__max_new_tokens=8)  # fmt: skip
    found = sampled(run(config, tmp_path / "run"))
    assert [(e.step, e.number) for e in found] == [(s, n) for s in (0, 2, 4) for n in (1, 2, 3)]
    assert [e.prompt for e in found[:3]] == PROMPTS
    assert found[0].text != found[-3].text  # it was trained
    for folder, answers in (
        (tmp_path / "llama-float32", found[:3]),
        (tmp_path / "run" / "model", found[-3:]),
    ):
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        for answer in answers:
            ids = tokenizer(answer.prompt, return_tensors="pt").input_ids
            out = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
            new = out[0, ids.shape[1] :].tolist()
            ended = 0 in new
            new = new[: new.index(0)] if ended else new
            assert answer.text == tokenizer.decode(new, skip_special_tokens=True)
            assert (answer.tokens, answer.ended) == (len(new), "end" if ended else "length")
    said = capsys.readouterr().out
    assert 'sample 1 of 3 at step 2: "the quick brown" -> "' in said
    assert "sample 3 of 3 at step 4 in " in said


def test_a_prompt_is_a_users_words_where_conversations_are_trained_on(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = [{"role": "user", "content": "what is two and two?"},
            {"role": "assistant", "content": "it is four"}]  # fmt: skip
    data = tmp_path / "talks.jsonl"
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(60)))
    file = tmp_path / "prompts.jsonl"
    asked = [{"role": "system", "content": "a"}, {"role": "user", "content": "three?"}]
    file.write_text('"two?"\n\n' + json.dumps({"messages": asked}) + '\n{"prompt": "a dog"}\n')
    seen: list[list[int]] = []
    true_write = batch.write

    def watched(model: Any, prompts: Sequence[Sequence[int]], *rest: Any, **named: Any) -> Any:
        seen.extend(list(prompt) for prompt in prompts)
        return true_write(model, prompts, *rest, **named)

    monkeypatch.setattr("fluxtrain.train.samples.write", watched)
    config = run_config(train__steps=1, data__path=str(data), samples__prompts=str(file),
                        samples__max_new_tokens=2)  # fmt: skip
    found = sampled(run(config, tmp_path / "chat"))
    assert [e.prompt for e in found[:3]] == ["two?", "three?", "a dog"]
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "llama-float32")
    for tokens, messages in zip(seen, ([{"role": "user", "content": "two?"}], asked), strict=False):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                                 tokenize=False)  # fmt: skip
        assert tokenizer.decode(tokens) == expected
    seen.clear()
    run(config, tmp_path / "text", "samples.form=text", 'samples.prompts=["two?"]')
    assert tokenizer.decode(seen[0]) == "two?"


def test_a_round_that_does_not_fit_is_answered_in_smaller_batches(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    true_write = batch.write

    def tight(model: Any, prompts: Sequence[Sequence[int]], *rest: Any, **named: Any) -> Any:
        sizes.append(len(prompts))
        if len(prompts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return true_write(model, prompts, *rest, **named)

    monkeypatch.setattr("fluxtrain.train.samples.write", tight)
    config = run_config(train__steps=1, samples__prompts=PROMPTS, samples__max_new_tokens=2)
    events = run(config, tmp_path / "run")
    assert [e.number for e in sampled(events)] == [1, 2, 3] * 2
    assert sizes == [3, 2, 1, 1, 1, 1, 1, 1]  # and it stays with what fitted


class PanicException(BaseException):
    """What libraries in Rust raise."""


@pytest.mark.parametrize("kind", [AttributeError, PanicException])
def test_a_model_that_cannot_generate_is_trained_on(
    run_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise kind("'Odd' object has no attribute 'cache'")

    monkeypatch.setattr("fluxtrain.train.samples.write", broken)
    config = run_config(train__steps=4, samples__prompts=PROMPTS)
    events = run(config, tmp_path / "run")
    told = [e.text for e in of(ev.LogWritten, events) if "no more samples" in e.text]
    assert len(told) == 1 and "no attribute 'cache'" in told[0]
    assert events[-1].step == 4 and events[-1].exit_code == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["samples.prompts=nothing.txt"], "nothing.txt does not exist: check samples.prompts"),
        ([f'samples.prompts=["{"word " * 200}"]'], "the model knows 128 positions"),
        (["samples.prompts=[x, ' ']"], "prompt 2 of samples.prompts is empty"),
        (["samples.prompts=[x]", "samples.temperature=-1"], "samples.temperature = -1"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_before_training(
    run_config: MakeConfig, tmp_path: Path, overrides: list[str], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        run(run_config(), tmp_path / "run", *overrides)
