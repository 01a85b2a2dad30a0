"""Several processes that train one wrapped model: equal weights, those of one process."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

import fluxtrain
from fluxtrain.config.schema import validate
from fluxtrain.core.device.arena import HostArena
from fluxtrain.core.ranks import join
from fluxtrain.core.ranks.exchange import Exchange, Link, add_in_order
from fluxtrain.core.ranks.shared_memory import SharedMemory
from fluxtrain.core.wrap import wrap
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import BadInput, MisusedModel
from fluxtrain.plan.request import Params, PlacementRequest
from fluxtrain.train.ranks import train_as_rank
from fluxtrain.train.run import of_rank
from tests.engine.ranks import together
from tests.on_cards import ROWS, batch, llama

WORLD = 2
STEPS = 3
DTYPE = torch.float32  # whose roundings are far below what a step changes
Weights = dict[str, torch.Tensor]


def rows_of(step: int, rank: int | None = None, world: int = WORLD) -> dict[str, torch.Tensor]:
    """The rows of one step; of a rank its share."""
    every, share = batch(step), ROWS // world
    own = slice(None) if rank is None else slice(share * rank, share * (rank + 1))
    return {name: rows[own] for name, rows in every.items()}


def rank_here() -> int | None:
    return distributed.get_rank() if distributed.is_initialized() else None


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    dtype = torch.bfloat16 if kind == "bf16" else DTYPE
    model = llama(2, tied=kind == "tied", dtype=dtype, width=128 if kind == "bf16" else 32)
    if kind == "lora":
        torch.manual_seed(rank_here() or 0)  # adapters differ, and rank 0's are taken
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def trained(kind: str, how: str = "plain", **options: Any) -> Weights:
    """The weights after a loop that a user may have written, in a rank or alone."""
    rank = rank_here()
    alone = rank is None
    world = WORLD if alone else distributed.get_world_size()
    model = fluxtrain.wrap(model_of(kind), device="cpu", **options)
    parallel = DistributedDataParallel(model) if how in ("ddp", "no_sync") and not alone else model
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    for step in range(STEPS):
        rows = rows_of(step, rank, world)
        passes = [rows]
        if how in ("no_sync", "accumulated"):
            passes = [{k: v[one::2] for k, v in rows.items()} for one in (0, 1)]
        for place, part in enumerate(passes):
            waits = how == "no_sync" and not alone and place + 1 < len(passes)
            with parallel.no_sync() if waits else nullcontext():
                loss = parallel(**part).loss / len(passes)
                if how == "in_backward":
                    engine_of(model).begin_step_in_backward(optimizer, loss)
                loss.backward()
        if how != "in_backward":
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def several(cases: list[tuple[str, str, dict[str, Any]]]) -> list[Weights]:
    return [trained(kind, how, **options) for kind, how, options in cases]


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("full", "plain", {}),
    ("full", "ddp", {"offload": "none"}),
    ("full", "no_sync", {}),
    ("full", "accumulated", {"offload": "max"}),
    ("tied", "no_sync", {"placement": PlacementRequest(embedding="rows", head="chunks")}),
    ("full", "accumulated", {"placement": PlacementRequest(embedding="rows", offload="weights")}),
    ("lora", "ddp", {}),
    ("full", "plain", {"cards": 2}),
    ("tied", "no_sync", {"cards": 2, "offload": "weights"}),
]


def test_ranks_have_equal_weights_and_those_of_one_process(tmp_path: Path) -> None:
    found = together(WORLD, several, tmp_path, CASES)
    for place, (kind, how, options) in enumerate(CASES):
        first, second = (one[place] for one in found)
        assert all(torch.equal(first[name], second[name]) for name in first)
        alone = trained(kind, how, **options)
        before = {name: p.detach() for name, p in model_of(kind).named_parameters()}
        moved = sum(float((alone[n] - before[n]).abs().sum()) for n in alone)
        apart = sum(float((alone[n] - first[n]).abs().sum()) for n in alone)
        assert moved and apart < 1e-3 * moved, (kind, how, apart / moved)


def shared(
    cases: list[tuple[str, str, dict[str, Any]]], params: Params | None, on_host: bool = False
) -> list[Weights]:
    """What `several` returns, of ranks that hold each group once in their machine's memory."""
    with pytest.MonkeyPatch.context() as patch:
        share(patch, params, on_host)
        return several(cases)


def on_two_machines(cases: list[tuple[str, str, dict[str, Any]]]) -> list[Weights]:
    """What `shared` returns, of two ranks on each of two machines."""
    with pytest.MonkeyPatch.context() as patch:
        machine = f"machine {distributed.get_rank() // 2}"
        patch.setattr(join, "_machine", lambda: machine)
        return shared(cases, "full")


