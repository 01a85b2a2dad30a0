"""One model for many prompts: what it is ready for, batches of prompts, and single answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.generation import Answered, Expected, Ready
from fluxtrain.models.generate.prompts import Prompt, Prompting
from fluxtrain.models.generate.sampling import Sampling, stops
from fluxtrain.models.generate.writing import Written, room_for, write
from fluxtrain.results.measuring import Measured, measure, rows_that_fit
from fluxtrain.results.opened import OpenedModel


@dataclass(frozen=True, kw_only=True)
class GenerationSession:
    """A model that writes, with how it was asked to."""

    opened: OpenedModel
    prompting: Prompting
    sampling: Sampling
    measured: Measured

    @staticmethod
    def of(opened: OpenedModel, prompting: Prompting, sampling: Sampling) -> GenerationSession:
        """Measure a pass, so that everybody is told what an answer takes."""
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
        )

    def answer(
        self,
        prompt: Prompt,
        sampling: Sampling,
        heard: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> Written:
        """Write one answer, told as it comes. Raises BadInput for what cannot be answered."""
        tokens = self.prompting.tokens(prompt)
        return write(self.opened, [tokens], sampling, heard, stopped)[0]


class Batches:
    """The prompts of a file, as many in a pass as there is memory for."""

    def __init__(
        self, session: GenerationSession, prompts: Sequence[Prompt], rows: int | None
    ) -> None:
        """rows: of a batch; None: by memory.

        Raises BadInput for the first prompt that cannot be answered, before any is.
        """
        self._session, self._prompts = session, prompts
        wanted, longest = session.sampling.max_new_tokens, 0
        for prompt in prompts:
            # not kept: tokens take several times the memory of their text
            count = len(session.prompting.tokens(prompt))
            if not count:
                raise BadInput(f"{prompt.where} has no tokens: write something to continue")
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
    """Return an answer as it is told."""
    return Answered(
        id=name,
        text=written.text,
        ended=written.ended,
        tokens=len(written.tokens),
        prompt_tokens=written.prompt_tokens,
        seconds=written.seconds,
    )
