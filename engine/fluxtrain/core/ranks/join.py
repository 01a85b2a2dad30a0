"""Join the processes that train together, and agree with them on numbers.

torchrun, accelerate launch, Slurm and others start the processes ("ranks") and set the variables by
which torch.distributed joins them. Every method of `Ranks` is a collective: all ranks call it, in
the same order. Each engine and each lane that calls has process groups of its own, since two
threads must never call within one.
"""

from __future__ import annotations

import datetime
import functools
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fluxtrain.core.ranks.cores import bind
from fluxtrain.errors import BadInput, FluxTrainError, MisusedModel, RankLost
from fluxtrain.events.run_folder.process import boot_id, start_ticks

T = TypeVar("T")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NOTICE_S = 2.0  # until the process of a rank that has closed its connections is gone
_START, _LOOK_S = "fluxtrain/start", 0.05
# a rank waits so long for another, which may be writing a large model
LONGEST_WAIT = datetime.timedelta(minutes=30)


@dataclass(frozen=True, eq=False, kw_only=True)
class Ranks:
    """The processes that train one model, as this one sees them; without a group it is alone."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # among those of this machine
    local_world: int = 1
    host: Any = None  # gloo process group, for numbers and for host memory
    processes: tuple[tuple[str, int], ...] = ()  # machine and process id of each rank
    trained: threading.Event = field(default_factory=threading.Event)  # none is needed any more

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes what one process must write."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum over ranks of each value, as fp64 adds them."""
        return self._reduced(values, torch.float64, distributed.ReduceOp.SUM)

    def most(self, values: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' values, at each place."""
        return self._reduced(values, torch.int64, distributed.ReduceOp.MAX)

    def _reduced(self, values: Sequence[Any], dtype: torch.dtype, how: Any) -> list[Any]:
        if self.world == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=dtype)
        distributed.all_reduce(numbers, how, group=self.host)
        return list(numbers.tolist())

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of ranks; values are pickled."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, value, group=self.host)
        return found

    def of_first(self, value: T) -> T:
        """Return the value of rank 0, whatever the others give."""
        if self.world == 1:
            return value
        found: list[Any] = [value if self.is_first else None]
        distributed.broadcast_object_list(found, 0, group=self.host)
        return found[0]  # type: ignore[no-any-return]

    def refuse_others(self, facts: Mapping[str, Any], cure: str) -> None:
        """Raise BadInput on every rank where a fact is not the same on all of them."""
        for name, values in _by_name(self.gather(dict(facts))).items():
            other = next((rank for rank, one in enumerate(values) if one != values[0]), None)
            if other is not None:
                raise BadInput(
                    f"{name} is {values[0]!s:.200} in rank 0 and {values[other]!s:.200} in rank "
                    f"{other} of {self.world}: {cure}"
                )

    def refuse_other_count(self, cards: int) -> None:
        """Raise BadInput on every rank where not all compute on so many cards: a card of one sends
        to the same card of each other."""
        cure = "give each process as many (cards, of a run parallel.cards)"
        self.refuse_others({"the number of cards": cards}, cure)

    def end_training(self) -> None:
        """Wait for all ranks to have trained; what follows they do for themselves."""
        self.most([0])
        self.trained.set()

    def ended(self) -> list[int]:
        """Return the ranks of this machine whose processes have ended."""
        here = _machine()
        return [
            rank
            for rank, (machine, process) in enumerate(self.processes)
            if machine == here and start_ticks(process) is None
        ]

    @property
    def may_share_memory(self) -> bool:
        """Return whether there are machines with several ranks, which can share memory."""
        machines = {machine for machine, _ in self.processes}
        return len(machines) < self.world and hasattr(os, "memfd_create")

    def of_machine(self) -> Ranks:
        """Return the ranks of this machine alone, as ranks of their own; all ranks ask at once."""
        machines = [machine for machine, _ in self.processes]
        found: Any = None
        for machine in dict.fromkeys(machines):
            mates = [rank for rank, one in enumerate(machines) if one == machine]
            group = distributed.new_group(mates, backend="gloo", timeout=_group_timeout())
            found = group if self.rank in mates else found
        processes = tuple(one for one in self.processes if one[0] == machines[self.rank])
        places: dict[str, Any] = {"rank": self.local_rank, "world": self.local_world}
        return replace(self, host=found, processes=processes, **places)

    def own(self, batches: Sequence[T]) -> Sequence[T]:
        """Return this rank's share of a step's batches, of which each rank has as many."""
        each = len(batches) // self.world
        return batches[self.rank * each : (self.rank + 1) * each]

    def device_group(self, device: torch.device) -> Any:
        """Make one more process group for tensors of a device: NCCL where the ranks' own group has
        it for that device, else gloo."""
        backend = "nccl" if _is_of_nccl(device) else "gloo"
        world: Any = distributed.group.WORLD
        # init_process_group(device_id=...) would bind it to that card, which may be another
        bound, world.bound_device_id = world.bound_device_id, None
        try:
            return distributed.new_group(backend=backend, timeout=_group_timeout())
        finally:
            world.bound_device_id = bound

    def refuse_shared_gpu(self, gpus: Sequence[str]) -> None:
        """Raise BadInput where two ranks of a machine have one of their `gpus` between them, by
        their UUIDs, which NCCL does not allow."""
        users: dict[tuple[str, str], int] = {}
        for rank, (machine, mine) in enumerate(self.gather((_machine(), tuple(gpus)))):
            for gpu in mine:
                if (other := users.setdefault((machine, gpu), rank)) < rank:
                    raise BadInput(
                        f"rank {other} and rank {rank} of {self.world} have one GPU between them "
                        f"({gpu}): start no more processes on a machine than it has GPUs for them "
                        "(parallel.processes, or torchrun's --nproc_per_node), each with as many "
                        "as parallel.cards says"
                    )


