"""Templates, tokenizers and configurations that fail or explode are refused in words."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fluxtrain.data.containers import lines as line_module
from fluxtrain.data.containers.lines import lines
from fluxtrain.data.containers.streams import Source
from fluxtrain.data.encoding.tokenizer import encoded
from fluxtrain.data.rendering.chat_template import ChatTemplate, TemplateRefused
from fluxtrain.errors import BadInput, Interrupted
from fluxtrain.models.model_files import MOST_LAYERS, refuse_impossible_sizes

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
]


def tokenizer(template: str | None = None, normalizer: Any = None) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalizer is not None:
        core.normalizer = normalizer
    made = PreTrainedTokenizerFast(tokenizer_object=core)
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    "template",
    ["{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
     "{{ 1 / 0 }}", "{{ x.y.z }}", "{% if %}", "{{ messages[9]['content'] + 1 }}"],
)  # fmt: skip
def test_a_template_that_fails_says_why(template: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(tokenizer(template)).render(TALK)


def test_a_stop_ends_a_template_that_never_ends() -> None:
    def stopped(*_: object) -> None:
        raise Interrupted("stopped")

    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    before = signal.signal(signal.SIGALRM, stopped)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Interrupted):
            ChatTemplate(tokenizer(endless)).render(TALK)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_tokenizer_that_fails_on_a_text_is_bad_input() -> None:
    endless = normalizers.Replace(Regex("(([a-z ])+.)+[A-Z]([a-z ])+$"), "y")
    with pytest.raises(BadInput, match="the tokenizer of the model failed"):
        encoded(tokenizer(normalizer=endless), ["a b " * 100])


@pytest.mark.parametrize(
    "key",
    ["num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_decoder_layers",
     "n_layers", "num_encoder_layers", "depth", "vision_depth", "num_kv_shared_layers"],
)  # fmt: skip
@pytest.mark.parametrize("within", [(), ("text_config",), ("a", "b", "c")])
def test_ten_million_layers_are_refused_by_whatever_word(key: str, within: tuple[str, ...]) -> None:
    for told in (10**7, 1e7):
        config: dict[str, Any] = {key: told}
        for name in within:
            config = {name: config}
        with pytest.raises(BadInput, match=rf"{key} = 10,000,000.*up to {MOST_LAYERS:,} layers"):
            refuse_impossible_sizes(config, "it")
    with pytest.raises(BadInput, match="layer_types = 10,000,000"):
        refuse_impossible_sizes({"layer_types": ["full_attention"] * 10**7}, "it")


@pytest.mark.parametrize(
    "config", [{"layer_norm_eps": 1e9}, {"num_hidden_layers": 4096}, {"layers_block_type": "x"},
               {"hidden_size": 10**5}, {"num_hidden_layers": None}],
)  # fmt: skip
def test_what_counts_no_layers_is_no_obstacle(config: dict[str, Any]) -> None:
    refuse_impossible_sizes(config, "it")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
)


@given(
    st.dictionaries(st.sampled_from(["vocab_size", "decoder_layers", "text_config", "x"]), values)
)
def test_no_configuration_makes_the_check_of_its_sizes_fail(config: dict[str, Any]) -> None:
    try:
        refuse_impossible_sizes(config, "it")
    except BadInput as error:
        assert "it says" in str(error)


# -- blank lines -----------------------------------------------------------------------------------


@given(parts=st.lists(st.sampled_from([b"\n", b"\r\n", b" \n", b"  a\n", b"b \n", b"\t"])))
def test_skipping_blank_lines_changes_no_other_line_and_no_number(
    parts: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "blank-lines.txt"
    path.write_bytes(b"".join(parts))

    def read(bound: int) -> list[tuple[int, str]]:
        with pytest.MonkeyPatch.context() as patched, Source(path) as source:
            patched.setattr(line_module, "BLANK_BYTES", bound)
            told = [line for line in lines(source) if isinstance(line, line_module.TextLine)]
        return [(line.number, line.text) for line in told if line.text.strip()]

    assert read(0) == read(1 << 30)
