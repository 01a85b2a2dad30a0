"""The task of image editing: encoded pairs in batches of one size each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fluxtrain.data.images.pairs import Pair, Pairs, path_of
from fluxtrain.data.images.pictures import Bucket, mask_weights, tokens_of
from fluxtrain.data.splitting import Order
from fluxtrain.errors import BadInput
from fluxtrain.events.events import SampleFit
from fluxtrain.methods.image.encoding import Encodings
from fluxtrain.methods.image.flow import PairBatch, level_at
from fluxtrain.methods.objective import BoundTask, Part, Task

QUANTILES = 8  # of the levels of noise that an evaluation takes
T = TypeVar("T")
_Kind = tuple[Bucket, int]  # the size of a pair's images and the count of its references


def kind_of(pair: Pair) -> _Kind:
    """Return what pairs of one batch have in common."""
    return pair.bucket, len(pair.references)


def row_tokens(pairs: Sequence[Pair], caption_tokens: int) -> int:
    """Return the tokens of the largest pair, with its prompt."""
    return caption_tokens + max(tokens_of(p.bucket) * len(p.pictures) for p in pairs)


def split_pairs(
    pairs: Sequence[Pair], held_out: float, seed: int
) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Return the pairs to train on, and a share of all to evaluate on: one at least, where there
    are two and the share is above 0. Pairs with one target stay together."""
    targets = list(dict.fromkeys(pair.image.digest for pair in pairs))
    count = min(len(targets) - 1, max(1, round(held_out * len(targets)))) if held_out else 0
    order = sorted(targets, key=lambda one: hashlib.sha256(f"{seed} {one}".encode()).digest())
    apart = set(order[:count])
    trained = tuple(pair for pair in pairs if pair.image.digest not in apart)
    return trained, tuple(pair for pair in pairs if pair.image.digest in apart)


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task[PairBatch]):
    """Encoded pairs, and flow matching over them."""

    pairs: Pairs
    encodings: Encodings
    accumulation: int
    seed: int

    def notes(self, part: Part) -> Sequence[str]:
        """Return notes on the data; both parts are read together."""
        return self.pairs.notes if part == "trained" else ()

    def rows(self, part: Part) -> int:
        """Count the pairs of a part."""
        return len(self._pairs(part))

    def fingerprint(self, part: Part) -> str | None:
        """Hash every picture, prompt and size of a part, and what encodes them."""
        pairs = self._pairs(part)
        return _fingerprint(pairs, self.encodings) if pairs else None

    def sample_fit(self) -> SampleFit:
        """Count the pairs to train on; images are scaled, so that all fit."""
        return SampleFit(samples=len(self.pairs.trained), longer=0, cut=0, divided=0, left_out=0)

    def bound(self, batch_rows: int) -> BoundTask[PairBatch]:
        """Serve shuffled batches of one size each. Raises BadInput for a step of more pairs than
        there are."""
        rows = batch_rows * self.accumulation
        if rows > len(self.pairs.trained):
            raise BadInput(
                f"a step takes {batch_rows} x {self.accumulation} = {rows} pairs and the data has "
                f"{self.rows('trained')}: lower train.batch_rows or train.accumulation, or add "
                "pairs"
            )
        return BoundTask(
            objective=self.objective,
            data=PairSource(self, batch_rows),
            held_out=lambda: self.in_order("held_out", batch_rows),
        )

    def in_order(self, part: Part, batch_rows: int) -> Iterator[PairBatch]:
        """Yield every pair with fixed noise, at levels that all pairs together spread evenly over
        those of the training; few pairs come at several levels."""
        pairs = self._pairs(part)
        times = -(-QUANTILES // max(1, len(pairs)))
        rows = list(enumerate(pairs * times))
        for kind in dict.fromkeys(kind_of(pair) for pair in pairs):
            alike = [row for row in rows if kind_of(row[1]) == kind]
            for first in range(0, len(alike), batch_rows):
                yield self._at_levels(alike[first : first + batch_rows])

    def typical(self, rows: int) -> PairBatch:
        """Return pairs of the most frequent size."""
        kinds = [kind_of(pair) for pair in self.pairs.trained]
        return self._of_kind(max(dict.fromkeys(kinds), key=kinds.count), rows)

    def fullest(self, rows: int) -> PairBatch | None:
        """Return pairs with the most tokens; None where typical ones have them."""
        kinds = dict.fromkeys(kind_of(pair) for pair in self.pairs.trained)
        return self._of_kind(max(kinds, key=_tokens), rows) if self.uneven else None

    def batch(self, pairs: Sequence[Pair]) -> PairBatch:
        """Read the encodings of pairs of one kind."""
        latents = [
            torch.stack([self.encodings.latents(one, pair.bucket) for one in pair.pictures])
            for pair in pairs
        ]
        images = torch.stack(latents)  # (B, 1 + R, 16, h, w)
        prompts = [self.encodings.prompt(pair.prompt) for pair in pairs]
        return PairBatch(
            target=images[:, 0],
            references=images[:, 1:],
            weights=torch.stack([_weights(pair) for pair in pairs]),
            words=torch.stack([words for words, _ in prompts]),
            pooled=torch.stack([pooled for _, pooled in prompts]),
        )

    def _of_kind(self, kind: _Kind, rows: int) -> PairBatch:
        pairs = [pair for pair in self.pairs.trained if kind_of(pair) == kind]
        return self.batch([pairs[index % len(pairs)] for index in range(rows)])

    def _at_levels(self, rows: list[tuple[int, Pair]]) -> PairBatch:
        """Read pairs, each with the noise and the level of its number."""
        objective: Any = self.objective
        batch = self.batch([pair for _, pair in rows])
        shape, tokens = batch.target.shape[1:], batch.weights.shape[1]
        shares = [(number % QUANTILES + 0.5) / QUANTILES for number, _ in rows]
        levels = [level_at(share, objective.image.timesteps, tokens) for share in shares]
        sources = [torch.Generator().manual_seed(number) for number, _ in rows]
        noise = [torch.randn(shape, generator=source) for source in sources]
        return replace(batch, levels=torch.tensor(levels), noise=torch.stack(noise))

    def _pairs(self, part: Part) -> tuple[Pair, ...]:
        return self.pairs.trained if part == "trained" else self.pairs.held_out


def _weights(pair: Pair) -> Tensor:
    if pair.mask is None:
        return torch.ones(tokens_of(pair.bucket))
    return torch.from_numpy(mask_weights(path_of(pair.mask), pair.bucket))


def _tokens(kind: _Kind) -> int:
    return tokens_of(kind[0]) * (1 + kind[1])


def is_uneven(pairs: Iterable[Pair]) -> bool:
    """Return whether some pairs have more tokens than others."""
    return len({_tokens(kind_of(pair)) for pair in pairs}) > 1


def _fingerprint(pairs: Iterable[Pair], encodings: Encodings) -> str:
    digest = hashlib.sha256(repr((encodings.images.name, encodings.words.name)).encode())
    for pair in pairs:
        shown = [one.digest for one in pair.pictures], pair.mask and pair.mask.digest
        digest.update(repr((shown, pair.prompt, pair.bucket)).encode())
    return digest.hexdigest()[:16]


class PairSource:
    """Endless batches of pairs of one size; the cursor counts the batches served.

    Each epoch has its own order of the pairs within a size, and of the batches. The last batch of
    a size may be smaller, so that no pair is left out.
    """

    def __init__(self, task: ImageTask, batch_rows: int) -> None:
        self._task, self._batch_rows, self._served = task, batch_rows, 0
        self._order: tuple[int, list[list[Pair]]] = (0, self._batches(0))
        self._fingerprint = task.fingerprint("trained")

    @property
    def epoch(self) -> float:
        """Return the epochs done, with the fraction of the current one."""
        return self._served / len(self._order[1])

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps until each pair was seen once, the last step whole."""
        return -(-len(self._order[1]) // self._task.accumulation)

    def next_step(self) -> list[PairBatch]:
        """Return all batches of the next optimizer step."""
        return [self._task.batch(self._next()) for _ in range(self._task.accumulation)]

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, JSON-ready."""
        known = {"batch_rows": self._batch_rows, "fingerprint": self._fingerprint}
        return {"served": self._served, **known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a cursor. Raises BadInput for one of other pairs or batches."""
        if {**state, "served": 0} != {**self.state_dict(), "served": 0}:
            raise BadInput(
                "the checkpoint was made with other pairs, sizes, encoders or train.batch_rows: "
                "use the same images, prompts, pipeline, data.* and image.* settings, or start a "
                "new run"
            )
        self._served = state["served"]

    def _next(self) -> list[Pair]:
        epoch, place = divmod(self._served, len(self._order[1]))
        if epoch != self._order[0]:
            self._order = epoch, self._batches(epoch)
        self._served += 1
        return self._order[1][place]

    def _batches(self, epoch: int) -> list[list[Pair]]:
        pairs, seed, rows = self._task.pairs.trained, self._task.seed, self._batch_rows
        found: list[list[Pair]] = []
        for kind in dict.fromkeys(kind_of(pair) for pair in pairs):
            mixed = _mixed([pair for pair in pairs if kind_of(pair) == kind], seed, epoch)
            found += [mixed[first : first + rows] for first in range(0, len(mixed), rows)]
        return _mixed(found, seed + 1, epoch)


def _mixed(things: list[T], seed: int, epoch: int) -> list[T]:
    order = Order(len(things), seed, epoch).between(0, len(things))
    return [things[index] for index in np.asarray(order)]
