"""One model for many prompts: what it is ready for, batches of prompts, and single answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.generation import Answered, Expected, Ready
from fluxtrain.machine.machine import available_bytes
from fluxtrain.models.generate.batch import room_for, write
from fluxtrain.models.generate.prompts import Prompting, UserPrompt
from fluxtrain.models.generate.sampling import Sampling, stops
from fluxtrain.models.generate.writing import Written
from fluxtrain.models.loading import tokenizer_of_folder
from fluxtrain.models.model_files import TOKENIZER_FILES
from fluxtrain.plan.facts import activation_estimate
from fluxtrain.results.opened import OpenedModel, generation_settings

if TYPE_CHECKING:  # peft is read where there are adapters
    from fluxtrain.results.adapter.slots import Slots

MOST_ROWS = 64  # beyond them a pass is bound by computing, also on a GPU that streams
FIRST_TOKENS = 8
LOGITS_COPIES = 3  # in fp32: as they come, and for what chooses a token
SHARE = 0.5  # of the memory that is left, for prompts


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The seconds of one token of an answer."""

    pass_s: float
    # keys and values of one row, by device: a block's are where it computes
    cache_bytes_per_token: Mapping[torch.device, int]


def measure(opened: OpenedModel, rows: int = 1) -> Measured:
    """Run the model on a few tokens, then on one more for each of `rows` rows, as answers do."""
    model: Any = opened.model
    ids = torch.zeros((rows, FIRST_TOKENS), dtype=torch.long, device=opened.device)
    last: dict[str, Any] = {}
    if "logits_to_keep" in signature(model.forward).parameters:
        last["logits_to_keep"] = 1
    with torch.no_grad():
        told = model(input_ids=ids, use_cache=True, **last)
        cache = told.get("past_key_values")
        held: Counter[torch.device] = Counter()
        for tensor in _tensors(cache):
            held[tensor.device] += tensor.nbytes
        further = {} if cache is None else {"past_key_values": cache}
        _wait(opened)
        started_s = time.perf_counter()
        model(input_ids=ids[:, :1], use_cache=True, **last, **further)
        _wait(opened)
    passed_s = time.perf_counter() - started_s
    each = {device: size // (rows * FIRST_TOKENS) for device, size in held.items()}
    return Measured(pass_s=passed_s, cache_bytes_per_token=each)


def rows_that_fit(
    opened: OpenedModel, measured: Measured, prompt_tokens: int, new_tokens: int
) -> int:
    """Return how many prompts a batch may take, by the memory that is free now."""
    config: Any = opened.loaded.config.get_text_config()
    hidden = int(config.hidden_size)
    wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    size = opened.loaded.model.dtype.itemsize
    tokens = prompt_tokens + new_tokens
    activations_bytes = activation_estimate(hidden, wide, prompt_tokens, size)
    logits_bytes = LOGITS_COPIES * 4 * opened.loaded.embedding_rows  # on the first card
    most = MOST_ROWS
    cards = {card.torch_device: card.number for card in reversed(opened.engine.cards)}
    for device, number in cards.items():
        cache_bytes = measured.cache_bytes_per_token.get(device, 0) * tokens
        row_bytes = cache_bytes + activations_bytes + (0 if number else logits_bytes)
        free = _free_bytes(device, opened.engine.plan.budget_of(number))
        if free is not None:
            most = min(most, int(free * SHARE) // row_bytes)
    return max(1, most)


def _free_bytes(device: torch.device, budget_bytes: int | None) -> int | None:
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held
        left = free if budget_bytes is None else budget_bytes - held
        return max(0, min(free, left))
    return available_bytes()


def _tensors(cache: Any) -> Iterator[Tensor]:
    """Yield the tensors of a cache, whatever its class."""
    for layer in getattr(cache, "layers", ()):
        yield from (value for value in vars(layer).values() if isinstance(value, Tensor))


def _wait(opened: OpenedModel) -> None:
    if opened.device.type == "cuda":
        torch.cuda.synchronize(opened.device)


@dataclass(frozen=True, kw_only=True)
class GenerationSession:
    """A model that writes, with how it was asked to."""

    opened: OpenedModel
    prompting: Prompting
    sampling: Sampling
    measured: Measured

    @staticmethod
    def of(opened: OpenedModel, prompting: Prompting, sampling: Sampling) -> GenerationSession:
        """Measure a pass, so that the time of an answer is known."""
        sampling.check_values()
        measure(opened)  # the first pass of a process prepares kernels
        measured = measure(opened)
        return GenerationSession(
            opened=opened, prompting=prompting, sampling=sampling, measured=measured
        )

    def ready(self) -> Ready:
        """Describe the model."""
        opened = self.opened
        ends = stops(opened)
        names = opened.tokenizer.convert_ids_to_tokens(ends)
        return Ready(
            model=opened.name,
            base=opened.base,
            has_template=self.prompting.talks,
            context=opened.loaded.max_positions,
            ends=tuple(name or f"token {end}" for name, end in zip(names, ends, strict=True)),
            dtype=opened.loaded.precision.dtype,
            device=opened.device.type,
            placed=opened.placed,
            pass_s=self.measured.pass_s,
            max_new_tokens=self.sampling.max_new_tokens,
            **({} if opened.slots is None else opened.slots.facts()),
        )

    def answer(
        self,
        prompt: UserPrompt,
        sampling: Sampling,
        heard: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> Written:
        """Write one answer, sent as it comes. Raises BadInput for a prompt that cannot be
        answered."""
        tokens = self.prompting.tokens(prompt)
        return write(self.opened, [tokens], sampling, heard, stopped)[0]

    def mount(
        self, slots: Slots, name: str, folder: Path, busy: Collection[str | None]
    ) -> GenerationSession:
        """Put an adapter into a slot; return the session that answers with it.

        Raises BadInput as `adapter_to_mount` and `Slots.mount`.
        """
        from fluxtrain.results.adapter.slots import adapter_to_mount

        opened = self.opened
        loaded = opened.loaded
        source = adapter_to_mount(folder, loaded.base_key, opened.storage, loaded.precision.dtype)
        slots.mount(name, source, busy)
        tokenizer = opened.tokenizer
        if any((folder / file).is_file() for file in TOKENIZER_FILES):
            tokenizer = tokenizer_of_folder(folder, False)
        settings = generation_settings(folder)
        voice = replace(opened, tokenizer=tokenizer, generation=settings, name=name)
        return replace(self, opened=voice, prompting=Prompting(voice))


class Batches:
    """The prompts of a file, as many in a pass as fit in memory."""

    def __init__(
        self, session: GenerationSession, prompts: Sequence[UserPrompt], rows: int | None
    ) -> None:
        """Prepare the answers.

        rows: of a batch; None: by memory. Raises BadInput for the first prompt that cannot be
        answered, before any is.
        """
        self._session, self._prompts = session, prompts
        wanted, longest = session.sampling.max_new_tokens, 0
        for prompt in prompts:
            # not kept: tokens take several times the memory of their text
            count = len(session.prompting.tokens(prompt))
            try:
                room_for(session.opened, count, wanted)
            except BadInput as error:
                raise BadInput(f"{prompt.where}: {error}") from error
            longest = max(longest, count)
        fitting = rows or rows_that_fit(session.opened, session.measured, longest, wanted)
        self.rows = min(fitting, len(self._prompts))

    def expected(self) -> Expected:
        """Measure a pass over a batch; return how long all batches take at most."""
        count = -(-len(self._prompts) // self.rows)
        most = self._session.sampling.max_new_tokens
        measured = self._session.measured
        if self.rows > 1:
            measured = measure(self._session.opened, self.rows)
        return Expected(
            prompts=len(self._prompts),
            batches=count,
            batch_rows=self.rows,
            max_new_tokens=most,
            pass_s=measured.pass_s,
            at_most_s=measured.pass_s * count * most,
        )

    def answers(self, stopped: Callable[[], bool]) -> Iterator[Answered]:
        """Yield an answer for each prompt, in their order, batch by batch."""
        first = 0
        while first < len(self._prompts) and not stopped():
            sampling = self._session.sampling
            if sampling.seed is not None:
                sampling = replace(sampling, seed=sampling.seed + first)
            found = self._written(first, sampling, stopped)
            for number, written in enumerate(found, first + 1):
                yield answered(str(number), written)
            first += len(found)

    def _written(
        self, first: int, sampling: Sampling, stopped: Callable[[], bool]
    ) -> Sequence[Written]:
        """Answer the next prompts, half as many at once each time device memory runs out."""
        while True:
            texts = self._prompts[first : first + self.rows]
            batch = [self._session.prompting.tokens(prompt) for prompt in texts]
            try:
                return write(self._session.opened, batch, sampling, stopped=stopped)
            except torch.OutOfMemoryError:
                if self.rows == 1:
                    raise
            self.rows = -(-self.rows // 2)


def answered(name: str, written: Written) -> Answered:
    """Return an answer as an event."""
    return Answered(
        id=name,
        text=written.text,
        ended=written.ended,
        tokens=len(written.tokens),
        prompt_tokens=written.prompt_tokens,
        seconds=written.seconds,
        logprobs=written.logprobs,
    )
