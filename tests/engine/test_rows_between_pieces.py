"""A table whose update has begun gives its rows between two pieces of it, with the same bits."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fluxtrain.gradients.embedding_sum import EmbeddingSum
from fluxtrain.gradients.host_gradients import Arrival
from fluxtrain.memory.group import Group
from fluxtrain.stream import updates
from fluxtrain.stream.updates import Updates
from tests.engine.deferred_models import GIVEN_UP_S
from tests.engine.row_models import HIDDEN, Watch, equal, inputs, llama, trained, wrapped
from tests.engine.slow_device import slowed
from tests.engine.test_rows_ahead import CASES, Held, stepped, table_after

PIECE, PIECES = 256, 3  # rows of a piece at most: the tables have 600


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a GPU, and of so small tables."""

    def first_piece(_: Updates, group: Group) -> int | None:
        return PIECE * group.members[0].shape[1] if group.rows is not None else None

    monkeypatch.setattr(Updates, "_first_piece", first_piece)


class UnderWay:
    """A model whose table is in a piece of its update (from 1), until somebody asks for rows."""

    def __init__(self, case: str, monkeypatch: pytest.MonkeyPatch, piece: int = 2) -> None:
        dtype, options = CASES[case]
        options = dict(options)
        passes, width = options.pop("passes", 1), options.pop("hidden_size", HIDDEN)
        model = llama(dtype, hidden_size=width)
        self.engine = wrapped(model, "rows", **options)
        optimizer = stepped(model, self.engine, passes=passes)
        self.engine.flush()
        self.watch = Watch(self.engine, monkeypatch)
        reached = self.watch.hold_piece(piece)
        optimizer.step()
        optimizer.zero_grad()
        assert reached.wait(GIVEN_UP_S)
        self.embed: Any = model.get_input_embeddings()  # type: ignore[operator]


def test_only_a_table_beside_a_gpu_is_cut_and_no_row_or_block_of_states_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    updates_of: Any = wrapped(llama(), "rows").updates
    table, block, *_ = groups = wrapped(llama(hidden_size=96), "rows").groups
    assert [updates_of._first_piece(group) for group in groups] == [None] * len(groups)
    updates_of._shares_cores = False
    assert updates_of._first_piece(block) is None
    assert updates_of._first_piece(table) == 174_592 * 96  # 682 blocks of 256 rows
    monkeypatch.setattr(updates, "FIRST_PIECE_ELEMENTS", 1)
    assert updates_of._first_piece(table) == 256 * 96


