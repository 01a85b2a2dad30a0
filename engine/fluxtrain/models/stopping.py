"""Makes generation stop at the tokens that a run teaches as the end of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def stop_at(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], whole: bool
) -> str:
    """Put the learnt ends into the model's generation settings, which are saved with it.

    `whole`: the model is saved, not an adapter beside it. Returns what a person should be told;
    empty where generation stops at the learnt ends already.
    """
    settings: Any = getattr(model, "generation_config", None)
    before = stops_of(settings)
    missing = [end for end in dict.fromkeys(ends) if end not in before]
    if not missing:
        return ""
    learnt, known = _names(tokenizer, missing), _names(tokenizer, before) or "no token"
    told = f"answers end with {learnt}, and generation of this model stops at {known}"
    if settings is None:
        return f"{told}: it has no generation settings, so pass eos_token_id={missing} to generate"
    settings.eos_token_id = [*missing, *before]
    if settings.pad_token_id is None and before:
        settings.pad_token_id = before[0]
    if whole:
        return f"{told}: the saved generation_config.json names both"
    return f"{told}: an adapter has no settings of its own, so pass eos_token_id={missing} as well"


def stops_of(settings: Any) -> list[int]:
    """Return the tokens that generation stops at by its settings."""
    told = getattr(settings, "eos_token_id", None)
    return (
        [] if told is None else [int(one) for one in (told if isinstance(told, list) else [told])]
    )


def _names(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    names: Any = tokenizer.convert_ids_to_tokens(tokens)
    return ", ".join(f"{name} (token {token})" for name, token in zip(names, tokens, strict=True))
