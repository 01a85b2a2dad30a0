"""What the wizard says about model folders and data files, without loading either."""

from __future__ import annotations

import dataclasses
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import BadInput
from fluxtui.answers.answers import Answers
from fluxtui.answers.configuring import answers_from_config, configuration
from fluxtui.wizard.checks.answer_checks import check_data, check_model
from fluxtui.wizard.checks.data_facts import read_data_file
from fluxtui.wizard.checks.model_facts import cached_hub_folder, read_model_folder

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
}


def write_model(folder: Path, dtype: str = "BF16", **config: Any) -> Path:
    """A folder whose files have the right headers and sizes; the weights are zeros."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text("{}")
    width = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    header, end = {}, 0
    for layer in range(3):
        start, end = end, end + 16 * 16 * width
        header[f"layer.{layer}"] = {"dtype": dtype, "shape": [16, 16], "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
    return folder


def test_a_model_folder_is_described_from_its_headers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    facts = dict(read_model_folder(str(folder)).rows())
    assert facts["architecture"] == "Qwen2ForCausalLM"
    assert facts["parameters"] == str(3 * 16 * 16)
    assert facts["blocks"] == "3 of width 16"
    assert facts["weights"] == "bfloat16, 1.50 KiB"
    assert facts["context"] == "2,048 tokens"
    assert facts["license"] == "apache-2.0"


def test_the_language_part_of_a_composed_model_is_described(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", text_config={"num_hidden_layers": 7, "hidden_size": 9})
    assert dict(read_model_folder(str(folder)).rows())["blocks"] == "7 of width 9"


def test_fp16_weights_are_accepted_with_a_warning(tmp_path: Path) -> None:
    check = check_model(folder_answer(write_model(tmp_path / "m", dtype="F16")))
    assert check.error is None
    assert "bfloat16" in check.warnings[0]


def truncate(folder: Path) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])


def lose_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def lose_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def ask_for_code(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoModel": "x.Y"}}))


def quantise(folder: Path) -> None:
    quantised = {**CONFIG, "quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(quantised))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "cut off"),
        (lose_config, "config.json"),
        (break_config, "not JSON"),
        (lose_weights, "no weights"),
        (ask_for_code, "trust_remote_code"),
        (quantise, "gptq"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused_with_the_reason(
    damage: Any, said: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m")
    damage(folder)
    check = check_model(folder_answer(folder))
    assert check.error is not None
    assert said in check.error
    assert not check.open


def test_a_model_with_code_of_its_own_passes_when_the_file_trusts_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    ask_for_code(folder)
    base = {"model": {"trust_remote_code": True}}
    answers = Answers(model_source="folder", model_folder=str(folder), base=base)
    assert check_model(answers).error is None


def test_an_empty_answer_is_open_and_not_wrong() -> None:
    assert check_model(Answers(model_source="folder")).open
    assert check_model(Answers(model_source="hub")).open
    assert check_data(Answers(data_source="path")).open


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in (check_model(folder_answer(tmp_path / "no")).error or "")


def test_a_hub_model_that_is_here_is_described_and_one_that_is_not_is_fetched(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "models--owner--name" / "snapshots" / "abc")
    answers = Answers(model_source="hub", model_hub="owner/name")
    here = check_model(answers, {"HF_HUB_CACHE": str(tmp_path)})
    assert ("place", "already on this machine") in here.facts
    online = check_model(answers, {"HF_HUB_CACHE": str(tmp_path / "empty")})
    assert online.error is None
    offline = {"HF_HUB_CACHE": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "1"}
    assert "HF_HUB_OFFLINE" in (check_model(answers, offline).error or "")


def test_the_hub_cache_is_where_the_hub_library_keeps_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / ".cache/huggingface/hub/models--o--n/snapshots/1")
    assert cached_hub_folder("o/n", {"HOME": str(tmp_path)}) == folder
    moved = {"HF_HOME": str(tmp_path / ".cache/huggingface"), "HOME": "/nowhere"}
    assert cached_hub_folder("o/n", moved) == folder
    assert cached_hub_folder("o/other", moved) is None


def test_a_text_file_is_described_with_a_sample(tmp_path: Path) -> None:
    path = tmp_path / "tales.txt"
    path.write_text("Once upon a time.\n<|endoftext|>\nThe end.\n")
    facts = read_data_file(str(path))
    assert (facts.shape, facts.documents, facts.counted) == ("text", 2, True)
    assert facts.samples[0][0].text == "Once upon a time."
    assert facts.samples[0][0].trained


@pytest.mark.parametrize(
    "said",
    [
        {"settings": {"data.format": "plain"}, "base": {"data": {"format": "text"}}},
        {"overrides": ("data.format=plain",)},
        {"base": {"data": {"format": "text"}}, "overrides": ("data.format=plain",)},
    ],
    ids=["chosen", "--set", "--set after a file"],
)
def test_data_is_read_in_the_format_that_was_set(tmp_path: Path, said: Any) -> None:
    """A log of JSON objects, to be trained on as the text that it is."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"event": 1}\n' * 5)
    assert check_data(Answers(data_source="path", data_path=str(log))).error is not None
    check = check_data(Answers(data_source="path", data_path=str(log), **said))
    assert check.error is None and check.facts[0] == (
        "format",
        "texts (text), because data.format says so",
    )