@pytest.mark.parametrize("case", CASES)
def test_whoever_asks_waits_for_one_piece_and_has_the_bits_of_the_whole(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, options = CASES[case]
    expected, ids = table_after(dtype, **dict(options)), inputs(9)["input_ids"]
    assert int(ids.min()) < PIECE
    assert int(ids.max()) >= 2 * PIECE  # of every piece
    one = UnderWay(case, monkeypatch)
    found = one.embed(ids)
    one.engine.flush()
    assert one.watch.seen == ["piece", "piece", "rows", "piece"]
    assert torch.equal(found, expected[ids])
    assert torch.equal(one.embed.weight.detach(), expected)


@pytest.mark.parametrize("piece", [1, 2])
@pytest.mark.parametrize("ids", [[[0, PIECE - 1]], [[PIECE, 599]], [[599]]])
def test_rows_may_all_be_written_or_none_of_them(
    ids: list[list[int]], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, rows = table_after(torch.bfloat16), torch.tensor(ids)
    one = UnderWay("bf16", monkeypatch, piece)
    assert torch.equal(one.embed(rows), expected[rows])
    one.engine.flush()
    assert one.watch.seen == ["piece"] * piece + ["rows"] + ["piece"] * (PIECES - piece)


def test_after_the_last_piece_the_table_has_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, ids = table_after(torch.bfloat16), inputs(9)["input_ids"]
    one = UnderWay("bf16", monkeypatch, PIECES)
    assert torch.equal(one.embed(ids), expected[ids])
    assert one.watch.seen[:PIECES] == ["piece"] * PIECES


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_update_goes_on_when_whoever_asked_was_interrupted(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, ids = table_after(torch.bfloat16), inputs(9)["input_ids"]
    one = UnderWay("bf16", monkeypatch)

    def fail() -> None:
        one.watch.in_rows = lambda: None
        raise error

    one.watch.in_rows = fail
    with pytest.raises(error):
        one.embed(ids)
    assert torch.equal(one.embed(ids), expected[ids])
    one.engine.flush()
    assert torch.equal(one.embed.weight.detach(), expected)


@pytest.mark.parametrize("piece", [1, 2])
def test_a_piece_that_fails_after_rows_were_given_fails_the_update(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = UnderWay("bf16", monkeypatch, piece)

    def fail() -> None:
        raise ArithmeticError("on the way")

    one.watch.in_piece = fail  # in the next one
    one.embed(inputs(9)["input_ids"])
    with pytest.raises(ArithmeticError):
        one.engine.groups[0].wait_for_weights()
    assert one.watch.seen == ["piece"] * piece + ["rows", "piece"]


def test_rows_of_a_table_that_failed_half_way_are_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama()
    engine = wrapped(model, "rows")
    optimizer = stepped(model, engine)
    engine.flush()
    watch, failed = Watch(engine, monkeypatch), threading.Event()

    def fail() -> None:
        if len(watch.seen) == 2:
            failed.set()
            raise ArithmeticError("on the way")

    watch.in_piece = fail
    optimizer.step()
    assert failed.wait(GIVEN_UP_S)
    with pytest.raises(ArithmeticError):
        model.get_input_embeddings()(inputs(9)["input_ids"])  # type: ignore[operator]
    assert watch.seen == ["piece", "piece"]


def test_whoever_asks_while_an_eager_steps_last_gradients_come_home_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table's update waits for the same gradients."""
    model = llama()
    engine = wrapped(model, "rows", eager=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    device: Any = engine.device
    wait, send, driver = Arrival.wait, EmbeddingSum._download, threading.current_thread()
    come, waits, has_them = threading.Event(), threading.Event(), threading.Event()
    held: list[Arrival] = []

    def sent(*args: Any, **more: Any) -> Arrival:
        device._down.submit(lambda: come.wait(GIVEN_UP_S))
        held.append(send(*args, **more))
        return held[-1]

    def waited(arrival: Arrival) -> None:
        if arrival not in held:
            wait(arrival)
        elif threading.current_thread() is driver:
            assert waits.wait(GIVEN_UP_S), "the update does not wait for its gradients"
            come.set()
            wait(arrival)
            assert has_them.wait(GIVEN_UP_S)
        else:
            waits.set()
            wait(arrival)
            has_them.set()

    loss = model(**inputs(0)).loss
    engine.begin_eager_step(optimizer, loss)
    monkeypatch.setattr(EmbeddingSum, "_download", sent)
    monkeypatch.setattr(Arrival, "wait", waited)
    loss.backward()
    watch = Watch(engine, monkeypatch)
    optimizer.step()
    optimizer.zero_grad()
    model.get_input_embeddings()(inputs(1)["input_ids"])  # type: ignore[operator]
    engine.flush()
    assert watch.seen == ["rows", "piece", "piece", "piece"]


@pytest.mark.parametrize("its_turn", [False, True])
def test_rows_take_the_threads_of_the_update_that_gives_way_to_them(
    its_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    engine = wrapped(model, "rows")
    engine.updates._threads = 2
    optimizer = stepped(model, engine)
    engine.flush()
    watch = Watch(engine, monkeypatch)
    reached = watch.hold_piece(1)
    with nullcontext() if its_turn else Held(engine):
        optimizer.step()
        assert not its_turn or reached.wait(GIVEN_UP_S)
        model.get_input_embeddings()(inputs(9)["input_ids"])  # type: ignore[operator]
    engine.flush()
    assert watch.threads == [2 if its_turn else None]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_training_keeps_its_bits(
    tied: bool, eager: bool, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where copies and updates are late, in several ways."""
    expected = trained(llama(tie_word_embeddings=tied), "whole", eager=eager)
    if seed is not None:
        slowed(monkeypatch, seed)
    equal(trained(llama(tie_word_embeddings=tied), "rows", eager=eager), expected)