ALONE = Ranks()


def world_size() -> int:
    """Return how many processes the group of torch.distributed has; 1 where none was joined."""
    there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if there else 1


def launched_world() -> int:
    """Return how many processes a launcher has started, by its variables; 1 without one."""
    told = os.environ.get("WORLD_SIZE", "")
    return int(told) if told.isdecimal() else 1


def joined() -> Ranks:
    """Return the ranks of the process group that this process is in, or that it is alone.

    Raises MisusedModel where a launcher started several processes and none joined yet.
    """
    if world_size() == 1:
        if launched_world() > 1:
            raise MisusedModel(
                f"this is one of {launched_world()} processes (WORLD_SIZE), and they are not "
                "joined yet: call torch.distributed.init_process_group() before fluxtrain.wrap "
                "(with Hugging Face's Trainer, make its TrainingArguments before; with accelerate "
                "its Accelerator), or start one process, which uses all cards"
            )
        return ALONE
    return _ranks_of(distributed.group.WORLD)


def join_launched(cards: int = 1) -> Ranks:
    """Join the processes that a launcher has started, by its variables; without one be alone.

    The first of a rank's `cards` GPUs is made torch's current one, and it keeps to its share of
    the cores. Raises BadInput for a lack of variables.
    """
    if launched_world() == 1 or world_size() > 1:
        return joined()
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise BadInput(
            f"this is one of {launched_world()} processes (WORLD_SIZE), and {', '.join(missing)} "
            "must be set for them to meet: start them with torchrun, which sets all, or see "
            "docs/processes.md for other launchers"
        )
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        local = os.environ.get("LOCAL_RANK", "0")
        torch.cuda.set_device(gpus_of_rank(int(local) if local.isdecimal() else 0, cards)[0])
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    store, rank, world = next(rendezvous("env://", timeout=LONGEST_WAIT))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store = store_of_start(store, rank, world)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=LONGEST_WAIT
    )
    ranks = joined()
    if threads := bind(ranks.local_rank, ranks.local_world):
        torch.set_num_threads(threads)
    return ranks


