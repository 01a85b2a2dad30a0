"""Answer fixed prompts between two steps, so that nothing of the training changes by it.

Generation runs through the wrapped model without gradients. Random states and training mode are
restored, so losses are the same bits with samples and without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fluxtrain.config.section import SampleSettings
from fluxtrain.core.ranks.join import Ranks
from fluxtrain.errors import BadInput, is_panic
from fluxtrain.events.emitter import Announcer
from fluxtrain.events.events import SampleGenerated
from fluxtrain.machine.failures import first_line
from fluxtrain.models.generate.batch import room_for, write
from fluxtrain.models.generate.prompts import Prompting, UserPrompt, read_prompts
from fluxtrain.models.generate.sampling import Sampling
from fluxtrain.models.generate.writing import Written
from fluxtrain.models.loading import LoadedModel
from fluxtrain.train.checkpoint.randomness import randomness_of

SEED = 0
_SETTING = "samples.prompts"


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model of a run, for decoding."""

    loaded: LoadedModel
    device: torch.device

    @property
    def model(self) -> PreTrainedModel:
        """Return the wrapped model."""
        return self.loaded.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return its tokenizer."""
        return self.loaded.tokenizer

    @property
    def generation_config(self) -> GenerationConfig | None:
        """Return the settings of its answers."""
        return self.model.generation_config

    @property
    def name(self) -> str:
        """Return its name."""
        return self.loaded.name


def prompts_of(settings: SampleSettings) -> list[UserPrompt]:
    """Return the prompts of the settings, from their file where they name one.

    Raises BadInput where the file is missing or has no prompts. No model is needed.
    """
    if isinstance(settings.prompts, str):
        return read_prompts(Path(settings.prompts), _SETTING)
    return [
        UserPrompt(text=text, where=f"prompt {number} of {_SETTING}")
        for number, text in enumerate(settings.prompts, 1)
    ]


class Samples:
    """Answers the same prompts whenever it is asked, and reports each answer as an event."""

    retries = True  # with fewer rows, or without samples, when memory runs out

    def __init__(
        self,
        settings: SampleSettings,
        prompts: Sequence[UserPrompt],
        model: TrainedModel,
        announcer: Announcer,
        *,
        talks: bool,
    ) -> None:
        """Prepare samples.

        talks: the model learns conversations, so `auto` prompts are a user's words. Raises
        BadInput for a prompt that the model cannot take.
        """
        self._settings, self._model, self._announcer = settings, model, announcer
        self._prompts = list(prompts)
        plain = settings.form == "text" or (settings.form == "auto" and not talks)
        has_talks = any(prompt.messages is not None for prompt in prompts)
        prompting = Prompting(model, plain=plain and not has_talks)
        if settings.form == "chat" and not prompting.talks:
            raise BadInput(
                f"samples.form is chat, and {model.name} has no chat template: set "
                "data.chat_template, or samples.form=text"
            )
        self._tokens = [prompting.tokens(prompt) for prompt in self._prompts]
        for tokens in self._tokens:
            room_for(model, len(tokens), settings.max_new_tokens)
        self._rows = len(self._prompts)  # answered at once; halved when memory runs out

    def is_due(self, step: int, total_steps: int, *, evaluated: bool) -> bool:
        """Return whether prompts are answered after `step`: after the last one, too."""
        settings = self._settings
        return bool(self._prompts) and settings.are_due(step, total_steps, evaluated=evaluated)

    def write(self, step: int, stopped: Callable[[], bool]) -> None:
        """Answer all prompts with the weights after `step`, and report them.

        Pending updates must be flushed before. Does nothing where `stopped` came in between. What
        goes wrong ends the samples, with a warning, and not the training.
        """
        try:
            written = self._answers(stopped)
        except BaseException as error:  # models bring code of their own to generate
            passes = isinstance(error, Exception) or is_panic(error)
            if not passes or (isinstance(error, torch.OutOfMemoryError) and not self.retries):
                raise
            told = f"no more samples are made, the training goes on: {first_line(error)}"
            self._announcer.warn(told)
            self._prompts = []
            return
        if stopped():
            return
        seconds = sum(answer.seconds for answer in written[:: self._rows])  # of each batch
        for number, (prompt, answer) in enumerate(zip(self._prompts, written, strict=True), 1):
            self._announcer.emit(
                SampleGenerated(
                    step=step,
                    prompt=prompt.words,
                    text=answer.text,
                    number=number,
                    count=len(self._prompts),
                    tokens=len(answer.tokens),
                    ended=answer.ended,
                    seconds=seconds,
                )
            )

    def _answers(self, stopped: Callable[[], bool]) -> list[Written]:
        """Write answers, half as many at once each time device memory runs out."""
        while True:
            try:
                return self._in_batches(stopped)
            except torch.OutOfMemoryError:
                if self._rows == 1 or not self.retries:
                    raise
            self._rows = -(-self._rows // 2)

    def _in_batches(self, stopped: Callable[[], bool]) -> list[Written]:
        settings, model = self._settings, self._model.model
        sampling = Sampling(
            max_new_tokens=settings.max_new_tokens, temperature=settings.temperature, seed=SEED
        )
        was_training = model.training
        model.train(False)
        try:
            with randomness_of(SEED):
                return [
                    answer
                    for first in range(0, len(self._tokens), self._rows)
                    for answer in write(
                        self._model,
                        self._tokens[first : first + self._rows],
                        sampling,
                        stopped=stopped,
                    )
                ]
        finally:
            model.train(was_training)


class SamplesTogether(Samples):
    """Answers by a model of which each rank has a part: all compute, and rank 0's logits count."""

    retries = False  # the other ranks have the memory, and wait for this one

    def __init__(self, ranks: Ranks, *rest: Any, **options: Any) -> None:
        """`rest` and `options` are those of `Samples`."""
        super().__init__(*rest, **options)
        self._ranks = ranks

    def write(self, step: int, stopped: Callable[[], bool]) -> None:
        """Answer all prompts on every rank; a stop of any of them is one of all."""
        hook = self._model.model.register_forward_hook(_with_logits_of_first)
        try:
            super().write(step, lambda: bool(self._ranks.most([stopped()])[0]))
        finally:
            hook.remove()


def _with_logits_of_first(model: nn.Module, inputs: object, told: Any) -> Any:
    told.logits = told.logits.contiguous()
    if distributed.get_world_size() > 1:
        distributed.broadcast(told.logits, 0)
    return told
