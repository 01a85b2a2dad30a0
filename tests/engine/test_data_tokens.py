"""Tokens of texts and conversations, and the demo's tokenizer and corpus."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fluxtrain.data import demo
from fluxtrain.data.containers import texts
from fluxtrain.data.demo import CHAT_TEMPLATE, demo_files, docstrings
from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.reading.corpus import Reading
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.row import Message, Origin, Row, weights_of
from fluxtrain.data.store.tokens import Tokens, in_memory
from fluxtrain.errors import BadInput

ORIGIN = Origin("talk.jsonl", 3)
TALK: tuple[Message, ...] = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is two and two?"},
    {"role": "assistant", "content": "it is four"},
    {"role": "user", "content": "and three and three?"},
    {"role": "assistant", "content": "six"},
)
PLAIN_TEMPLATE = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
THINKING_TEMPLATE = PLAIN_TEMPLATE.replace(
    "{{ message['content'] + '<|im_end|>' }}{{ '\n' }}",
    "{% if loop.last %}<think></think>{% endif %}{{ message['content'] + '<|im_end|>' }}{{ '\n' }}",
)


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def tokenize(rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    return in_memory(Encoder(tokenizer).samples(rows))


def _trained(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> str:
    assert tokens.trained is not None
    return tokenizer.decode(tokens.ids[tokens.trained])


def _talk(*messages: Message) -> list[Row]:
    return [Row(origin=ORIGIN, messages=messages, weights=weights_of(messages))]


def test_texts_end_with_the_end_token_unless_they_go_on(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    texts = [("the fox", False), (" jumps", True), ("the dog" + "<|endoftext|>", True)]
    tokens = tokenize([Row(origin=ORIGIN, text=t, ends=c) for t, c in texts], tokenizer)
    assert tokens.ids.dtype == np.uint32
    assert tokens.trained is None
    parts = [tokens.ids[a:b] for a, b in zip(tokens.starts, tokens.starts[1:], strict=False)]
    assert [tokenizer.decode(part) for part in parts] == [
        "the fox", " jumps<|endoftext|>", "the dog<|endoftext|>",
    ]  # fmt: skip


def test_a_line_that_is_cut_gives_the_tokens_of_the_whole(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "line.txt"
    path.write_text("the quick brown fox, and 12 lazy dogs; " * 400)
    whole = tokenize(Reading(read_request({"path": str(path)}).corpus()), tokenizer)
    monkeypatch.setattr(texts, "SECTION_CHARACTERS", 500)
    cut = tokenize(Reading(read_request({"path": str(path)}).corpus()), tokenizer)
    assert whole.documents == 1 and cut.documents > 10
    assert np.array_equal(cut.ids, whole.ids)


def test_texts_are_encoded_in_batches_with_the_same_result(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [Row(origin=ORIGIN, text=f"the fox {i} jumps over {i * i} dogs") for i in range(50)]
    whole = tokenize(texts, tokenizer)
    monkeypatch.setattr("fluxtrain.data.encoding.encode.BATCH_CHARACTERS", 100)
    batched = tokenize(texts, tokenizer)
    assert (whole.ids == batched.ids).all()
    assert (whole.starts == batched.starts).all()


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE])
def test_only_the_assistants_words_and_its_end_of_turn_are_trained_on(
    tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    tokenizer.chat_template = template
    tokens = tokenize(_talk(*TALK), tokenizer)
    assert _trained(tokens, tokenizer) == "it is four<|im_end|>six<|im_end|>"
    everything = tokenizer.decode(tokens.ids)
    assert everything == tokenizer.apply_chat_template(list(TALK), tokenize=False)


def test_where_a_template_rewrites_earlier_turns_each_answer_is_trained_as_inference_sees_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = THINKING_TEMPLATE
    tokens = tokenize(_talk(*TALK), tokenizer)
    assert tokens.documents == 2 and tokens.rows.tolist() == [0, 0]
    assert _trained(tokens, tokenizer) == (
        "<think></think>six<|im_end|><think></think>it is four<|im_end|>"
    )
    first = tokenizer.decode(tokens.ids[tokens.starts[1] :])
    assert first == tokenizer.apply_chat_template(list(TALK[:3]), tokenize=False)


def test_a_tokenizer_without_a_template_is_refused_with_the_cure(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match=r"no chat template: set data.chat_template"):
        tokenize(_talk(*TALK), tokenizer)


@pytest.mark.parametrize("tag", ["", "{% generation %}{% endgeneration %}"])
def test_what_the_template_refuses_is_said_with_the_line(
    tokenizer: PreTrainedTokenizerBase, tag: str
) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system role here') }}" + tag
    with pytest.raises(BadInput, match="line 3: .*refuses this: no system role here"):
        tokenize(_talk(*TALK), tokenizer)


def test_a_conversation_whose_template_renders_no_assistant_is_refused(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}{% endfor %}{% generation %}{% endgeneration %}"
    )
    with pytest.raises(BadInput, match="line 3: none of it is trained on"):
        tokenize(_talk(*TALK), tokenizer)


def test_no_documents_and_no_tokens_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(BadInput, match="no documents"):
        tokenize([], tokenizer)
    with pytest.raises(BadInput, match="no tokens"):
        tokenize([Row(origin=ORIGIN, text="", ends=False)], tokenizer)


def test_docstrings_come_from_parsed_files_in_path_order_and_once(tmp_path: Path) -> None:
    long = "a docstring that is long enough to be kept as a document"
    (tmp_path / "b.py").write_text(f'"""{long} b."""\ndef f():\n    """{long} f."""\n')
    (tmp_path / "a.py").write_text(f'raise SystemExit("{long}")\nclass C:\n    """{long} b."""\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "short.py").write_text('"""Too short."""\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text(f'"""{long} t."""\n')
    assert list(docstrings(tmp_path)) == [f"{long} b.", f"{long} f."]


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache whose demo was made of the first docstrings only, to be quick."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "CORPUS_LIMIT_BYTES", 300_000)
        demo_files(cache)
    return cache


def test_the_demo_is_made_once_as_ordinary_files(
    small_demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(demo, "_corpus")  # a second making would need it
    files = demo_files(small_demo)
    corpus = read_request({"path": str(files.corpus)}).corpus()
    assert corpus.parts[0].shape == "text"
    assert sum(1 for _ in Reading(corpus)) == files.documents >= 1000
    assert [path.name for path in small_demo.iterdir()] == [files.tokenizer.name]


@pytest.mark.parametrize(("name", "kept_bytes"), [("tokenizer.json", 150), ("corpus.jsonl", 0)])
def test_a_demo_that_was_cut_short_is_made_again(
    small_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kept_bytes: int
) -> None:
    monkeypatch.setattr(demo, "CORPUS_LIMIT_BYTES", 300_000)
    whole = demo_files(small_demo).tokenizer
    damaged = tmp_path / whole.name
    shutil.copytree(whole, damaged)
    (damaged / name).write_bytes((whole / name).read_bytes()[:kept_bytes])
    assert demo_files(tmp_path).tokenizer == damaged
    assert (damaged / name).read_bytes() == (whole / name).read_bytes()


def test_the_demos_tokenizer_gives_back_what_it_encodes(small_demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_files(small_demo).tokenizer)
    assert len(tokenizer) == demo.VOCABULARY
    text = "Return the naïve value of x\n\n    >>> 1 + 1\n\t日本"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_python_without_its_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "docstrings", lambda: iter(["only one"]))
    with pytest.raises(BadInput, match="without the source of its library"):
        demo_files(tmp_path)
    assert list(tmp_path.iterdir()) == []
