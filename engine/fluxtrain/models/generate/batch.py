"""Writes many answers in one pass a token: rows join and leave between two passes.

A pass over a streamed model takes as long for one row as for many, so answers that are asked for at
different times share passes. Prompts are padded at their left, and a row that has ended leaves the
cache of keys and values at once, which grows by a token a pass. A streamed block runs on the whole
batch, as its cache must not be cut into chunks of rows.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.generation import Ended, TokenLogprob
from fluxtrain.models.generate.sampling import DecodedModel, Sampling, settings_for, stops
from fluxtrain.models.generate.writing import TextStream, UntilStop, Written, token_text
from fluxtrain.models.quiet import quiet_transformers

LEAST_LOGPROB = -9999.0  # what the API says of what cannot be
Heard = Callable[[str, tuple[TokenLogprob, ...]], None]


def write(
    opened: DecodedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    heard: Callable[[str], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Written]:
    """Continue every prompt; `heard` gets the text of a single one as it comes, and `stopped` is
    asked after each token. Each prompt has a seed of its own, that of `sampling` and its number.

    Raises BadInput for an empty prompt, one longer than the model's positions, or generation
    settings that cannot be used.
    """
    hears = heard is not None and len(prompts) == 1
    rows = [
        AnswerRow(
            str(number),
            opened,
            prompt,
            replace(sampling, seed=None if sampling.seed is None else sampling.seed + number),
            (lambda text, _: heard(text)) if hears and heard is not None else None,
        )
        for number, prompt in enumerate(prompts)
    ]
    batch = AnswerBatch(opened)
    with quiet_transformers():
        batch.join(rows)
        while batch.rows:
            if stopped():
                for row in batch.rows:
                    row.ended = row.ended or "stopped"
            batch.leave([row for row in batch.rows if row.ended is not None])
            if batch.rows:
                batch.step()
    return [row.written() for row in rows]


def room_for(opened: DecodedModel, prompt_tokens: int, wanted: int) -> int:
    """Return how many tokens an answer may have behind a prompt.

    Raises BadInput where the prompt is empty, or fills the model's positions.
    """
    if not prompt_tokens:
        raise BadInput("the prompt is empty: write something to answer or to continue")
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


class AnswerRow:
    """An answer on its way."""

    def __init__(
        self,
        name: str,
        voice: DecodedModel,
        prompt: Sequence[int],
        sampling: Sampling,
        heard: Heard | None,
        adapter: str | None = None,
    ) -> None:
        """Prepare an answer.

        voice: the model, with the tokenizer and settings of the adapter that answers. heard: gets
        its text as it comes. Raises BadInput for a prompt or settings that cannot be used.
        """
        sampling.check_values()
        self.id, self.adapter, self.ids = name, adapter, list(prompt)
        self._voice, self._prompt_tokens, self._heard = voice, len(prompt), heard
        self.most = room_for(voice, len(prompt), sampling.max_new_tokens)
        self._limit: Ended = "length" if self.most == sampling.max_new_tokens else "context"
        self._ends = set(stops(voice))
        settings: Any = settings_for(voice, sampling, self.most)
        model: Any = voice.model
        self._change = self._of_settings(  # logits by temperature and the like, as `generate` does
            lambda: model._get_logits_processor(
                generation_config=settings,
                input_ids_seq_length=len(prompt),
                logits_processor=LogitsProcessorList(),
                device=voice.device,
            )
        )
        self._generator: torch.Generator | None = None
        if settings.do_sample:
            self._generator = torch.Generator(voice.device)
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed)
        self._until = UntilStop(settings.stop_strings or (), self._tell)
        self._told_logprobs = sampling.logprobs
        live = heard is not None or bool(settings.stop_strings) or sampling.logprobs is not None
        self._stream = TextStream(voice.tokenizer, self._until.add, live=live)
        self._logprobs: list[TokenLogprob] = []
        self._sent_logprobs = 0
        self._begun_s = time.perf_counter()
        self.ended: Ended | None = None
        self._fault: BadInput | None = None

    @property
    def takes_likeliest(self) -> bool:
        """Return whether the next token is the one with the largest logit, and no more is asked."""
        return self._generator is None and self._told_logprobs is None and not self._change

    def choose(self, logits: Tensor) -> int:
        """Choose the next token by its logits (V)."""
        ids = torch.tensor([self.ids], device=logits.device)
        scores = self._of_settings(lambda: self._change(ids, logits[None].float()))
        if self._generator is None:
            return int(scores.argmax())
        chances = torch.softmax(scores, dim=-1)
        return int(torch.multinomial(chances, 1, generator=self._generator))

    def take(self, logits: Tensor, token: int | None = None) -> None:
        """Add the next token: the given one, else one chosen by its logits (V)."""
        try:
            token = self.choose(logits) if token is None else token
            if token in self._ends:
                self.ended = "end"
                return
            if self._told_logprobs is not None:
                self._note(logits, token, self._told_logprobs)
            self.ids.append(token)
            self._stream.add(token)
        except BadInput as error:
            self.ended, self._fault = "stopped", error
            return
        if self._until.found:
            self.ended = "end"
        elif len(self.ids) - self._prompt_tokens >= self.most:
            self.ended = self._limit

    def written(self) -> Written:
        """Return the whole answer. Raises BadInput where settings or tokenizer failed on it."""
        if self._fault is not None:
            raise self._fault
        self._stream.end()
        self._until.end()
        whole = len(self._until.text)
        return Written(
            text=self._until.text,
            ended=self.ended or "stopped",
            tokens=tuple(self.ids[self._prompt_tokens :]),
            prompt_tokens=self._prompt_tokens,
            seconds=time.perf_counter() - self._begun_s,
            logprobs=tuple(
                one for one in self._logprobs if one.at < whole or not self._until.found
            ),
        )

    def _note(self, logits: Tensor, token: int, count: int) -> None:
        """Note how likely a token is, and which are the likeliest in its place."""
        chances = torch.log_softmax(logits.float(), dim=-1)
        likeliest = chances.topk(min(count, len(chances)))
        others = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        top = tuple(self._told(other, logprob) for other, logprob in others)
        told = self._told(token, float(chances[token]))
        self._logprobs.append(msgspec.structs.replace(told, at=self._stream.length, top=top))

    def _told(self, token: int, logprob: float) -> TokenLogprob:
        text, of_text = token_text(self._voice.tokenizer, self.ids[-1], token)
        return TokenLogprob(text=text, bytes=of_text, logprob=max(logprob, LEAST_LOGPROB))

    def _tell(self, text: str) -> None:
        """Hand on text, with the probabilities of the tokens that begin in it."""
        if self._heard is not None:
            told = self._until.told
            begun = sum(one.at < told for one in self._logprobs)
            self._heard(text, tuple(self._logprobs[self._sent_logprobs : begun]))
            self._sent_logprobs = begun

    def _of_settings(self, made: Callable[[], Any]) -> Any:
        """Return what the model's generation settings make. Raises BadInput where transformers
        cannot use them."""
        try:
            return made()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadInput(
                f"{self._voice.name}: its generation settings cannot be used ({error}): repair its "
                "generation_config.json, or take that file away"
            ) from error


class AnswerBatch:
    """Rows that are written together, and their cache of keys and values."""

    def __init__(
        self,
        opened: DecodedModel,
        before_pass: Callable[[list[AnswerRow]], None] = lambda rows: None,
    ) -> None:
        """Begin without rows; before_pass: gets the rows that the next pass computes, in order."""
        self._opened, self._before_pass = opened, before_pass
        self.rows: list[AnswerRow] = []
        self._computed: list[AnswerRow] = []  # with those that have ended and cannot leave
        self._cache: Any = None
        self._mask = torch.zeros((0, 0), dtype=torch.long, device=opened.device)  # (B, T)
        model: Any = opened.model
        parameters = inspect.signature(model.forward).parameters
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
        # Rows can join and leave keys and values alone; other layers keep a state of all that was.
        self.changes_rows = (
            "position_ids" in parameters
            and not getattr(model, "_is_stateful", False)
            and all(kind.endswith("_attention") and "linear" not in kind for kind in kinds)
        )

    def join(self, rows: list[AnswerRow]) -> None:
        """Compute the prompts of new rows in one pass, and choose their first tokens.

        Rows of a model that cannot change them (`changes_rows`) join an empty batch alone.
        """
        assert self.changes_rows or not self.rows
        longest = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), longest), self._opened.loaded.pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, longest - len(row.ids) :] = torch.tensor(row.ids)
            mask[number, longest - len(row.ids) :] = 1
        ids, mask = ids.to(self._opened.device), mask.to(self._opened.device)
        self._before_pass(rows)
        if not self.changes_rows:
            self._cache = {"attention_mask": mask, **self._further(mask)}
            logits = self._passed_as_in_generate(ids, is_first=True)
        else:
            logits, cache = self._passed(ids, mask, None)
            if self.rows:
                self._cache = _joined(self._cache, cache)
                width = max(self._mask.shape[1], longest)
                self._mask = torch.cat([_padded(self._mask, width, 1), _padded(mask, width, 1)])
            else:
                self._cache, self._mask = cache, mask
        self.rows += rows
        self._computed = list(self.rows)
        self._choose(rows, logits)

    def step(self) -> None:
        """Compute one more token of every row."""
        ids = torch.tensor([[row.ids[-1]] for row in self._computed], device=self._opened.device)
        self._before_pass(self._computed)
        if not self.changes_rows:
            logits = self._passed_as_in_generate(ids, is_first=False)
        else:
            mask = torch.cat([self._mask, torch.ones_like(ids)], dim=1)
            logits, self._cache = self._passed(ids, mask, self._cache)
            self._mask = mask
        self._choose(self._computed, logits)

    def leave(self, gone: Sequence[AnswerRow]) -> None:
        """Let rows leave; the cache keeps the others' keys and values."""
        kept = [number for number, row in enumerate(self.rows) if row not in gone]
        self.rows = [self.rows[number] for number in kept]
        if not kept:
            self._cache, self._computed = None, []
        elif gone and self.changes_rows:
            self._computed = list(self.rows)
            mask = self._mask[kept]
            first = int(mask.any(dim=0).int().argmax())  # columns before it are padding
            self._mask = mask[:, first:]
            for layer in self._cache.layers:
                layer.keys = layer.keys[kept, :, first:]
                layer.values = layer.values[kept, :, first:]

    def _passed(self, ids: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the logits (B, V) of the last tokens, and the cache."""
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

    def _passed_as_in_generate(self, ids: Tensor, *, is_first: bool) -> Tensor:
        """Return the logits (B, V) of the last tokens (B, T) of a model with another state than
        keys and values, which its own methods carry from pass to pass as in its `generate`."""
        model: Any = self._opened.model
        with torch.no_grad():
            inputs = model.prepare_inputs_for_generation(
                ids,
                next_sequence_length=None if is_first else 1,
                is_first_iteration=is_first,
                **self._cache,
            )
            told = model(**inputs, return_dict=True)
        self._cache = model._update_model_kwargs_for_generation(told, self._cache)
        logits: Tensor = told.logits[:, -1]
        return logits

    def _further(self, mask: Tensor) -> dict[str, Any]:
        """Return what the first pass of a model with a state of its own takes besides tokens (B, T)
        and their mask: positions, and an empty state where it makes none itself."""
        model: Any = self._opened.model
        parameters = inspect.signature(model.forward).parameters
        found: dict[str, Any] = {"use_cache": True, **self._last}
        if "position_ids" in parameters:
            found["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
        if model._supports_default_dynamic_cache():
            name = "cache_params" if "cache_params" in parameters else "past_key_values"
            found[name] = DynamicCache(config=model.config.get_text_config())
        return found

    def _choose(self, rows: Sequence[AnswerRow], logits: Tensor) -> None:
        """Add the next token to each row that has not ended; one wait for the device serves all
        that take the likeliest."""
        likeliest: list[int] | None = None
        for number, row in enumerate(rows):
            if row.ended is not None:
                continue
            if row.takes_likeliest:
                likeliest = logits.argmax(dim=-1).tolist() if likeliest is None else likeliest
                row.take(logits[number], likeliest[number])
            else:
                row.take(logits[number])


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
