"""`Scores`: how likely a model finds texts behind others, as lm-eval asks for it.

lm-eval computes the logits of every token. Here those of the asked tokens alone are computed, in
chunks, so that as many rows share a pass over a streamed model as in `fluxtrain evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fluxtrain.core.head.lazy_logits import LazyLogits
from fluxtrain.errors import BadInput
from fluxtrain.results.evaluate_model import BATCH_TOKENS, MOST_ROWS
from fluxtrain.results.opened import OpenedModel

CHUNK_BYTES = 256 << 20  # of logits in fp32

# context and text (None of a whole text, which lm-eval cuts to fit), and the tokens of each
Request = tuple[tuple[str, str] | None, list[int], list[int]]
Asked = tuple[int, int, int, int]  # row and column of the logits, the token behind, the request


class Scores:
    """Computes them; `most_rows` shared a pass."""

    def __init__(self, opened: OpenedModel, rows: int | None, tell: Callable[[str], None]) -> None:
        """rows: of a pass, at most; None: as many as BATCH_TOKENS allow."""
        self._opened, self._rows, self._tell = opened, rows, tell
        self.most_rows = 0

    def of(self, requests: Sequence[Request], context: int) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each request's text behind its context, and whether each of
        its tokens is the likeliest. context: tokens that the model takes at most.

        Raises BadInput for a text without tokens, or with more than the model takes.
        """
        by_input: dict[tuple[int, ...], list[int]] = {}  # choices of one token share a row
        for number, (texts, before, text) in enumerate(requests):
            _refuse_unlikely(texts, before, text, context)
            by_input.setdefault(tuple([*before, *text][-context - 1 : -1]), []).append(number)
        waiting = sorted(by_input, key=len, reverse=True)
        sums, likeliest = [0.0] * len(requests), [True] * len(requests)
        while waiting:
            fitting = max(1, min(MOST_ROWS, BATCH_TOKENS // len(waiting[0])))
            inputs = waiting[: self._rows or fitting]
            asked = [
                (row, len(tokens) - len(text) + at, token, number)
                for row, tokens in enumerate(inputs)
                for number in by_input[tokens]
                for text in (requests[number][2],)
                for at, token in enumerate(text)
            ]
            try:
                found = list(self._pass(inputs, asked))
            except torch.OutOfMemoryError:
                if len(inputs) == 1:
                    raise
                self._rows = -(-len(inputs) // 2)
                self._tell(f"device memory ran out: again with {self._rows} rows a pass")
                continue
            waiting = waiting[len(inputs) :]
            self.most_rows = max(self.most_rows, len(inputs))
            for number, (score, is_likeliest) in found:
                sums[number] += score
                likeliest[number] &= is_likeliest
        return list(zip(sums, likeliest, strict=True))

    def _pass(
        self, inputs: Sequence[Sequence[int]], asked: Sequence[Asked]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Compute rows together; yield for each asked token its request, the logarithm of its
        likelihood, and whether none was likelier."""
        opened, width = self._opened, len(inputs[0])
        ids = torch.full((len(inputs), width), opened.loaded.pad_id)
        for row, tokens in enumerate(inputs):  # what comes behind a token has no part in it
            ids[row, : len(tokens)] = torch.tensor(tokens)
        rows, columns, tokens, numbers = torch.tensor(asked).T.to(opened.device)
        chunk = max(1, CHUNK_BYTES // (4 * opened.loaded.embedding_rows))
        with torch.no_grad(), opened.engine.evaluating():
            there = _at(opened.model(ids.to(opened.device), use_cache=False).logits, rows, columns)
            scores, best = list[Tensor](), list[Tensor]()
            for first in range(0, len(asked), chunk):
                part = there[first : first + chunk].float().log_softmax(dim=-1)
                scores.append(part.gather(1, tokens[first : first + chunk, None])[:, 0])
                best.append(part.argmax(dim=-1) == tokens[first : first + chunk])
        found = zip(torch.cat(scores).tolist(), torch.cat(best).tolist(), strict=True)
        yield from zip(numbers.tolist(), found, strict=True)


def _refuse_unlikely(
    texts: tuple[str, str] | None, before: list[int], text: list[int], context: int
) -> None:
    """Raise BadInput for a text that has no likelihood."""
    behind, asked = (f"{one[:60]!r}" for one in texts or ("", "a text"))
    if not before:
        raise BadInput(f"no token stands before {asked}: its context {behind} has none")
    if not text:
        raise BadInput(f"{asked} has no token behind {behind}: its tokens are the context's")
    if len(text) > context:
        raise BadInput(f"{asked} has {len(text)} tokens, and the model takes {context}: shorten it")


def _at(logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the logits (N, V) of N tokens, uncomputed where they are."""
    if isinstance(logits, LazyLogits):
        return logits.viewed(logits.hidden[rows, columns])
    return logits[rows, columns]
