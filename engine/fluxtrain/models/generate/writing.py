"""Writes text: prompts as tokens in, answers out, several prompts at a time.

The cache of keys and values grows by a token a pass, so that no pass computes the prompt again; a
streamed block runs on the whole batch then, as its cache must not be cut into chunks of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from fluxtrain.errors import BadInput, panics_refused
from fluxtrain.events.answers.generation import Ended
from fluxtrain.models.generate.sampling import DecodedModel, Sampling, settings_for, stops
from fluxtrain.models.quiet import quiet_transformers

_INCOMPLETE = "�"  # what a tokenizer makes of a character whose bytes are not all there


class Decoder(Protocol):
    """The part of a tokenizer that makes text."""

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


def text_of(tokenizer: Decoder, tokens: list[int]) -> str:
    """Return the text of an answer's tokens, without special ones and without tidying spaces.
    Raises BadInput where its tokenizer panics."""
    with panics_refused("the decoder of the model's tokenizer", "repair it in the model's folder"):
        return str(
            tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class TextStream:
    """Collects an answer's tokens and hands out its text; the pieces joined are the whole text."""

    def __init__(self, tokenizer: Decoder, heard: Callable[[str], None]) -> None:
        self._tokenizer, self._heard = tokenizer, heard
        self._tokens: list[int] = []
        self._told = ""

    def add(self, token: int) -> None:
        """Take the next token; hand out the characters that are complete."""
        self._tokens.append(token)
        text = text_of(self._tokenizer, self._tokens)
        if not text.endswith(_INCOMPLETE):
            self._tell(text)

    def end(self) -> str:
        """Hand out the remaining text; return the whole."""
        text = text_of(self._tokenizer, self._tokens)
        self._tell(text)
        return text

    def _tell(self, text: str) -> None:
        """Hand out new text; with a tokenizer that rewrites earlier text this waits for the end."""
        if text.startswith(self._told) and len(text) > len(self._told):
            self._heard(text[len(self._told) :])
            self._told = text


@dataclass(frozen=True, kw_only=True)
class Written:
    """An answer."""

    text: str
    ended: Ended
    tokens: tuple[int, ...]  # without the one that ended it
    prompt_tokens: int
    seconds: float  # of the batch


def write(
    opened: DecodedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    heard: Callable[[str], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Written]:
    """Continue every prompt; `heard` gets the text of a single one as it comes, and `stopped` is
    asked after each token.

    Raises BadInput for an empty prompt, or one longer than the model's positions.
    """
    sampling.check_values()
    longest = max(len(prompt) for prompt in prompts)
    most = room_for(opened, longest, sampling.max_new_tokens)
    check_prompts(prompts)
    started_s = time.perf_counter()
    inputs = _batch(prompts, opened.loaded.pad_id, opened.device)
    stream = TextStream(opened.tokenizer, heard) if heard and len(prompts) == 1 else None
    settings = settings_for(opened, sampling, most)
    generate: Any = opened.model.generate
    with quiet_transformers(), torch.no_grad(), torch.random.fork_rng():
        if sampling.seed is None:
            torch.seed()
        else:
            torch.manual_seed(sampling.seed)
        try:
            ids: Tensor = generate(
                **inputs,
                generation_config=settings,
                streamer=_Heard(stream, set(stops(opened))) if stream else None,
                stopping_criteria=StoppingCriteriaList([_Stopped(stopped)]),
                tokenizer=opened.tokenizer,  # for stop strings
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if not _of_settings(error):
                raise
            raise BadInput(
                f"{opened.name}: its generation settings cannot be used ({error}): repair its "
                "generation_config.json, or take that file away"
            ) from error
    if stream:
        stream.end()
    seconds = time.perf_counter() - started_s
    limit: Ended = "length" if most == sampling.max_new_tokens else "context"
    rows = ids[:, longest:].tolist()
    return [
        _written(opened, row, len(prompt), "stopped" if stopped() else limit, most, seconds)
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def _of_settings(error: BaseException) -> bool:
    """Return whether transformers' own generation code raised an error: it checks the model's
    settings when it first needs them."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "/transformers/generation/" in trace.tb_frame.f_code.co_filename


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Raise BadInput for a prompt without tokens."""
    for prompt in prompts:
        if not prompt:
            raise BadInput("the prompt is empty: write something to answer or to continue")


def room_for(opened: DecodedModel, prompt_tokens: int, wanted: int) -> int:
    """Return how many tokens an answer may have behind a prompt.

    Raises BadInput where the prompt fills the model's positions.
    """
    positions = opened.loaded.max_positions
    if positions is None:
        return wanted
    if prompt_tokens >= positions:
        raise BadInput(
            f"the prompt has {prompt_tokens:,} tokens and the model knows {positions:,} positions, "
            f"of which an answer needs some: shorten it by {prompt_tokens - positions + 1:,} "
            "tokens at least, or begin a new conversation"
        )
    return min(wanted, positions - prompt_tokens)


def _batch(
    prompts: Sequence[Sequence[int]], padding: int, device: torch.device
) -> dict[str, Tensor]:
    """Return ids and mask (B, T); shorter prompts are padded at their left, as answers follow."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), padding, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _written(
    opened: DecodedModel,
    row: list[int],
    prompt_tokens: int,
    otherwise: Ended,
    most: int,
    seconds: float,
) -> Written:
    """Cut a row at the first token that ends answers."""
    ends = set(stops(opened))
    length = next((at for at, token in enumerate(row) if token in ends), None)
    tokens = row if length is None else row[:length]
    ended: Ended = "end" if length is not None else otherwise
    if length is None and len(row) >= most and otherwise == "stopped":
        ended = "length"
    return Written(
        text=text_of(opened.tokenizer, tokens),
        ended=ended,
        tokens=tuple(tokens),
        prompt_tokens=prompt_tokens,
        seconds=seconds,
    )


class _Stopped(StoppingCriteria):
    """Ends all rows when somebody asked for it."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self._stopped(), device=input_ids.device)


class _Heard(BaseStreamer):
    """Hands the tokens of one answer to a stream of text; the prompt comes first."""

    def __init__(self, stream: TextStream, ends: set[int]) -> None:
        self._stream, self._ends = stream, ends
        self._prompt_came = False

    def put(self, value: Tensor) -> None:
        """Take the prompt, then a token each time."""
        if self._prompt_came:
            for token in value.flatten().tolist():
                if token not in self._ends:
                    self._stream.add(int(token))
        self._prompt_came = True

    def end(self) -> None:
        """Do nothing: the stream is ended with the answer."""