def store_of_start(store: Any, rank: int, world: int) -> Any:
    """Return a part of torchrun's store that all ranks of this start use, and none of an earlier
    one: torchrun keeps its store over restarts, with addresses of processes that have ended.

    The first rank names the start and answers each other one; who read an earlier name gets no
    answer and reads again. (Counts of restarts differ between nodes.)
    """
    if rank == 0:
        start = secrets.token_hex(8)
        store.set(_START, start)
        for other in range(1, world):
            asked = store.get(f"{_START}/{start}/{other}").decode()
            store.set(f"{_START}/{asked}", "met")
        return PrefixStore(start, store)
    mine, until_s = secrets.token_hex(8), time.monotonic() + LONGEST_WAIT.total_seconds()
    while time.monotonic() < until_s:
        start = store.get(_START).decode()
        store.set(f"{_START}/{start}/{rank}", mine)
        if store.check([f"{_START}/{mine}"]):
            return PrefixStore(start, store)
        time.sleep(_LOOK_S)
    raise RankLost("rank 0 did not answer at the start: see its log")


def gpus_of_rank(local_rank: int, cards: int = 1) -> range:
    """Return the numbers of the `cards` GPUs that a rank computes on, of those that torch sees: a
    launcher may show each rank its own alone. Raises BadInput where torch sees fewer."""
    there = torch.cuda.device_count()
    if cards > there:
        raise BadInput(
            f"a process is to compute on {cards} cards, and this one sees {there}: use at most "
            f"{there} (parallel.cards)"
        )
    first = local_rank % (there // cards) * cards
    return range(first, first + cards)


def uuids_of_nccl(devices: Sequence[torch.device]) -> list[str]:
    """Return the UUIDs of those GPUs between which NCCL sends."""
    gpus = [one for one in devices if _is_of_nccl(one)]
    return [str(torch.cuda.get_device_properties(one).uuid) for one in gpus]


def _is_of_nccl(device: torch.device) -> bool:
    return device.type == "cuda" and "nccl" in str(distributed.get_backend_config())


@functools.lru_cache(maxsize=1)
def _ranks_of(_default: Any) -> Ranks:
    """Find out who the ranks of torch's default group are, once for each such group."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    host = distributed.new_group(backend="gloo", timeout=_group_timeout())
    alone = Ranks(rank=rank, world=world, host=host)
    processes = tuple(alone.gather((_machine(), os.getpid())))
    mates = [r for r, (machine, _) in enumerate(processes) if machine == _machine()]
    places: dict[str, Any] = {"local_rank": mates.index(rank), "local_world": len(mates)}
    return Ranks(rank=rank, world=world, host=host, processes=processes, **places)


def _group_timeout() -> datetime.timedelta:
    """Return how long torch's default group waits for a rank: groups of ours wait as long."""
    device = "cpu" if "gloo" in str(distributed.get_backend_config()) else "cuda"
    world: Any = distributed.group.WORLD
    timeout: datetime.timedelta = world._get_backend(torch.device(device)).options._timeout
    return timeout


def _machine() -> str:
    return f"{os.uname().nodename} {boot_id()}"


def _by_name(gathered: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for facts in gathered for name in facts)
    return {name: [facts.get(name, "missing") for facts in gathered] for name in names}


_CLOSED = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe|process ?group", re.I)


@contextmanager
def losses_told(ranks: Ranks) -> Iterator[None]:
    """Raise RankLost for what a collective inside raises when another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if ranks.world == 1 or isinstance(error, FluxTrainError) or not _CLOSED.search(str(error)):
            raise
        raise RankLost(lost_text(ranks)) from error


def lost_text(ranks: Ranks) -> str:
    """Name the ranks that have ended, as far as this machine knows."""
    deadline_s = time.monotonic() + _NOTICE_S
    while not (gone := ranks.ended()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    who = f"rank {', '.join(map(str, gone))}" if gone else "another rank"
    return (
        f"{who} of {ranks.world} has ended, so rank {ranks.rank} cannot go on: what ended it "
        "stands above, or it was killed (out of memory?)"
    )