@pytest.mark.slow
def test_each_machine_holds_the_weights_of_its_ranks_once(tmp_path: Path) -> None:
    cases: list[tuple[str, str, dict[str, Any]]] = [("bf16", "plain", {}), ("lora", "ddp", {})]
    each = together(4, shared, tmp_path / "each", cases, None)
    for found in together(4, on_two_machines, tmp_path / "once", cases):
        for one, other in zip(each[0], found, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def share(patch: pytest.MonkeyPatch, params: Params | None, on_host: bool = False) -> None:
    how = partial(Exchange, order="fixed", params=params, on_host=on_host)
    patch.setattr(wrap, "_exchange", how)


@pytest.mark.parametrize(
    ("world", "every"),
    [
        (2, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_weights_that_ranks_share_have_the_bits_of_those_that_each_holds(
    tmp_path: Path, world: int, every: bool
) -> None:
    """Each rank updates its ranges alone, and reads those of the others once they are updated."""
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("tied", "plain", {"placement": PlacementRequest(embedding="rows", head="chunks")}),
        ("lora", "plain", {"frozen": "nf4"}),
        ("bf16", "in_backward", {}),
        ("bf16", "plain", {"states": "8bit"}),
        ("bf16", "plain", {"cards": 2}),
    ]
    if every:
        # `fluxtrain train` exchanges the last backward pass of a step alone
        cases += [case for case in CASES if case[1] != "accumulated"]
        cases += [("bf16", "plain", {"states": "fp32"})]
    each = together(world, shared, tmp_path / "each", cases, None)
    for found in together(world, shared, tmp_path / "once", cases, "full"):
        for place, (kind, how, options) in enumerate(cases):
            one, other = each[0][place], found[place]
            assert all(torch.equal(one[name], other[name]) for name in one), (kind, how, options)
    first, *others = together(world, shared, tmp_path / "host", cases, "full", True)
    for place, (kind, how, options) in enumerate(cases):
        one, added = each[0][place], first[place]
        assert all(torch.equal(added[name], found[place][name]) for found in others for name in one)
        apart = sum(float((one[name].double() - added[name].double()).abs().sum()) for name in one)
        whole = sum(float(one[name].abs().sum()) for name in one)
        # torch's norm of bf16 on processors is 6e-6 off, and steps multiply what clipping rounds
        assert apart <= (0.0 if how == "in_backward" else 5e-4 * whole), (kind, how, options)


def resident_bytes() -> dict[str, int]:
    """The pages of this rank's groups after a step: those of all ranks, and its own."""
    with pytest.MonkeyPatch.context() as patch:
        share(patch, "full")
        model = fluxtrain.wrap(llama(2, width=768), device="cpu", offload="weights")
    optimizer = torch.optim.AdamW(model.parameters())
    model(**rows_of(0, distributed.get_rank())).loss.backward()
    optimizer.step()
    engine_of(model).flush()
    found = {"weights": 0, "state": 0, "gradients": 0}
    for group in engine_of(model).groups:
        for kind, arenas in group.memory._arenas.items() if group.kind == "block" else ():
            found[kind] += sum(pages_of(arena) * mmap.PAGESIZE for arena in arenas)
    assert "/memfd:fluxtrain (deleted)" in Path("/proc/self/maps").read_text()
    blocks = [group for group in engine_of(model).groups if group.kind == "block"]
    return found | {"trained": sum(group.trained_elements for group in blocks)}


def pages_of(arena: HostArena) -> int:
    count = -(-arena.size_bytes // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * count)()
    size = ctypes.c_size_t(count * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(arena.address), size, resident) == 0
    return sum(one & 1 for one in resident)


def test_ranks_hold_each_group_once_in_all(tmp_path: Path) -> None:
    """Two bytes a parameter that they share, and their parts of the other twelve."""
    found = together(WORLD, resident_bytes, tmp_path)
    trained = found[0]["trained"]
    assert found[0]["weights"] == pytest.approx(2 * trained, rel=0.05)
    assert sum(one["state"] for one in found) == pytest.approx(10 * trained, rel=0.25)  # huge pages
    assert sum(one["gradients"] for one in found) == pytest.approx(2 * trained, rel=0.25)


def misused() -> None:
    rank = distributed.get_rank()
    with pytest.raises(BadInput, match="the model is .* in rank 0 and .* in rank 1"):
        fluxtrain.wrap(llama(2 + rank), device="cpu")
    torch.manual_seed(rank)
    frozen = model_of("lora").base_model.model.requires_grad_(False)
    frozen.lm_head.requires_grad_(True)
    with torch.no_grad():
        next(p for p in frozen.parameters() if not p.requires_grad).add_(rank)
    with pytest.raises(BadInput, match="frozen weights of .* are not those of the other"):
        fluxtrain.wrap(frozen, device="cpu")
    with pytest.raises(BadInput, match="number of cards is 1 in rank 0 and 2 in rank 1 of 2: give"):
        fluxtrain.wrap(llama(2), device="cpu", cards=1 + rank)
    model = fluxtrain.wrap(llama(2), device="cpu")
    parallel, before = DistributedDataParallel(model), next(model.parameters()).detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    with parallel.no_sync():
        parallel(**batch()).loss.backward()
    with pytest.raises(MisusedModel, match="inside no_sync"):
        optimizer.step()
    assert torch.equal(before, next(model.parameters()))


def test_ranks_that_cannot_train_together_are_refused(tmp_path: Path) -> None:
    together(WORLD, misused, tmp_path)


def by_trainer(folder: Path) -> Weights:
    """The weights after steps of Hugging Face's Trainer, unchanged, in a rank or alone."""
    rank, rows = rank_here(), [{k: v[0] for k, v in batch(step).items()} for step in range(24)]
    if rank is not None:
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_PORT": 1}
        os.environ |= {name: str(value) for name, value in told.items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=3, use_cpu=True, report_to=[],
        per_device_train_batch_size=ROWS // (1 if rank is None else WORLD), learning_rate=1e-3,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    assert arguments.world_size == (1 if rank is None else WORLD)
    model = fluxtrain.wrap(model_of("full"), device="cpu")
    Trainer(model, arguments, train_dataset=rows).train()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_trainer_trains_one_model_in_two_processes(tmp_path: Path) -> None:
    first, second = together(WORLD, by_trainer, tmp_path / "ranks", tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)
    alone, before = by_trainer(tmp_path), dict(model_of("full").named_parameters())
    with torch.no_grad():
        moved = sum(float((alone[n] - before[n]).abs().sum()) for n in alone)
        apart = sum(float((alone[n] - first[n]).abs().sum()) for n in alone)
    assert moved and apart < 1e-3 * moved


LANES = 4


class Lanes(Exchange):
    """Adds up what one process computes for several ranks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._links = [Link(None)]
        self.kept: list[list[torch.Tensor]] = []

    def begin_lane(self) -> None:
        self.kept.append([])

    def finishes(self) -> bool:
        return True

    def add_up(self, link: Link, flat: torch.Tensor) -> None:
        self.kept[-1].append(flat.clone())
        if len(self.kept) == LANES:
            place = len(self.kept[-1]) - 1
            flat.copy_(add_in_order(lane[place].clone() for lane in self.kept).mul_(1 / LANES))


class Slow(Exchange):
    """Takes as long for the sums of blocks as the next one needs to begin."""

    def __init__(self, elements: int, goes_on: threading.Event) -> None:
        super().__init__()
        self._links = [Link(None)]
        self.elements, self.goes_on, self.met = elements, goes_on, 0

    def finishes(self) -> bool:
        return True

    def add_up(self, link: Link, flat: torch.Tensor) -> None:
        self.met += flat.numel() == self.elements and self.goes_on.wait(60.0)


def test_a_block_computes_backward_while_the_sum_of_the_one_before_is_exchanged() -> None:
    model = fluxtrain.wrap(llama(2, dtype=DTYPE), device="cpu", offload="weights")
    first = next(unit for unit in engine_of(model).units if unit.group.kind == "block")
    goes_on = threading.Event()
    first.module.self_attn.v_proj.register_full_backward_hook(lambda *_: goes_on.set())
    slow = Slow(first.group.trained_elements, goes_on)
    engine_of(model).cards[0].gradients.host.exchange = slow
    model(**rows_of(0)).loss.backward()
    assert slow.met == 2
    assert all(p.grad is not None for p in model.parameters())


class Queue:
    """A stream that records what it is given to do."""

    def __init__(self, told: list[str], name: str) -> None:
        self.told, self.name = told, name

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"{self.name} at {len(self.told)}"


def test_streams_take_turns_with_the_memory_that_sums_of_a_card_are_added_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks on two lanes, and code between blocks, wait for no work of each other."""
    told: list[str] = []
    queues = [Queue(told, "beside"), Queue(told, "lane"), Queue(told, "beside")]
    adding, left = Exchange(order="fixed"), iter(queues)
    adding.ranks = join.Ranks(world=3)
    link = Link(None, room=torch.zeros(24))
    monkeypatch.setattr("fluxtrain.core.ranks.exchange._queue_of", lambda _: next(left))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, queue: told.append(f"{queue.name} has the room")
    )
    monkeypatch.setattr(Exchange, "_add_in_order", lambda *_: told.append("adds"))
    for _ in queues:
        adding.add_up(link, torch.zeros(4))
    assert told == [
        "beside has the room", "adds",
        "lane waits for beside at 2", "lane has the room", "adds",
        "beside waits for lane at 5", "beside has the room", "adds",
    ]  # fmt: skip


def in_order(kind: str) -> Weights:
    """The weights after steps whose gradients are added in the order of ranks, in bf16."""
    rank, lanes = rank_here(), Lanes()
    torch.manual_seed(3)
    model = fluxtrain.wrap(llama(2, tied=kind == "tied"), device="cpu", chunk_rows=1)
    engine = engine_of(model)
    if rank is None:
        engine.exchange = engine.cards[0].gradients.host.exchange = lanes
    else:
        engine.exchange._order = "fixed"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        lanes.kept.clear()
        for lane in range(LANES) if rank is None else [rank]:
            lanes.begin_lane()
            engine.forget_gradients()
            model(**rows_of(step, lane, LANES)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "tied"])
def test_four_ranks_have_the_bits_of_one_process_that_adds_in_their_order(
    tmp_path: Path, kind: str
) -> None:
    found = together(LANES, in_order, tmp_path, kind)
    alone = in_order(kind)
    assert all(torch.equal(one[name], alone[name]) for one in found for name in alone)


def test_a_machine_that_refuses_shared_memory_is_told_with_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(BadInput, match="Operation not permitted.*parallel.params=shard"):
        SharedMemory(join.Ranks())


def test_ranks_that_start_again_meet_in_a_part_of_the_store_of_their_own() -> None:
    store, found = distributed.HashStore(), dict[tuple[int, int], Any]()

    def joins(start: int, rank: int) -> None:
        if start and not rank:
            time.sleep(0.3)  # the others read the name of the start before
        mine = join.store_of_start(store, rank, 3)
        mine.set(str(rank), str(start))
        found[start, rank] = [mine.get(str(other)) for other in range(3)]

    for start in range(2):
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(joins, [start] * 3, range(3)))
    assert found == {(start, rank): [b"%d" % start] * 3 for start in range(2) for rank in range(3)}


def test_two_ranks_of_a_machine_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathers(*every: tuple[str, list[str]]) -> join.Ranks:
        monkeypatch.setattr(join.Ranks, "gather", lambda *_: list(every))
        return join.Ranks(world=3)

    first, second = ("one", ["GPU-1", "GPU-2"]), ("one", ["GPU-3"])
    gathers(first, second, ("other", ["GPU-1"])).refuse_shared_gpu([])
    with pytest.raises(BadInput, match=r"rank 0 and rank 2 of 3 have one GPU .* \(GPU-2\)"):
        gathers(first, second, ("one", ["GPU-4", "GPU-2"])).refuse_shared_gpu([])


def threads_of_backward() -> list[bool]:
    """Whether torch may run backward on a thread for each card: before, while a model of one card
    and of two is wrapped, and after."""
    found = [torch._C._is_multithreading_enabled()]
    for cards in (1, 2):
        model = fluxtrain.wrap(llama(2), device="cpu", cards=cards)
        found.append(torch._C._is_multithreading_enabled())
        fluxtrain.unwrap(model)
    return [*found, torch._C._is_multithreading_enabled()]


def test_one_thread_computes_backward_on_all_cards_of_a_rank(tmp_path: Path) -> None:
    """Graphs with branches would else send in the order in which threads come by."""
    assert together(2, threads_of_backward, tmp_path) == [[True, True, False, True]] * 2


def bound() -> list[Any]:
    """To which card the group of a rank whose own group is bound to one is bound."""
    world: Any = distributed.group.WORLD
    first = torch.device("cuda", 0)  # as init_process_group(device_id=...) does
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        ranks = join.joined()
        patch.setattr(distributed, "new_group", lambda **_: seen.append(world.bound_device_id))
        world.bound_device_id = first
        ranks.device_group(torch.device("cuda", 1))
    seen.append(world.bound_device_id == first)
    world.bound_device_id = None
    return seen


def test_the_group_of_a_card_is_bound_to_no_other_one(tmp_path: Path) -> None:
    """NCCL refuses tensors of another card than that which a group is bound to."""
    assert together(2, bound, tmp_path) == [[None, True]] * 2


def test_each_rank_has_as_many_gpus_as_it_is_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [list(join.gpus_of_rank(rank, 2)) for rank in (0, 1)] == [[0, 1], [2, 3]]
    assert [list(join.gpus_of_rank(rank)) for rank in range(4)] == [[0], [1], [2], [3]]
    assert list(join.gpus_of_rank(1, 4)) == [0, 1, 2, 3]  # each is shown its own
    with pytest.raises(BadInput, match="to compute on 5 cards, and this one sees 4"):
        join.gpus_of_rank(0, 5)


def test_parts_of_the_processor_are_no_gpus_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = validate({"placement": {"device": "cpu"}, "parallel": {"cards": 2}})
    assert of_rank(config, join.Ranks(world=2, local_world=2)).parallel.cards == 2
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):  # no word of too few GPUs
        train_as_rank(config, Mock(), Mock())
