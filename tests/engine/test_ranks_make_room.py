"""Ranks that give something up since device memory ran out in one of them give up the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from fluxtrain.core.ranks.exchange import Exchange
from fluxtrain.core.ranks.join import Ranks
from fluxtrain.errors import DoesNotFit
from fluxtrain.events import events as ev
from fluxtrain.train.live.settings import LiveSettings
from fluxtrain.train.requests import Requests
from tests.engine import ranks
from tests.engine.runs import MakeConfig, told, weights
from tests.on_cards import saved_with_demo_tokenizer

RUN: dict[str, Any] = {
    "train__steps": 3, "train__batch_rows": 4, "train__schedule": "constant",
    "train__evaluate_every": "end", "placement__offload": "weights", "placement__chunk_rows": 1,
    "placement__embedding": "rows", "placement__prefetch": 2,
}  # fmt: skip
Leaves = Callable[[LiveSettings, LiveSettings], bool]


def keeps_less(now: LiveSettings, new: LiveSettings) -> bool:
    """Whether some blocks keep activations no more, and nothing else changes."""
    kept, before = (one.value("blocks_without_recompute") for one in (new, now))
    return kept < before and new.value("resident_blocks") == now.value("resident_blocks")


def leaves_device(now: LiveSettings, new: LiveSettings) -> bool:
    return new.value("device_groups") < now.value("device_groups")


def nothing(*_: LiveSettings) -> bool:
    return False


def short(config: Path, run_dir: Path, how: list[str], for_what: Leaves, where: str = "") -> str:
    """A run whose last rank runs out of device memory in its second step, `where` its GPU is named,
    while the first has no host memory `for_what` could be given up."""
    rank, calls, begin = distributed.get_rank(), 0, Exchange.begin

    def runs_out(*arguments: Any) -> Any:
        nonlocal calls
        calls += rank
        if calls == 12:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB.{where}")
        return begin(*arguments)

    def refuse(_: object, now: LiveSettings, new: LiveSettings, __: object) -> None:
        if rank == 0 and for_what(now, new):
            raise DoesNotFit("it takes more host memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "begin", runs_out)
        patch.setattr("fluxtrain.train.live.changes.refuse_without_host_room", refuse)
        return ranks.train(config, run_dir, how)


@pytest.fixture
def config(run_config: MakeConfig, tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
             "num_key_value_heads": 2, "num_hidden_layers": 6}  # fmt: skip
    return run_config(model__path=str(saved_with_demo_tokenizer(tmp_path / "six", **sizes)), **RUN)


def test_what_one_rank_cannot_give_up_no_rank_does(config: Path, tmp_path: Path) -> None:
    how = ["placement.resident_blocks=4", "placement.blocks_without_recompute=2"]
    how += ["placement.device_groups=0", "parallel.params=shard"]
    ranks.together(2, ranks.train, tmp_path / "first", config, tmp_path / "roomy", how)
    ends = ranks.together(2, short, tmp_path / "ranks", config, tmp_path / "two", how, keeps_less)
    assert ends == ["0", "0"]
    (given_up,) = told(tmp_path / "two", ev.ChangeApplied)
    assert (given_up.name, given_up.before, given_up.after) == ("resident_blocks", 4, 2)
    roomy, found = weights(tmp_path / "roomy"), weights(tmp_path / "two")
    assert all(torch.equal(roomy[name], found[name]) for name in roomy)


@pytest.mark.parametrize("params", ["full", "shard"])
def test_ranks_of_several_cards_give_up_what_is_on_the_card_that_ran_out(
    config: Path, tmp_path: Path, params: str
) -> None:
    kind = "resident_blocks" if params == "shard" else "device_groups"
    how = [f"placement.{kind}=4", "parallel.cards=2", f"parallel.params={params}"]
    other = {"resident_blocks": "device_groups", "device_groups": "resident_blocks"}[kind]
    how += ["placement.blocks_without_recompute=0", f"placement.{other}=0"]
    ranks.together(2, ranks.train, tmp_path / "first", config, tmp_path / "roomy", how)
    given: list[Any] = [nothing, " GPU 1 has a total capacity of 8.00 GiB"]
    ends = ranks.together(2, short, tmp_path / "ranks", config, tmp_path / "two", how, *given)
    assert ends == ["0", "0"]
    (given_up,) = told(tmp_path / "two", ev.ChangeApplied)
    assert (given_up.name, given_up.card) == (kind, 1)
    roomy, found = weights(tmp_path / "roomy"), weights(tmp_path / "two")
    assert all(torch.equal(roomy[name], found[name]) for name in roomy)


@pytest.mark.parametrize("params", ["full", "shard"])
def test_ranks_end_where_one_has_nothing_left_to_give_up(
    config: Path, tmp_path: Path, params: str
) -> None:
    """An embedding on the device is exchanged whole, one on the host by the rows of a batch."""
    how = ["placement.device_groups=1", "placement.resident_blocks=0"]
    how += ["placement.blocks_without_recompute=0", f"parallel.params={params}"]
    ends = ranks.together(
        2, short, tmp_path / "ranks", config, tmp_path / "two", how, leaves_device
    )
    assert all(end.startswith("3: device memory ran out at step 2") for end in ends), ends
    assert (tmp_path / "two" / "checkpoints" / "step-00000001").exists()


def asked(config: Path, run_dir: Path, how: list[str]) -> tuple[str, list[str]]:
    """A run whose first rank is asked, before its first step, to have nothing on the device."""
    answers: list[str] = []
    agree = Requests.agree

    def ask(requests: Requests, ranks: Ranks) -> None:
        if ranks.is_first and not answers:
            answers.append(requests.handle("apply", {"device_groups": 0})[1])
        agree(requests, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Requests, "agree", ask)
        return ranks.train(config, run_dir, how), answers


def test_a_rank_alone_lets_nothing_leave_the_device_when_asked(
    config: Path, tmp_path: Path
) -> None:
    how = ["placement.device_groups=1", "placement.resident_blocks=0"]
    first, other = ranks.together(2, asked, tmp_path / "ranks", config, tmp_path / "two", how)
    assert (first[0], other) == ("0", ("0", []))
    assert "2 processes exchange" in first[1][0]
