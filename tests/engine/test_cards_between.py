"""Code between blocks on several cards that torch's functions do not announce: same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.core.block.rng import RandomState
from tests.between_blocks import (
    BETWEEN,
    LENGTH,
    ROWS,
    WORDS,
    Block,
    Model,
    assert_close,
    drawn,
    gradients,
)
from tests.on_cards import wrapped


@pytest.mark.parametrize("cards", [1, 2, 3])
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.thinned(14)
def test_what_computes_between_blocks_gets_its_gradients(
    between: Callable[[Tensor], Tensor], cards: int
) -> None:
    plain = gradients(Model(between), 0)
    assert len(plain) == 10
    assert_close(gradients(Model(between), cards), plain)


@pytest.mark.parametrize("cards", [1, 2])
def test_hooks_of_a_blocks_backward_pass_lose_no_gradient(cards: int) -> None:
    def hooked() -> tuple[nn.Module, list[float]]:
        model, seen = Model(lambda h: h), []
        for layer in model.layers:
            layer.register_full_backward_hook(lambda _, __, out: seen.append(out[0].norm().item()))
            layer.register_full_backward_pre_hook(lambda _, out: seen.append(out[0].sum().item()))
        return model, seen

    plain, plain_seen = hooked()
    model, seen = hooked()
    assert_close(gradients(model, cards), gradients(plain, 0))
    assert seen == pytest.approx(plain_seen, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("cards", [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_a_model_may_feed_another_one(cards: tuple[int, int]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Model(lambda h: h), Model(lambda h: h)
            self.first.head, self.second.embed = nn.Identity(), nn.Identity()  # type: ignore

        def forward(self, words: Tensor) -> Tensor:
            found: Tensor = self.second(self.first(words))
            return found

    two = Two()
    plain = copy.deepcopy(two)
    for part, count in zip((two.first, two.second), cards, strict=True):
        wrapped(part, count, chunk_rows=2)
    assert_close(gradients(two, 0), gradients(plain, 0))


class Choosing(Block):
    """Returns some of its rows, too: how many depends on the data."""

    def forward(self, hidden: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore
        hidden = super().forward(hidden)
        return hidden, hidden[keep]


class Chosen(Model):
    def __init__(self) -> None:
        super().__init__(lambda h: h)
        self.layers = nn.ModuleList(Choosing() for _ in range(4))

    def forward(self, words: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore
        hidden, extra = self.embed(words), torch.zeros(())
        for layer in self.layers:
            hidden, some = layer(hidden, keep)
            extra = extra + some.square().mean()
        return self.head(hidden), extra


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cards", [1, 2, 3])
@pytest.mark.thinned(9)
def test_outputs_whose_rows_depend_on_the_data_are_put_together(cards: int, seed: int) -> None:
    words = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % WORDS
    drawn = torch.Generator().manual_seed(seed)
    keep = torch.rand(ROWS, LENGTH, generator=drawn) < 0.25  # 3 tokens of two rows, on average
    keep[seed % ROWS] = True
    losses = []
    for count in (0, cards):
        model = Chosen()
        if count:
            wrapped(model, count, chunk_rows=2)
        logits, extra = model(words, keep)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten()) + extra
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        losses.append((loss.detach(), {name: gradient.clone() for name, gradient in found.items()}))
    torch.testing.assert_close(losses[1][0], losses[0][0])
    assert_close(losses[1][1], losses[0][1])


@pytest.mark.parametrize("gradients", [True, False])
def test_every_block_that_drops_out_draws_from_the_first_cards_sequence(
    gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lend, lent = RandomState.lend, []
    monkeypatch.setattr(
        RandomState, "lend", lambda state, *cards: (lent.append(cards), lend(state, *cards))[1]
    )
    assert torch.equal(*(drawn(cards, "cpu", gradients=gradients) for cards in (1, 2)))
    blocks, passes = 4, 2
    assert len(lent) >= 2 * blocks * passes, "of one card and of two"
