"""What the engine draws for itself (probes, checks, small models) is drawn from generators of its
own: a loop that draws its batches as torch does gets those of the plain loop."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from tests.on_cards import batch, llama

PACKAGE = Path(fluxtrain.__file__).parent
DRAWS = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal",
    "bernoulli", "multinomial", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
}  # fmt: skip


def undisturbed(run: Callable[[], object]) -> bool:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run()
    return torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("cards", [1, 2])
def test_wrapping_and_a_step_draw_nothing(cards: int) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        fluxtrain.wrap(model, device="cpu", cards=cards, chunk_rows=2)
        model(**batch()).loss.backward()
        optimizer.step()
        engine_of(model).flush()

    assert undisturbed(step)


def drawing_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if "learn" in path.parts:  # checks of a learner's file, in a process of their own
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                where = node.func.value
                if node.func.attr in DRAWS and not (
                    isinstance(where, ast.Name) and where.id in ("np", "random")
                ):
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_draw_names_its_generator() -> None:
    found = list(drawing_calls())
    assert found  # the search works
    without = [place for place, call in found if "generator" not in {k.arg for k in call.keywords}]
    assert without == []