def test_of_a_conversation_only_the_assistant_is_marked_as_trained_on(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("user", "Hello?"), ("assistant", "Yes.")]
    line = json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})
    path = tmp_path / "chat.jsonl"
    path.write_text(f"{line}\n" * 5)
    facts = read_data_file(str(path))
    assert (facts.shape, facts.documents) == ("messages", 5)
    assert len(facts.samples) == 3
    assert [piece.trained for piece in facts.samples[0]] == [False, False, True]
    assert [piece.text for piece in facts.samples[0]][1:] == ["user: Hello?", "assistant: Yes."]


def test_a_long_file_is_estimated_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i:06d}"}) + "\n" for i in range(20000)))
    facts = read_data_file(str(path), count_limit_s=0.0)
    assert not facts.counted
    assert 10_000 < facts.documents < 60_000, "the estimate is of the right size"
    assert dict(facts.rows())["documents"].startswith("about ")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.txt", b"\n \n", "empty"),
        ("binary.txt", b"a\0b", "binary"),
        ("latin.txt", "für".encode("latin-1"), "UTF-8"),
        ("bad.jsonl", b'{"text": "a"}\n{"te', "line 2"),
        ("noroles.jsonl", b'{"messages": [{"content": "a"}]}\n', "role"),
        ("other.jsonl", b'{"words": "a"}\n', "words"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_with_the_reason(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    check = check_data(Answers(data_source="path", data_path=str(path)))
    assert said in (check.error or "")


def test_a_data_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        read_data_file(str(tmp_path / "no.txt"))


def test_the_demo_shows_documents_of_the_kind_it_learns() -> None:
    samples = check_data(Answers()).samples
    assert len(samples) == 3
    assert all(len(sample[0].text) > 40 for sample in samples)


def test_looking_at_files_loads_neither_torch_nor_textual() -> None:
    code = (
        "import sys, fluxtui.wizard.checks.answer_checks, fluxtui.answers.launching\n"
        "import fluxtui.launch\n"
        "heavy = {'torch', 'transformers', 'textual', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def folder_answer(folder: Path) -> Answers:
    return Answers(model_source="folder", model_folder=str(folder))


def test_a_folder_is_described_with_what_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about it")
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "how", "completion": "so", "id": 1}\n' * 3)
    check = check_data(Answers(data_source="path", data_path=str(tmp_path)))
    facts = dict(check.facts)
    assert (facts["files"], facts["documents"]) == ("2", "6")
    assert facts["format"].startswith("prompts with completions (completion), because its name")
    assert check.warnings[0] == "keys that are left out: `id` (in 6 rows)"
    assert "files of the folder that are left out: 1" in check.warnings[1]


def test_a_list_of_sources_stands_in_the_field_and_goes_back_into_the_configuration(
    tmp_path: Path,
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n' * 4)
    sources = [str(tmp_path / "a.jsonl"), {"path": str(tmp_path / "b.jsonl"), "weight": 2.0}]
    answers = answers_from_config({"data": {"path": sources, "format": "text"}})
    assert answers.data_source == "path" and answers.data_path.startswith("[")
    assert answers.settings.get("data.format") == "text"
    assert configuration(answers)["data"] == {"path": sources, "format": "text"}
    check = check_data(answers)
    assert dict(check.facts)["files"] == "2" and check.error is None
    torn = dataclasses.replace(answers, data_path="[a.jsonl, {")
    assert "is no list: write [a.jsonl, " in (check_data(torn).error or "")
    odd = dataclasses.replace(answers, data_path="[[1], 2]")
    assert "data.path" in (check_data(odd).error or "")


def test_data_of_the_hub_may_name_configuration_and_split() -> None:
    good = Answers(data_source="hub", data_hub="owner/name?configuration=en&split=train")
    assert check_data(good).error is None


def test_tools_and_their_calls_stand_in_the_sample(tmp_path: Path) -> None:
    call = {"function": {"name": "weather", "arguments": "{}"}}
    turns = [{"role": "user", "content": "rain?"}, {"role": "assistant", "tool_calls": [call]}]
    row = {"messages": turns, "tools": [{"name": "weather"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    [sample] = check_data(Answers(data_source="path", data_path=str(tmp_path / "a.jsonl"))).samples
    assert [(piece.text, piece.trained) for piece in sample] == [
        ("tools: weather", False), ("user: rain?", False),
        ("assistant: (calls weather)", True),
    ]  # fmt: skip
