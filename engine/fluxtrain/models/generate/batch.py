"""Writes many answers in one pass a token: rows join and leave between two passes.

A pass over a streamed model takes as long for one row as for many, so answers that are asked for at
different times share passes. Prompts are padded at their left, and a row that has ended leaves the
cache of keys and values at once.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.generation import Ended
from fluxtrain.models.generate.sampling import DecodedModel, Sampling, settings_for, stops
from fluxtrain.models.generate.writing import TextStream, Written, check_prompts, room_for

Heard = Callable[[str], None]


class UntilStop:
    """Hands text on up to the first stop string; the beginning of a possible one waits for the
    next piece."""

    def __init__(self, strings: Sequence[str], heard: Heard) -> None:
        self._strings, self._heard = strings, heard
        self.text, self.found, self._told = "", False, 0

    def add(self, piece: str) -> None:
        """Take the next piece of the text."""
        if self.found:
            return
        self.text += piece
        places = [at for at in map(self.text.find, self._strings) if at >= 0]
        if places:
            self.text, self.found = self.text[: min(places)], True
        self._tell(len(self.text) - (0 if self.found else self._begun()))

    def end(self) -> None:
        """Hand on the waiting text."""
        self._tell(len(self.text))

    def _begun(self) -> int:
        """Return the characters at the end that may begin one of the strings."""
        longest = max(map(len, self._strings), default=1) - 1
        sizes = range(min(longest, len(self.text)), 0, -1)
        return next(
            (n for n in sizes if any(one.startswith(self.text[-n:]) for one in self._strings)), 0
        )

    def _tell(self, end: int) -> None:
        if end > self._told:
            self._heard(self.text[self._told : end])
            self._told = end


@dataclass(eq=False)
class AnswerRow:
    """An answer on its way."""

    id: str
    voice: DecodedModel  # the model, with the tokenizer and settings of the adapter that answers
    adapter: str | None
    ids: list[int]  # of the prompt, and of the answer so far
    prompt_tokens: int
    most: int  # tokens that the answer may have
    limit: Ended  # why it ends there
    sampling: Sampling
    settings: GenerationConfig
    chosen: Callable[[Any, Any], Any]  # logits as temperature and the like change them
    generator: torch.Generator
    stream: TextStream
    until: UntilStop
    begun_s: float = field(default_factory=time.perf_counter)
    ended: Ended | None = None

    @staticmethod
    def of(
        name: str,
        voice: DecodedModel,
        prompt: list[int],
        sampling: Sampling,
        heard: Heard,
        adapter: str | None = None,
    ) -> AnswerRow:
        """Prepare an answer. Raises BadInput for a prompt or settings that cannot be used."""
        sampling.check_values()
        check_prompts([prompt])
        most = room_for(voice, len(prompt), sampling.max_new_tokens)
        settings: Any = settings_for(voice, sampling, most)
        model: Any = voice.model
        try:
            chosen = model._get_logits_processor(  # as transformers' `generate` chooses
                generation_config=settings,
                input_ids_seq_length=len(prompt),
                logits_processor=LogitsProcessorList(),
                device=voice.device,
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadInput(
                f"{voice.name}: its generation settings cannot be used ({error}): repair its "
                "generation_config.json, or take that file away"
            ) from error
        generator = torch.Generator(voice.device)
        generator.manual_seed(torch.seed() if sampling.seed is None else sampling.seed)
        until = UntilStop(settings.stop_strings or (), heard)
        return AnswerRow(
            id=name,
            voice=voice,
            adapter=adapter,
            ids=list(prompt),
            prompt_tokens=len(prompt),
            most=most,
            sampling=sampling,
            limit="length" if most == sampling.max_new_tokens else "context",
            settings=settings,
            chosen=chosen,
            generator=generator,
            stream=TextStream(voice.tokenizer, until.add),
            until=until,
        )

    def take(self, logits: Tensor) -> None:
        """Choose the next token from its logits (V)."""
        scores = self.chosen(torch.tensor([self.ids], device=logits.device), logits[None].float())
        if self.settings.do_sample:
            chances = torch.softmax(scores, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=self.generator))
        else:
            token = int(scores.argmax())
        if token in stops(self.voice):
            self.ended = "end"
            return
        self.ids.append(token)
        self.stream.add(token)
        if self.until.found:
            self.ended = "end"
        elif len(self.ids) - self.prompt_tokens >= self.most:
            self.ended = self.limit

    def written(self) -> Written:
        """Return the whole answer."""
        self.stream.end()
        self.until.end()
        return Written(
            text=self.until.text,
            ended=self.ended or "stopped",
            tokens=tuple(self.ids[self.prompt_tokens :]),
            prompt_tokens=self.prompt_tokens,
            seconds=time.perf_counter() - self.begun_s,
        )


class AnswerBatch:
    """Rows that are written together, and their cache of keys and values."""

    def __init__(
        self, opened: DecodedModel, before_pass: Callable[[list[AnswerRow]], None]
    ) -> None:
        """Begin without rows; before_pass: gets the rows that the next pass computes, in order."""
        self._opened, self._before_pass = opened, before_pass
        self.rows: list[AnswerRow] = []
        self._cache: Any = None
        self._mask = torch.zeros((0, 0), dtype=torch.long, device=opened.device)  # (B, T)
        model: Any = opened.model
        parameters = inspect.signature(model.forward).parameters
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
        # Rows can join and leave keys and values alone; other layers keep a state of all that was.
        self.is_possible = (
            "position_ids" in parameters
            and not getattr(model, "_is_stateful", False)
            and all(kind.endswith("_attention") and "linear" not in kind for kind in kinds)
        )

    def join(self, rows: list[AnswerRow]) -> None:
        """Compute the prompts of new rows in one pass, and choose their first tokens."""
        longest = max(len(row.ids) for row in rows)
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, longest - len(row.ids) :] = torch.tensor(row.ids)
            mask[number, longest - len(row.ids) :] = 1
        ids, mask = ids.to(self._opened.device), mask.to(self._opened.device)
        logits, cache = self._passed(rows, ids, mask, None)
        if self.rows:
            self._cache = _joined(self._cache, cache)
            width = max(self._mask.shape[1], longest)
            self._mask = torch.cat([_padded(self._mask, width, 1), _padded(mask, width, 1)])
        else:
            self._cache, self._mask = cache, mask
        self.rows += rows
        self._choose(rows, logits)

    def step(self) -> None:
        """Compute one more token of every row."""
        ids = torch.tensor([[row.ids[-1]] for row in self.rows], device=self._opened.device)
        mask = torch.cat([self._mask, torch.ones_like(ids)], dim=1)
        logits, self._cache = self._passed(self.rows, ids, mask, self._cache)
        self._mask = mask
        self._choose(self.rows, logits)

    def leave(self, gone: Sequence[AnswerRow]) -> None:
        """Let rows leave; the cache keeps the others' keys and values."""
        kept = [number for number, row in enumerate(self.rows) if row not in gone]
        self.rows = [self.rows[number] for number in kept]
        if not kept:
            self._cache = None
        elif gone:
            mask = self._mask[kept]
            first = int(mask.any(dim=0).int().argmax())  # columns before it are padding
            self._mask = mask[:, first:]
            for layer in self._cache.layers:
                layer.keys = layer.keys[kept, :, first:]
                layer.values = layer.values[kept, :, first:]

    def _passed(
        self, rows: list[AnswerRow], ids: Tensor, mask: Tensor, cache: Any
    ) -> tuple[Tensor, Any]:
        """Return the logits (B, V) of the last tokens, and the cache."""
        self._before_pass(rows)
        places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        model: Any = self._opened.model
        # Without the model's configuration it cuts no windows, which masks do as well.
        cache = DynamicCache() if cache is None else cache
        with torch.no_grad():
            told = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                **self._last,
            )
        return told.logits[:, -1], told.past_key_values

    def _choose(self, rows: Sequence[AnswerRow], logits: Tensor) -> None:
        for row, values in zip(rows, logits, strict=True):
            row.take(values)


def _joined(first: Any, second: Any) -> Any:
    """Put the rows of a second cache behind those of the first, padded at the left alike."""
    for one, other in zip(first.layers, second.layers, strict=True):
        width = max(one.keys.shape[2], other.keys.shape[2])
        one.keys = torch.cat([_padded(one.keys, width, 2), _padded(other.keys, width, 2)])
        one.values = torch.cat([_padded(one.values, width, 2), _padded(other.values, width, 2)])
    return first


def _padded(tensor: Tensor, width: int, dim: int) -> Tensor:
    """Return a tensor that is `width` long in `dim`, with zeros at its beginning."""
    missing = width - tensor.shape[dim]
    if not missing:
        return tensor
    shape = [*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]]
    return torch.cat([tensor.new_zeros(shape), tensor], dim=dim)
