"""What a run gives up when device memory runs out in a step, so that the step can be done again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fluxtrain.errors import DoesNotFit
from fluxtrain.machine.failures import first_line
from fluxtrain.methods.engine import TrainingEngine
from fluxtrain.train.live.edit import with_count
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.settings import LiveSettings, SettingName, count_of

_RUNGS: tuple[SettingName, ...] = (  # as `fallback_steps` of one card yields them
    "activations_on_device",
    "blocks_without_recompute",
    "chunk_rows",
    "resident_blocks",
    "device_groups",
)
NOTHING_LEFT = len(_RUNGS)
_GPU = re.compile(r"\bGPU (\d+)\b")


def gpu_of(error: BaseException) -> int | None:
    """Return torch's number of the GPU whose memory ran out; None where the error does not say."""
    found = _GPU.search(str(error))
    return None if found is None else int(found[1])


@dataclass(frozen=True, kw_only=True)
class FallbackStep:
    """Settings that take less of the device."""

    name: SettingName
    before: int
    after: int
    settings: LiveSettings
    card: int | None = None  # the one that gives up, as torch counts; None: the only one, or all

    def rung(self, *, alike: bool) -> int:
        """Return how late this is given up, of one card; ranks that are not `alike` need to agree
        on `device_groups` alone."""
        return _RUNGS.index(self.name) if alike else int(self.name == "device_groups")

    def __str__(self) -> str:
        if self.name == "chunk_rows":
            return f"chunks of {self.after} rows instead of {self.before}"
        where = "" if self.card is None else f" on card {self.card}"
        return f"{self.name} {self.after} instead of {self.before}{where}"


def fallback_steps(
    run: LiveRun, now: LiveSettings, index: int | None = None, *, backward: bool = True
) -> Iterator[FallbackStep]:
    """Yield the settings that can be given up on the card that torch counts as `index`, the
    cheapest first.

    With a backward pass: block inputs on the device, then half of the kept activations. Then half
    of the chunk, half of the resident blocks, half of the groups on the device. With several cards
    the chunk goes last: all compute with it, and it changes bits.
    """
    card = run.card_at(index)
    one: list[Iterator[FallbackStep]] = []
    if card is not None:
        least = [_less_activations(run, now, card)] if backward else []
        one = [*least, _less_weights(run, now, card)]
    chunk = _smaller_chunk(now)
    for steps in (*one, chunk) if run.cards > 1 else (*one[:-1], chunk, *one[-1:]):
        yield from steps


def _less_activations(run: LiveRun, now: LiveSettings, card: int) -> Iterator[FallbackStep]:
    if run.has_gpu and run.facts.row is not None:
        step = _step(run, now, card, "activations_on_device", 0)
        if step.before and _frees(run, now, card, step):
            yield step
    kept = count_of(now.on_card(card), "blocks_without_recompute")
    if kept:
        yield _step(run, now, card, "blocks_without_recompute", kept // 2)


def _smaller_chunk(now: LiveSettings) -> Iterator[FallbackStep]:
    before, after = now.chunk_rows, now.chunk_rows // 2
    if after:
        settings = replace(now, chunk_rows=after)
        yield FallbackStep(name="chunk_rows", before=before, after=after, settings=settings)


def _less_weights(run: LiveRun, now: LiveSettings, card: int) -> Iterator[FallbackStep]:
    if not run.streams:
        return
    names: tuple[SettingName, ...] = ("resident_blocks", "device_groups")
    for name in names:
        before = count_of(now.on_card(card), name)
        if before:
            # blocks that begin to stream need slots, which may take as much as half of them free
            steps = [_step(run, now, card, name, after) for after in (before // 2, 0)]
            yield next((step for step in steps if _frees(run, now, card, step)), steps[0])


def _frees(run: LiveRun, now: LiveSettings, card: int, step: FallbackStep) -> bool:
    """Return whether a step is predicted to free memory of the card."""
    return run.device_bytes(step.settings, card) < run.device_bytes(now, card)


def _step(
    run: LiveRun, now: LiveSettings, card: int, name: SettingName, after: int
) -> FallbackStep:
    return FallbackStep(
        name=name,
        before=count_of(now.on_card(card), name),
        after=after,
        settings=with_count(run, now, card, name, after),
        card=run.placement.cards[card].index if run.cards > 1 else None,
    )


def out_of_memory(
    context: TrainingEngine, step: int, error: BaseException, last: str
) -> DoesNotFit:
    """Return the error of a run that has nothing left to give up in the step after `step`, with a
    cure; `last` names the newest checkpoint."""
    chunk_rows = context.chunk_rows
    always = ("shorten data.sequence_length", "or close other programs on the GPU")
    cures = (*context.takes_less, *always)
    return DoesNotFit(
        f"device memory ran out at step {step + 1} with chunks of {chunk_rows} rows "
        f"({first_line(error)}): {', '.join(cures)}; {last}"
    )
