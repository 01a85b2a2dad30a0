"""Text that a trained model continues, and the tokens at which its generation stops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

_MOST_TOKENS = 1 << 31


def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int = 48,
) -> str:
    """Return the prompt and its most likely continuation.

    Training mode and the global random state are restored. Wait for pending updates before the
    call.
    """
    encoded = tokenizer(prompt, return_tensors="pt")
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stops_of(model.generation_config) or end,
        pad_token_id=end if padding is None else padding,
    )
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            generate: Any = model.generate
            # the tokenizer is for stop strings, which a model's own settings may have
            ids = generate(
                input_ids=encoded["input_ids"],
                attention_mask=encoded["attention_mask"],
                generation_config=settings,
                tokenizer=tokenizer,
            )
    finally:
        model.train(was_training)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def stop_at(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], whole: bool
) -> str:
    """Put the trained ends into the model's generation settings, which are saved with it.

    `whole`: the model is saved, not an adapter of it. Returns a note for a person; empty where
    generation already stops at the trained ends.
    """
    settings: Any = getattr(model, "generation_config", None)
    before = stops_of(settings)
    missing = [end for end in dict.fromkeys(ends) if end not in before]
    if not missing:
        return ""
    ending, known = _names(tokenizer, missing), _names(tokenizer, before) or "no token"
    told = f"answers end with {ending}, and generation of this model stops at {known}"
    if settings is None:
        return f"{told}: it has no generation settings, so pass eos_token_id={missing} to generate"
    settings.eos_token_id = [*missing, *before]
    if settings.pad_token_id is None and before:
        settings.pad_token_id = before[0]
    if whole:
        return f"{told}: the saved generation_config.json names both"
    return (
        f"{told}: an adapter is run with the base's settings, so pass eos_token_id="
        f"{settings.eos_token_id} to generate; its generation_config.json and merged models have it"
    )


def stops_of(settings: Any) -> list[int]:
    """Return the tokens that generation stops at by its settings; -1 is no token, and neither is a
    text or a number that no vocabulary reaches."""
    told = getattr(settings, "eos_token_id", None)
    several = told if isinstance(told, list) else [told]
    return [one for one in several if type(one) is int and 0 <= one < _MOST_TOKENS]


def _names(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    names: Any = tokenizer.convert_ids_to_tokens(tokens)
    return ", ".join(f"{name} (token {token})" for name, token in zip(names, tokens, strict=True))
