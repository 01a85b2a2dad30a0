"""A model as GGUF computes what it computed, by transformers' loader; what would not is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from fluxtrain.errors import BadInput, Disagrees, DoesNotFit
from fluxtrain.events.answers.answers import ExportAnswer
from fluxtrain.results.adapter.chosen_base import ExportRequest
from tests.engine.adapter_folders import make_adapter
from tests.engine.conftest import SENTENCES

gguf: Any = pytest.importorskip("gguf")
from fluxtrain.results.gguf import read_back  # noqa: E402
from fluxtrain.results.gguf.gguf_export import export_gguf  # noqa: E402
from fluxtrain.results.gguf.vocabulary import PATTERNS  # noqa: E402

LLAMA_CPP = os.environ.get("FLUXTRAIN_LLAMA_CPP", "")  # a Python that has it
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
WIDE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
# By name: the class of the configuration, settings of it, and the tokenizer.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3}, "llama-bpe"),
    "llama-biased": ("LlamaConfig", {"attention_bias": True}, "gpt-2"),
    "mistral": ("MistralConfig", {"sliding_window": 32}, "space"),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}, "qwen2"),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "rope_parameters": WIDE}, "qwen2"),
    "phi3": ("Phi3Config", {"sliding_window": 16}, "space"),
    "gemma2": ("Gemma2Config", GEMMA, "no-space"),
    "gemma3": (
        "Gemma3TextConfig",
        {**GEMMA, "rope_parameters": {"sliding_attention": LOCAL, "full_attention": WIDE}},
        "no-space",
    ),
}


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer: one of llama.cpp's patterns over bytes, or of characters."""
    if kind in PATTERNS:
        pattern = PATTERNS[kind]
        made = Tokenizer(models.BPE(ignore_merges=pattern.whole_words))
        of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt-2")
        split = pre_tokenizers.Split(Regex(pattern.regex), "isolated")
        steps = [of_bytes] if kind == "gpt-2" else [split, of_bytes]
        made.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else of_bytes
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False,
                             special_tokens=["<|end|>", "<|user|>"])  # fmt: skip
        made.train_from_iterator(SENTENCES, trainer)
        return PreTrainedTokenizerFast(
            tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>"
        )
    learnt = Tokenizer(models.BPE())
    learnt.normalizer = normalizers.Replace(" ", "▁")
    learnt.train_from_iterator(SENTENCES, BpeTrainer(vocab_size=90, show_progress=False))
    model = json.loads(learnt.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*first, *model["vocab"], *({"▁"} - set(model["vocab"]))]
    numbers = {text: number for number, text in enumerate(tokens)}
    merges = [tuple(pair) for pair in model["merges"]]
    made = Tokenizer(
        models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    before = [normalizers.Prepend("▁")] if kind == "space" else []
    made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens([AddedToken(name, normalized=False) for name in first[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def model_of(to: Path, family: str = "llama", **other: Any) -> Path:
    name, settings, tokens = FAMILIES[family]
    tokenizer = tokenizer_of(tokens)
    given = {
        "vocab_size": len(tokenizer) + 3, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": None,
        "eos_token_id": 0, "pad_token_id": 0, **settings, **other,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(getattr(transformers, name)(**given))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases of ones and zeros hide mistakes
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    return to


def text_of(folder: Path) -> str:
    (folder / "text.txt").write_text("\n\n".join(SENTENCES[:6]), encoding="utf-8")
    return str(folder / "text.txt")


def made(folder: Path, kind: str, **settings: Any) -> ExportAnswer:
    request = ExportRequest(
        named=str(folder), gguf=kind, data=text_of(folder.parent), device="cpu", **settings
    )
    return export_gguf(request, lambda _: None)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_read_back_with_its_weights_tokens_and_logits(
    family: str, tmp_path: Path
) -> None:
    answer = made(model_of(tmp_path / "model", family), "f32")
    assert answer.logits is not None
    assert answer.logits.largest < 1e-3 and answer.logits.top1 == 1.0
    assert [path.name for path in Path(answer.folder).iterdir()] == ["model-f32.gguf"]
    assert ("sliding window" in "".join(answer.notes)) == (family in ("mistral", "phi3"))


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA_CPP, reason="needs llama.cpp: make soak")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "most"), [("f32", 0.05), ("q8_0", 0.5)])  # its cache is of fp16
def test_llama_cpp_itself_computes_the_same(
    family: str, kind: str, most: float, tmp_path: Path
) -> None:
    folder = model_of(tmp_path / "model", family)
    answer = made(folder, kind, check=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = f"{SENTENCES[0]} 12345 don't naïve"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    told = subprocess.run(
        [LLAMA_CPP, str(Path(__file__).with_name("with_llama_cpp.py")), answer.folder],
        input=json.dumps({"text": text, "prompt": ids[:12]}),
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found = json.loads(told.stdout.splitlines()[-1])
    assert found["tokens"] == ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids[:12]])).logits
    expected = logits[0, -1].log_softmax(-1)
    for number, log_probability in found["top"]:
        assert abs(float(expected[number]) - log_probability) < most


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_each_type_is_as_near_as_its_bits_allow(kind: str, tmp_path: Path) -> None:
    answer = made(model_of(tmp_path / "model"), kind)
    assert answer.logits is not None and 0 < answer.logits.mean_kl <= answer.logits.kl_limit
    assert Path(answer.folder) == tmp_path / f"model-gguf-{kind}"


def test_an_adapter_is_merged_first(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", "qwen2")
    adapter = make_adapter(model, tmp_path / "adapter")
    answer = made(adapter, "f32")
    assert answer.changed > 0 and answer.layers is not None and answer.logits is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter", "adapter-gguf-f32", "model", "text.txt",
    ]  # fmt: skip


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
             "rotary embeddings are of the kind yarn"),
    "activation": ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
    "scale": ("gemma2", {"query_pre_attn_scalar": 64}, "attention is scaled by 64"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_computes_otherwise_names_its_converter(case: str, tmp_path: Path) -> None:
    family, settings, words = REFUSED[case]
    with pytest.raises(BadInput, match=f"{words}.*convert_hf_to_gguf.py"):
        made(model_of(tmp_path / "model", family, **settings), "q8_0")


def test_other_families_and_unknown_tokenizers_name_the_converter(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model")
    held = json.loads((folder / "tokenizer.json").read_text())
    held["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"
    (folder / "tokenizer.json").write_text(json.dumps(held))
    with pytest.raises(BadInput, match="none that FluxTrain knows.*convert_hf_to_gguf.py"):
        made(folder, "q8_0")
    other = transformers.GPTNeoXConfig(vocab_size=400, hidden_size=32, num_hidden_layers=1,
                                       num_attention_heads=2, intermediate_size=32)  # fmt: skip
    AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path / "neox")
    tokenizer_of("gpt-2").save_pretrained(tmp_path / "neox")
    with pytest.raises(BadInput, match="kind gpt_neox.*gemma2.*convert_hf_to_gguf.py"):
        made(tmp_path / "neox", "q8_0")


def test_a_file_that_computes_something_else_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_of(tmp_path / "model")
    monkeypatch.setattr(gguf, "quantize", lambda data, _: data[::-1].copy())
    with pytest.raises(Disagrees, match="of the file differs by .*nothing was written"):
        made(folder, "f32")
    assert not (tmp_path / "model-gguf-f32").exists()


def test_a_model_too_large_to_read_back_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_of(tmp_path / "model")
    monkeypatch.setattr(read_back, "memory_left", lambda: (1 << 30, 1000))
    with pytest.raises(DoesNotFit, match="--no-check"):
        made(folder, "q8_0")
    assert made(folder, "q8_0", check=False).logits is None


def test_without_the_package_the_cure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BadInput, match=r"pip install 'fluxtrain\[gguf\]'"):
        made(model_of(tmp_path / "model"), "q8_0")


def test_llama_quantize_makes_the_smaller_types_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, program = model_of(tmp_path / "model"), tmp_path / "bin" / "llama-quantize"
    with pytest.raises(BadInput, match="llama-quantize, which is not on the PATH"):
        made(folder, "Q4_K_M")
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$3" = Q6_K ] && cp "$1" "$2"\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    answer = made(folder, "q6_k")
    assert [path.name for path in Path(answer.folder).iterdir()] == ["model-q6_k.gguf"]
    with pytest.raises(BadInput, match="llama-quantize ended with code 1"):
        made(folder, "q2_k")
    with pytest.raises(BadInput, match="--gguf is 'q9': use one of f32"):
        made(folder, "q9")
