"""Tokenizers of several kinds and chat templates of several families, made on the spot."""

from __future__ import annotations

from functools import cache

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

WORDS = (
    "the river runs past an old mill where two brothers grind barley and oats for the village "
    "def area(width, height):\n    total = width * height\n    return total\n question answer "
    'system user assistant tool \n\n thought 0 1 2 3 4 5 6 7 8 9 { } " : , . ? ! '
    "INST USER ASSISTANT <think> </think> [/]\n"
)
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>"]
KINDS = ("byte-level", "trimming", "adds-bos", "metaspace", "prepending", "unigram", "rstrip")


@cache
def made(kind: str) -> Tokenizer:
    """Train a tokenizer: byte-level ones like GPT-2's, or with blanks as letters like Llama-2's."""
    byte_level = kind in ("byte-level", "trimming", "adds-bos", "rstrip")
    if kind == "unigram":
        raw = Tokenizer(models.Unigram())
    else:
        raw = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    if byte_level:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        raw.post_processor = processors.ByteLevel(trim_offsets=kind == "trimming")
    elif kind == "prepending":  # Llama-2's: no words, a blank in front of everything
        raw.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])  # fmt: skip
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace()
        raw.decoder = decoders.Metaspace()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else sorted(set(WORDS) | {"▁"})
    options = {"vocab_size": 500, "special_tokens": SPECIALS, "show_progress": False}
    if kind == "unigram":
        trainer = trainers.UnigramTrainer(unk_token="<unk>", initial_alphabet=alphabet, **options)
    else:
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    raw.train_from_iterator([WORDS] * 4, trainer)
    if kind == "adds-bos":
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
        )
    return raw


def tokenizer_of(kind: str, template: str | None, eos: str | None = "</s>",
                 bos: str = "<s>") -> PreTrainedTokenizerBase:  # fmt: skip
    """Return a fresh tokenizer of a kind with a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(made(kind).to_str()), eos_token=eos, bos_token=bos
    )
    tokenizer.chat_template = template
    return tokenizer


_TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
_OPENED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES = {
    "chatml": "{% for m in messages %}" + _TURN + "{% endfor %}" + _OPENED,
    "tagged": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + _OPENED
    ),
    "trimmed, eos": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{{ ' ' + m['content'] | trim + eos_token }}"
        "{% else %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "thoughts of the last turn": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + _OPENED
    ),
    "opened with a thought": (
        "{% for m in messages %}" + _TURN + "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    "no ends": (
        "{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "two ends": (
        "{% for m in messages %}" + _TURN + "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% else %}{{ eos_token }}{% endif %}"
    ),
}
