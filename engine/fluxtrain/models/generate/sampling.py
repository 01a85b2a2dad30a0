"""How the next token is chosen, and where an answer ends."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fluxtrain.errors import BadInput
from fluxtrain.models.generation import stops_of
from fluxtrain.models.loading import LoadedModel


class DecodedModel(Protocol):
    """A model in evaluation mode whose updates were waited for, and its tokenizer."""

    @property
    def model(self) -> PreTrainedModel:
        """Return the model, wrapped or not."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return its tokenizer, with the chat template to use."""

    @property
    def loaded(self) -> LoadedModel:
        """Return how many positions it knows, among other facts."""

    @property
    def device(self) -> torch.device:
        """Return the device that it computes on."""

    @property
    def generation_config(self) -> GenerationConfig | None:
        """Return the settings that answers have where nothing is asked for."""

    @property
    def name(self) -> str:
        """Return its name, for messages."""


MAX_NEW_TOKENS = 512
MOST_STOPS = 16
TRANSFORMERS_TOP_K = 50  # of its `generate` where a model says nothing
MOST_LOGPROBS = 20
# what can be drawn by; and what changes nothing, for None would be the model's own value again
_POSSIBLE: dict[str, tuple[Callable[[float], bool], float]] = {
    "temperature": (lambda value: value > 0, 1.0),
    "top_k": (lambda value: value >= 0, 0),
    "top_p": (lambda value: 0 <= value <= 1, 1.0),
    "min_p": (lambda value: 0 <= value <= 1, 0.0),
    "typical_p": (lambda value: 0 < value <= 1, 1.0),
    "repetition_penalty": (lambda value: value > 0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Requested sampling settings; None follows the model's generation settings."""

    max_new_tokens: int = MAX_NEW_TOKENS
    temperature: float | None = None  # 0: the most likely token
    top_p: float | None = None
    seed: int | None = None  # None: another draw each time
    stop: tuple[str, ...] = ()  # texts that end an answer, besides the model's own
    logprobs: int | None = None  # likely tokens that are told for each; None: no probabilities

    def check_values(self) -> None:
        """Raise BadInput for a value that is out of its bounds."""
        if self.max_new_tokens < 1:
            raise BadInput(f"max_new_tokens is {self.max_new_tokens}: use at least 1")
        if self.temperature is not None and not 0 <= self.temperature <= 100:
            raise BadInput(
                f"temperature is {self.temperature}: use 0 (the most likely token) to 100"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BadInput(f"top_p is {self.top_p}: use more than 0 and at most 1")
        if len(self.stop) > MOST_STOPS or not all(self.stop):
            raise BadInput(f"stop takes up to {MOST_STOPS} texts, and none that is empty")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise BadInput(f"logprobs is {self.logprobs}: use 0 to {MOST_LOGPROBS}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise BadInput(f"seed is {self.seed}: use 0 to 2**63 - 1")


def stops(opened: DecodedModel) -> list[int]:
    """Return the tokens that end an answer: of the generation settings, else of the tokenizer."""
    found = stops_of(opened.generation_config)
    end = opened.tokenizer.eos_token_id
    return found or ([int(end)] if isinstance(end, int) else [])


def settings_for(opened: DecodedModel, sampling: Sampling, most: int) -> GenerationConfig:
    """Return the model's generation settings with the requested changes, for `most` new tokens."""
    settings: Any = copy.deepcopy(opened.generation_config)
    if settings is None:
        settings = GenerationConfig()  # type: ignore[no-untyped-call]
    settings.max_new_tokens, settings.max_length = most, None
    settings.min_length, settings.min_new_tokens = 0, None
    own = settings.stop_strings or []
    settings.stop_strings = [*([own] if isinstance(own, str) else own), *sampling.stop]
    settings.num_beams = settings.num_return_sequences = 1
    settings.eos_token_id = stops(opened) or None
    settings.return_dict_in_generate = False
    if settings.pad_token_id not in range(opened.loaded.embedding_rows):
        settings.pad_token_id = opened.loaded.pad_id
    _mend(settings)
    if sampling.top_p is not None:
        settings.top_p, settings.do_sample = sampling.top_p, True
    if sampling.temperature is not None:
        settings.temperature = sampling.temperature or None
        settings.do_sample = sampling.temperature > 0
    if settings.do_sample and settings.top_k is None:
        settings.top_k = TRANSFORMERS_TOP_K
    if not settings.do_sample:
        settings.temperature = settings.top_p = settings.top_k = None
    made: GenerationConfig = settings
    return made


def _mend(settings: Any) -> None:
    """Replace values of a model's generation settings that transformers refuses while it draws,
    such as the temperature 0, which means the most likely token."""
    for name, (is_possible, without) in _POSSIBLE.items():
        value = getattr(settings, name, None)
        if name == "temperature" and _is_number(value) and value <= 0:
            settings.do_sample = False
        if value is not None:
            found = value if _is_number(value) and is_possible(value) else without
            setattr(settings, name, type(without)(found))  # transformers wants 2.0 where 2 is said
    told = getattr(settings, "stop_strings", None)
    strings = told if isinstance(told, list) else [told]
    settings.stop_strings = [one for one in strings if isinstance(one, str) and one] or None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
