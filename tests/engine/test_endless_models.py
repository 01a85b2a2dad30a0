"""Templates, tokenizers and configurations that never end or explode are refused in words."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fluxtrain import bounded
from fluxtrain.data.containers import lines as line_module
from fluxtrain.data.containers.lines import lines
from fluxtrain.data.containers.streams import Source
from fluxtrain.data.containers.texts import texts
from fluxtrain.data.encoding.tokenizer import encoded
from fluxtrain.data.rendering import sandbox
from fluxtrain.data.rendering.chat_template import ChatTemplate, TemplateRefused
from fluxtrain.errors import BadInput
from fluxtrain.models.model_files import MOST_LAYERS, refuse_impossible_sizes
from tests.engine import forked

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


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "one text": "{{ 'x' * 100000000000 }}",
    "filled": "{{ 'a'.center(50000000000) }}",
    "formatted": "{{ '%90000000000d' % 1 }}",
    "doubled": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "replaced": "{% set a = 'a' * 1000000 %}{{ a|replace('a', a) }}",
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_is_refused_in_seconds_and_not_a_row_at_a_time(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "LIMIT_S", 0.5)
    monkeypatch.setattr(sandbox, "GROWTH_BYTES", 200 << 20)
    began_s = time.monotonic()
    with pytest.raises(BadInput, match=r"the chat template .*data\.chat_template") as refused:
        ChatTemplate(tokenizer(template)).render(TALK)
    assert not isinstance(refused.value, TemplateRefused), "it would be tried on every row"
    assert time.monotonic() - began_s < 15


@pytest.mark.parametrize(
    "template",
    ["{{ 10 ** (10 ** 9) }}", "{% set n = namespace(x=3) %}{% for i in range(60) %}"
     "{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
     "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
     "{{ 1 / 0 }}", "{{ x.y.z }}", "{% if %}", "{{ messages[9]['content'] + 1 }}"],
)  # fmt: skip
def test_a_template_that_fails_says_why(template: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(tokenizer(template)).render(TALK)


def test_the_bounds_change_no_text_and_leave_the_systems_limits() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    template = (
        "{{ 3 * 4 }} {{ 2 ** 5 }} {{ 'ab' * 3 }} {% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert ChatTemplate(tokenizer(template)).render(TALK) == "12 32 ababab qa"
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_normalizer_that_explodes_ends_the_process_with_words(tmp_path: Path) -> None:
    more = [normalizers.Replace("a", "a" * 1000)] * 5
    tokenizer(normalizer=normalizers.Sequence(more)).save_pretrained(tmp_path)
    script = (
        "import sys\nfrom fluxtrain import bounded\nbounded.GROWTH_BYTES = 300 << 20\n"
        "from transformers import AutoTokenizer\n"
        "from fluxtrain.data.encoding.tokenizer import encoded\n"
        "encoded(AutoTokenizer.from_pretrained(sys.argv[1]), ['a' * 100])"
    )
    done = forked.python("-c", script, tmp_path)
    assert done.returncode == 2, done.stderr
    assert "error: the tokenizer of the model took more than 300 MiB of memory" in done.stderr


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


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b"  \n"])
def test_fifty_megabytes_of_blank_lines_between_words_are_read_in_seconds(
    tmp_path: Path, blank: bytes
) -> None:
    path = tmp_path / "data.txt"
    count = (50 << 20) // len(blank)
    path.write_bytes(b"first\n" + blank * count + b"  last\n")
    began_s = time.monotonic()
    with Source(path) as source:
        found = list(texts(source))
    assert time.monotonic() - began_s < 10
    assert found[0].text.startswith("first\n")
    assert found[-1].text == "  last\n", "the white space before words is theirs"
    assert found[-1].origin.number == count + 2


@given(parts=st.lists(st.sampled_from([b"\n", b"\r\n", b" \n", b"  a\n", b"b \n", b"\t"])))
def test_skipping_blank_lines_changes_no_other_line_and_no_number(
    parts: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "blank-lines.txt"
    path.write_bytes(b"".join(parts))

    def read(bound: int) -> list[tuple[int, str]]:
        with pytest.MonkeyPatch.context() as patched, Source(path) as source:
            patched.setattr(line_module, "BLANK_BYTES", bound)
            told = [line for line in lines(source) if isinstance(line, line_module.Line)]
        return [(line.number, line.text) for line in told if line.text.strip()]

    assert read(0) == read(1 << 30)


def test_a_template_of_a_folder_that_never_ends_is_refused_by_the_command(tmp_path: Path) -> None:
    from fluxtrain.commands.inspection import inspect
    from fluxtrain.config.schema import config_of

    data = tmp_path / "chat.jsonl"
    data.write_text((json.dumps({"messages": TALK}) + "\n") * 50)
    template = tmp_path / "endless.jinja"
    template.write_text(ENDLESS["one text"])
    config = config_of([f"data.path={data}", f"data.chat_template={template}", "model.path=demo"])
    assert config is not None
    with pytest.raises(BadInput, match="the chat template of the model"):
        inspect(config)


@pytest.mark.slow
def test_a_text_of_forty_megabytes_ends_in_order_with_six_gigabytes_of_address_space(
    tmp_path: Path,
) -> None:
    import resource
    import subprocess
    import sys

    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"text":"' + b"abc " * 10_000_000 + b'"}\n')
    done = subprocess.run(
        [sys.executable, "-m", "fluxtrain", "inspect", "--demo", "--set", f"data.path={path}"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)),
        capture_output=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 2, 3), done.stderr
