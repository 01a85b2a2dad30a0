"""What `fluxtrain generate` writes is what transformers alone writes, streamed or not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.models.generate.batch import write
from fluxtrain.models.generate.prompts import Prompting, UserPrompt
from fluxtrain.models.generate.sampling import Sampling
from fluxtrain.plan import states
from fluxtrain.results.generation_session import Batches, GenerationSession, measure
from fluxtrain.results.opened import OpenedModel
from tests.engine.conftest import VOCABULARY
from tests.engine.runs import run
from tests.engine.test_lora_run import settings
from tests.engine.used_models import greedy, opened, plain, plain_with_adapter, trained_adapter

Folder = Callable[..., Path]
PROMPTS = [[5, 90, 91, 92, 93, 17], [31, 32, 33], list(range(60, 80))]
GREEDY = Sampling(max_new_tokens=12, temperature=0)


def tokens_of(model: OpenedModel, prompts: list[list[int]], sampling: Sampling = GREEDY) -> Any:
    return [list(written.tokens) for written in write(model, prompts, sampling)]


@pytest.mark.parametrize("offload", ["max", "none"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.thinned(3)
def test_greedy_answers_are_those_of_transformers_alone(
    family: str, offload: str, model_folder: Folder
) -> None:
    folder = model_folder(family)
    with opened(folder, offload=offload) as model:
        assert ("streamed" in model.placed) == (offload == "max")
        found = tokens_of(model, PROMPTS)
        alone = tokens_of(model, PROMPTS[:1])
    assert found == greedy(plain(folder), PROMPTS, 12)
    assert alone == greedy(plain(folder), PROMPTS[:1], 12)
    assert all(found)


def test_logits_of_a_prompt_and_of_each_token_behind_it_are_equal_bit_for_bit(
    model_folder: Folder,
) -> None:
    folder = model_folder("llama", torch.bfloat16)
    ids, further = torch.tensor(PROMPTS[:1]), torch.tensor([[7]])

    def logits(model: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            first = model(input_ids=ids, use_cache=True)
            cache = first.past_key_values
            return [first.logits, model(input_ids=further, past_key_values=cache).logits]

    with opened(folder, offload="max") as model:
        ours = logits(model.model)
    assert all(torch.equal(a, b) for a, b in zip(ours, logits(plain(folder)), strict=True))


def test_no_pass_computes_the_prompt_again(model_folder: Folder) -> None:
    lengths: list[int] = []
    with opened(model_folder("llama"), offload="max") as model:
        block: nn.Module = model.model.model.layers[0].self_attn
        block.register_forward_pre_hook(
            lambda _, args, kwargs: lengths.append(kwargs["hidden_states"].shape[1]),
            with_kwargs=True,
        )
        write(model, PROMPTS[:1], GREEDY)
    assert lengths == [6, *[1] * 11]


def test_an_answer_ends_where_the_generation_settings_say(model_folder: Folder) -> None:
    folder = model_folder("llama")
    with opened(folder) as model:
        whole = tokens_of(model, PROMPTS)
        third = whole[0][2]
        model.model.generation_config.eos_token_id = [0, third]
        cut = write(model, PROMPTS, GREEDY)
    assert list(cut[0].tokens) == whole[0][: whole[0].index(third)]
    assert cut[0].ended == "end"
    for written, full in zip(cut[1:], whole[1:], strict=True):
        expected = full[: full.index(third)] if third in full else full
        assert list(written.tokens) == expected
        assert written.ended == ("end" if third in full else "length")


@pytest.mark.parametrize("storage", ["plain", "nf4-double", "int8"])
def test_base_and_adapter_write_what_they_write_in_peft(
    storage: Any, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    base = model_folder("llama")
    adapter = trained_adapter(base, tmp_path / "adapter", torch.bfloat16, storage)
    with opened(adapter, offload="max") as model:
        assert model.base == str(base)
        assert model.loaded.precision.dtype == "bfloat16"
        packed = sum(len(group.packed_segments) for group in model.engine.groups)
        assert bool(packed) == (storage != "plain")
        found = tokens_of(model, PROMPTS)
    expected = plain_with_adapter(base, adapter, torch.bfloat16, storage)
    assert found == greedy(expected, PROMPTS, 12)
    assert found != greedy(plain(base).to(torch.bfloat16), PROMPTS, 12)


def test_the_adapter_of_a_run_is_used_by_the_runs_name(
    run_config: Callable[..., Path], tmp_path: Path
) -> None:
    run(run_config(train__steps=1), tmp_path / "run", *settings({"name": "lora"}))
    adapter = tmp_path / "run" / "model"
    with opened(tmp_path / "run") as model, opened(adapter) as same:
        assert (model.name, model.base) == ("run", same.base)
        assert tokens_of(model, PROMPTS) == tokens_of(same, PROMPTS)
        assert model.tokenizer.chat_template


@pytest.mark.parametrize("family", ["mixtral", "mamba"])
def test_other_kinds_of_blocks_and_caches_write_the_same_when_they_stream(
    family: str, tiny: Callable[..., Any], tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    tiny(family, eos_token_id=0, pad_token_id=0, bos_token_id=None).save_pretrained(folder)
    with opened(folder, offload="max") as model:
        found = tokens_of(model, PROMPTS)
        assert (not any(measure(model).cache_bytes_per_token.values())) == (family == "mamba")
    alone = plain(folder)
    alone.config.output_router_logits = False  # with it transformers fails beside a cache
    assert found == greedy(alone, PROMPTS, 12)


def test_draws_repeat_with_their_seed_and_leave_the_random_state(model_folder: Folder) -> None:
    with opened(model_folder("llama")) as model:
        before = torch.get_rng_state()
        draws = [
            tokens_of(model, PROMPTS, Sampling(max_new_tokens=12, temperature=1.5, seed=seed))
            for seed in (3, 3, 4)
        ]
        assert torch.equal(before, torch.get_rng_state())
        near = Sampling(max_new_tokens=12, temperature=1.0, top_p=1e-6, seed=1)
        assert tokens_of(model, PROMPTS, near) == tokens_of(model, PROMPTS)
    assert draws[0] == draws[1] != draws[2]


# -- prompts ---------------------------------------------------------------------------------------


def test_a_conversation_is_written_with_the_models_template(model_folder: Folder) -> None:
    with opened(model_folder("llama")) as model:
        messages = [
            {"role": "user", "content": "what is two and two?"},
            {"role": "assistant", "content": "it is four"},
            {"role": "user", "content": "the fox"},
        ]
        tokenizer: Any = model.tokenizer
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        prompting = Prompting(model)
        assert prompting.tokens(UserPrompt(messages=messages)) == list(expected["input_ids"])
        one = [{"role": "user", "content": "the fox"}]
        asked = tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"]
        assert prompting.tokens(UserPrompt(text="the fox")) == list(asked)
        plainly = Prompting(model, plain=True).tokens(UserPrompt(text="the fox"))
        assert plainly == tokenizer("the fox")["input_ids"]
        tokenizer.chat_template = None
        assert Prompting(model).tokens(UserPrompt(text="the fox")) == plainly
        with pytest.raises(BadInput, match="is a conversation, and the model has none"):
            Prompting(model).tokens(UserPrompt(messages=one))
        with pytest.raises(BadInput, match="--system needs a chat template"):
            Prompting(model, system="be short")


def test_a_prompt_too_long_for_the_tokenizer_is_refused(model_folder: Folder) -> None:
    told = r"the prompt: it has 10,485,8.. characters.*: shorten"
    with opened(model_folder("llama")) as model, pytest.raises(BadInput, match=told):
        Prompting(model).tokens(UserPrompt(text="a " * (5 << 20)))


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(
    model_folder: Folder,
) -> None:
    with opened(model_folder("llama")) as model:
        with pytest.raises(BadInput, match="130 tokens and the model knows 128 .* by 3 tokens"):
            write(model, [[5] * 130], GREEDY)
        with pytest.raises(BadInput, match="the prompt is empty"):
            write(model, [[]], GREEDY)
        (last,) = write(model, [[5] * 125], GREEDY)
    assert (len(last.tokens), last.ended) == (3, "context")


def test_batches_answer_every_prompt_in_order_and_say_what_they_take(
    model_folder: Folder,
) -> None:
    folder = model_folder("llama")
    words = ["the quick brown fox", "a model", "what is two and two? it is", "over", "the lazy"]
    with opened(folder, offload="max") as model:
        session = GenerationSession.of(model, Prompting(model, plain=True), GREEDY)
        batches = Batches(session, [UserPrompt(text=text) for text in words], rows=2)
        expected = batches.expected()
        answers = list(batches.answers(lambda: False))
        ids = [model.tokenizer(text)["input_ids"] for text in words]
    assert (expected.batches, expected.batch_rows, expected.prompts) == (3, 2, 5)
    assert expected.at_most_s == pytest.approx(expected.pass_s * 3 * 12) and expected.pass_s > 0
    assert [answer.id for answer in answers] == ["1", "2", "3", "4", "5"]
    alone = plain(folder)
    decode = model.tokenizer.decode
    for first in (0, 2, 4):
        rows = greedy(alone, ids[first : first + 2], 12)
        assert [a.text for a in answers[first : first + 2]] == [decode(row) for row in rows]


def test_a_single_answer_is_told_as_it_comes_and_can_be_stopped(model_folder: Folder) -> None:
    pieces: list[str] = []
    with opened(model_folder("llama"), offload="max") as model:
        (whole,) = write(model, PROMPTS[:1], GREEDY, heard=pieces.append)
        assert "".join(pieces) == whole.text
        asked: list[int] = []

        def stopped() -> bool:
            asked.append(1)
            return len(asked) > 4

        (cut,) = write(model, PROMPTS[:1], GREEDY, stopped=stopped)
    assert cut.ended == "stopped"
    assert cut.tokens == whole.tokens[: len(cut.tokens)] and 0 < len(cut.tokens) < 12


def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_read(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the weights are read")

    import msgspec

    from fluxtrain.machine.machine import read_machine

    monkeypatch.setattr("fluxtrain.models.loading._weights", never)

    def free(size: int) -> None:
        small = msgspec.structs.replace(read_machine(), memory_available_bytes=size)
        monkeypatch.setattr("fluxtrain.results.opened.read_machine", lambda: small)
        monkeypatch.setattr("fluxtrain.core.wrap.target.available_bytes", lambda: size)

    free(100_000)
    folder = model_folder("llama")
    with pytest.raises(DoesNotFit, match="cannot be used here: .* 305 KiB"), opened(folder):
        pass
    free(50_000)
    with (
        pytest.raises(DoesNotFit, match="in another dtype than its files' makes copies of 7"),
        opened(folder, dtype="bf16"),
    ):
        pass


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_probabilities_are_those_of_the_model_and_their_texts_join(
    family: str,
    model_folder: Folder,
    tiny: Callable[..., Any],
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    if family == "llama":
        folder = model_folder(family)
    else:
        shutil.copytree(tokenizer_folder, folder)
        ends = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
        tiny(family, **ends, vocab_size=VOCABULARY).save_pretrained(folder)
    warm = Sampling(max_new_tokens=12, temperature=1.5, seed=3, logprobs=3)
    with opened(folder, offload="max") as model:
        answers = write(model, PROMPTS[:1], warm) + write(model, PROMPTS, warm)[1:]
        first = write(model, PROMPTS[:1], replace(warm, logprobs=None))
        assert first[0].tokens == answers[0].tokens and not first[0].logprobs
        names = model.tokenizer
    alone = plain(folder)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = alone(input_ids=torch.tensor([prompt + list(answer.tokens)])).logits[0]
        wanted = torch.log_softmax(logits.float(), dim=-1)[len(prompt) - 1 :]
        assert len(answer.logprobs) == len(answer.tokens) > 3
        for told, token, chances in zip(answer.logprobs, answer.tokens, wanted, strict=False):
            assert told.logprob == pytest.approx(float(chances[token]), abs=1e-4)
            best = chances.topk(3)
            assert [one.logprob for one in told.top] == pytest.approx(
                best.values.tolist(), abs=1e-4
            )
            assert told.top[0].text in (
                names.decode([int(best.indices[0])]),
                f" {names.decode([int(best.indices[0])])}",
            )
        whole = b"".join(bytes(one.bytes or ()) for one in answer.logprobs)
        assert whole.decode(errors="replace").strip("�") == answer.text.strip("�")
