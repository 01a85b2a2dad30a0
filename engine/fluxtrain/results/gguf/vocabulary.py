"""Writes a tokenizer as llama.cpp reads it, and makes one of such a file to compare.

llama.cpp has two of the kinds that are written: `gpt2`, pairs of bytes merged in the order of a
list, behind a pattern that it knows by name; and `llama`, characters merged by the score of what
they make, as sentencepiece does. A tokenizer it would compute in another way is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerBase

from fluxtrain.errors import BadInput

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True)
class Pattern:
    """How text is cut before pairs are merged, by llama.cpp's name."""

    regex: str
    whole_words: bool = False  # a piece that is a token is taken without merging


PATTERNS = {
    "gpt-2": Pattern(_GPT2),
    "qwen2": Pattern(rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}"),
    "llama-bpe": Pattern(rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", True),
    "tekken": Pattern(
        rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        True,
    ),
}


class TokenType(IntEnum):
    """Kinds of tokens in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer as the file holds it."""

    model: str  # `gpt2` or `llama`
    pattern: str  # llama.cpp's name
    tokens: list[str]
    kinds: list[int]
    merges: list[str] = field(default_factory=list)  # of `gpt2`: two tokens and a space between
    scores: list[float] = field(default_factory=list)  # of `llama`
    space_before: bool = False  # of `llama`: a text begins with a space


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, rows: int) -> Vocabulary:
    """Read a tokenizer. rows: of the embedding; those without a token get one that is not used.

    Raises BadInput for a tokenizer that llama.cpp does not know.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unknown("it has no tokenizer.json")
    content = json.loads(backend.to_str())
    model = content["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix"):
        raise _unknown(f"its model is {model['type']}")
    tokens, kinds = _tokens(content, rows)
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    if model.get("byte_fallback"):
        return Vocabulary(
            model="llama", pattern="default", tokens=tokens, kinds=kinds,
            scores=_scores(tokens, merges), space_before=_space_before(content),
        )  # fmt: skip
    return Vocabulary(
        model="gpt2", pattern=_pattern(content), tokens=tokens, kinds=kinds,
        merges=[" ".join(pair) for pair in merges],
    )  # fmt: skip


def _unknown(why: str) -> BadInput:
    return BadInput(
        f"the model's tokenizer has no place in a GGUF file that is written here: {why}; convert "
        "the model with llama.cpp's own script, convert_hf_to_gguf.py"
    )


def _tokens(content: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    model = content["model"]
    named = {number: text for text, number in model["vocab"].items()}
    kinds = dict.fromkeys(named, TokenType.NORMAL)
    for number, text in named.items():
        if model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x"):
            kinds[number] = TokenType.BYTE
        elif text == model.get("unk_token"):
            kinds[number] = TokenType.UNKNOWN
    for token in content.get("added_tokens") or ():
        number, named[token["id"]] = token["id"], token["content"]
        if kinds.get(number) is not TokenType.UNKNOWN:
            kinds[number] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    if named and max(named) >= rows:
        raise _unknown(f"it has a token {max(named)}, and the embedding {rows:,} rows")
    return (
        [named.get(number, f"[PAD{number}]") for number in range(rows)],
        [int(kinds.get(number, TokenType.UNUSED)) for number in range(rows)],
    )


def _pattern(content: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the rule that cuts text into pieces of bytes."""
    normalizer = content.get("normalizer") or {"type": "NFC"}  # llama.cpp expects composed text
    if normalizer["type"] != "NFC":
        raise _unknown(f"it changes texts first ({normalizer['type']})")
    steps = content.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise _unknown(f"it cuts texts by {last.get('type') or 'nothing'}")
    first = steps[0].get("pattern", {}).get("Regex") if len(steps) == 2 else None
    regex = _GPT2 if len(steps) == 1 and last.get("use_regex", True) else first
    whole_words = bool(content["model"].get("ignore_merges"))
    for name, pattern in PATTERNS.items():
        if pattern == Pattern(regex or "", whole_words):
            return name
    raise _unknown(f"its pattern is none that FluxTrain knows by llama.cpp's name: {regex}")


def _space_before(content: Mapping[str, Any]) -> bool:
    """Return whether a text begins with a space that it does not have."""
    told = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    if '"Metaspace"' in told:
        return '"never"' not in told
    return '"Prepend"' in told


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Score tokens so that the first merges score highest."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [float(-ranks.get(text, len(merges))) for text in tokens]


def rebuilt(read: Vocabulary) -> FastTokenizer:
    """Make a tokenizer of a file's vocabulary that computes what llama.cpp does."""
    numbers = {text: number for number, text in enumerate(read.tokens)}
    if read.model == "gpt2":
        pattern = PATTERNS[read.pattern]
        ordered = (pair.split(" ", 1) for pair in read.merges)
        pairs = [(first, second) for first, second in ordered]
        made = FastTokenizer(models.BPE(numbers, pairs, ignore_merges=pattern.whole_words))
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern.regex), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        made.decoder = decoders.ByteLevel()
    else:
        pairs = _pairs(read, numbers)
        unknown = next((t for t, k in zip(read.tokens, read.kinds, strict=True)
                        if k == TokenType.UNKNOWN), None)  # fmt: skip
        made = FastTokenizer(
            models.BPE(numbers, pairs, byte_fallback=True, unk_token=unknown, fuse_unk=True)
        )
        before = [normalizers.Prepend("▁")] if read.space_before else []
        made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    for text, kind in zip(read.tokens, read.kinds, strict=True):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            made.add_tokens([AddedToken(text, normalized=False, special=kind == TokenType.CONTROL)])
    return made


def _pairs(read: Vocabulary, numbers: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs that make a token, the highest scores first."""
    found: list[tuple[float, int, tuple[str, str]]] = []
    for number, (text, kind) in enumerate(zip(read.tokens, read.kinds, strict=True)):
        if kind == TokenType.NORMAL:
            cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
            found += [
                (-read.scores[number], number, (a, b))
                for a, b in cuts
                if a in numbers and b in numbers
            ]
    return [pair for _, _, pair in sorted(found)]
