"""Says how llama.cpp knows a model: names, shapes and settings of the families that are written.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What llama.cpp computes in
another way than transformers, or not at all, is refused and names llama.cpp's own converter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxtrain.errors import BadInput

Settings = Mapping[str, Any]  # by key of the file, without the architecture before it
_PLAIN = "default"
_GEMMA_LOCAL_BASE = 1e4  # of sliding attention, fixed in llama.cpp
# Blocks of Gemma's models of 27B, which scale attention by the width of the stream a head.
_GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How llama.cpp stores one kind of model."""

    architecture: str
    settings: Callable[[Any], Settings]  # of a configuration; raises Unwritten
    activation: str = "silu"
    permutes: bool = False  # rows of a head's queries and keys: rotation pairs neighbours there
    norm_offset: float = 0.0  # that is added to the weights of norms
    ropes: tuple[str, ...] = (_PLAIN, "linear")  # kinds of scaled rotary embeddings
    read_as: str = ""  # the kind of model that transformers makes of a file, where it is another


class Unwritten(Exception):
    """Why llama.cpp's own converter is needed."""


def family_of(config: Any, folder: Path) -> Family:
    """Return the family of a model.

    Raises BadInput for one that is not written here, or not with these settings.
    """
    try:
        family = FAMILIES.get(config.model_type)
        if family is None:
            raise Unwritten(
                f"models of the kind {config.model_type} are not written as GGUF here (those of "
                f"{', '.join(sorted(FAMILIES))} are)"
            )
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        if activation not in (family.activation, _other_name(family.activation)):
            raise Unwritten(f"its activation is {activation}, and llama.cpp computes another")
        if (kind := rope(config).get("rope_type", _PLAIN)) not in family.ropes:
            raise Unwritten(f"its rotary embeddings are of the kind {kind}")
        family.settings(config)
    except Unwritten as why:
        raise BadInput(
            f"{folder}: {why}: convert it with llama.cpp's own script, "
            f"`python convert_hf_to_gguf.py {folder} --outtype q8_0`"
        ) from why
    return family


def _other_name(activation: str) -> str:
    return {"gelu_pytorch_tanh": "gelu_new"}.get(activation, activation)


def rope(config: Any) -> dict[str, Any]:
    """Return the rotary embeddings of full attention."""
    found = dict(config.rope_parameters or {})
    return dict(found.get("full_attention", found))


def head_size(config: Any) -> int:
    """Return the width of a head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def _common(config: Any) -> dict[str, Any]:
    width, turns = head_size(config), rope(config)
    settings = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": int(width * turns.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(turns["rope_theta"]),
    }
    if turns.get("rope_type") == "linear":
        settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(turns["factor"])}
    return settings


def _llama(config: Any) -> Settings:
    return _up_to_the_window(config, _common(config))


def _up_to_the_window(config: Any, settings: dict[str, Any]) -> Settings:
    """Tell the context in which a sliding window that llama.cpp leaves out makes no difference."""
    window = getattr(config, "sliding_window", None) or settings["context_length"]
    return {**settings, "context_length": min(settings["context_length"], window)}


def _qwen(config: Any) -> Settings:
    if getattr(config, "use_sliding_window", False):
        raise Unwritten("it attends to a sliding window")
    return _common(config)


def _phi3(config: Any) -> Settings:
    window = config.sliding_window or 0  # told, though llama.cpp computes none for this family
    return _up_to_the_window(config, {**_common(config), "attention.sliding_window": window})


def _gemma(config: Any, pattern: int) -> dict[str, Any]:
    blocks, heads = config.num_hidden_layers, config.num_attention_heads
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
             for i in range(blocks)]  # fmt: skip
    if list(config.layer_types) != kinds:
        raise Unwritten(f"not every {pattern}th of its blocks attends to all tokens")
    is_27b = blocks == _GEMMA_27B[config.model_type]
    scaled_by = config.hidden_size / heads if is_27b else head_size(config)
    if config.query_pre_attn_scalar != scaled_by:
        raise Unwritten(f"its attention is scaled by {config.query_pre_attn_scalar}")
    if not config.tie_word_embeddings:
        raise Unwritten("its head is not its embedding")
    return {**_common(config), "attention.sliding_window": config.sliding_window}


def _gemma2(config: Any) -> Settings:
    caps = {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if None in caps.values():
        raise Unwritten("it caps no logits")
    return {**_gemma(config, 2), **{key: float(value) for key, value in caps.items()}}


def _gemma3(config: Any) -> Settings:
    local = config.rope_parameters["sliding_attention"]
    if local.get("rope_type", _PLAIN) != _PLAIN or local["rope_theta"] != _GEMMA_LOCAL_BASE:
        raise Unwritten(f"sliding attention has rotary embeddings of base {local['rope_theta']}")
    if config.attn_logit_softcapping or config.final_logit_softcapping:
        raise Unwritten("it caps logits")
    return _gemma(config, 6)


FAMILIES = {
    "llama": Family(
        architecture="llama", settings=_llama, permutes=True, ropes=(_PLAIN, "linear", "llama3")
    ),
    "mistral": Family(architecture="llama", settings=_llama, permutes=True, read_as="llama"),
    "qwen2": Family(architecture="qwen2", settings=_qwen),
    "qwen3": Family(architecture="qwen3", settings=_qwen),
    "phi3": Family(architecture="phi3", settings=_phi3, ropes=(_PLAIN,)),
    "gemma2": Family(
        architecture="gemma2", settings=_gemma2, activation="gelu_pytorch_tanh", norm_offset=1.0
    ),
    "gemma3_text": Family(
        architecture="gemma3", settings=_gemma3, activation="gelu_pytorch_tanh", norm_offset=1.0
    ),
}


def stored(family: Family, config: Any, name: str, weight: Tensor) -> Tensor:
    """Return a weight as the file holds it. name: the file's."""
    if family.permutes and (".attn_q." in name or ".attn_k." in name):
        is_query = ".attn_q." in name
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        pairs = weight.reshape(heads, 2, -1, *weight.shape[1:])  # halves of a head, then turns
        return pairs.transpose(1, 2).reshape(weight.shape)
    if family.norm_offset and name.endswith("norm.weight"):
        return weight.float() + family.norm_offset
    return weight


def extra_tensors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the values that llama.cpp reads from a tensor and transformers computes
    from settings."""
    turns = rope(config)
    if turns.get("rope_type") != "llama3":
        return
    width = head_size(config)
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    wavelengths = 2 * math.pi * turns["rope_theta"] ** exponents
    low, high, factor = (turns[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
    share = (turns["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    share = share.clamp(0.0, 1.0)  # of the unscaled frequency: none of slow ones, all of fast ones
    yield "rope_freqs.weight", (1 / ((1 - share) / factor + share)).float()
