"""What the ranks of tests do; each function runs on every rank."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fluxtrain.errors import MisusedModel
from fluxtrain.parallel.auto import measured_link
from fluxtrain.parallel.compress import exchange as exchanging
from fluxtrain.parallel.compress.exchange import (
    CompressedAllGather,
    CompressedReduceScatter,
    Exchange,
    all_reduce_hook,
    attach_to_ddp,
)
from fluxtrain.parallel.compress.registry import method_named

WIDTH = 32


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = rows + torch.tanh(block(rows))
        out: Tensor = self.head(rows)
        return out


class _Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        out = function(*given, **(named or {}))
        known = {id_of(t) for t in tree_leaves((given, named)) if isinstance(t, Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and id_of(made) not in known | self._live.keys():
                place = made.untyped_storage()
                self._live[id_of(made)] = place.nbytes()
                weakref.finalize(place, self._live.pop, id_of(made), 0)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return out


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def work_bytes_of_a_number(name: str, how: str, **options: Any) -> float:
    """Return the bytes at the peak of an exchange, for each number of it besides what is given;
    with error feedback of two, of which the first makes the residuals. The least of some: a thread
    of the collective may hold what was sent for a moment longer."""
    return min(_work_bytes_of_a_number(name, how, **options) for _ in range(4))


def _work_bytes_of_a_number(name: str, how: str, **options: Any) -> float:
    exchange, count = exchange_of(name, **options), 1 << 16
    ranks = distributed.get_world_size()
    given = 1e-3 * torch.randn(count // ranks if how == "gather" else count)
    with _Peak() as seen:
        for _ in range(1 + bool(options)):
            if how == "scatter_sum":
                exchange.scatter_sum(given.view(ranks, -1), "rows")
            elif how == "gather_sum":
                exchange.gather_sum(given, "rows")
            else:
                exchange.gather(given)
    return seen.peak_bytes / count


def work_bytes_with_feedback(name: str, how: str) -> float:
    """Return what `work_bytes_of_a_number` does, with residuals."""
    return work_bytes_of_a_number(name, how, error_feedback=True)


def world() -> distributed.ProcessGroup:
    group = distributed.group.WORLD
    assert group is not None
    return group


def exchange_of(
    name: str, group: distributed.ProcessGroup | None = None, **options: Any
) -> Exchange:
    return Exchange(method_named(name, options), group or world(), torch.device("cpu"))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(100 * step + rank)
    rows = torch.randn(8, WIDTH, generator=draws)
    return rows, rows[:, :3].sum(1, keepdim=True)


def train(model: nn.Module, steps: int, rate: float = 0.05) -> list[float]:
    """Train with plain SGD; return the mean losses over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    losses = []
    for step in range(steps):
        rows, wanted = batch(step, distributed.get_rank())
        loss = (model(rows) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(float(mean) / distributed.get_world_size())
    return losses


def sums(name: str, options: dict[str, Any]) -> tuple[float, float, int, int]:
    """Sum random rows both ways; return relative errors, bytes counted, and bytes that lay in the
    buffers of the collectives."""
    rank, count = distributed.get_rank(), 1000
    ranks = distributed.get_world_size()
    every = torch.stack(
        [
            torch.randn(ranks, count, generator=torch.Generator().manual_seed(r))
            for r in range(ranks)
        ]
    )
    exchange, seen = exchange_of(name, **options), []

    def counting(call: Any, at: int, others: float) -> Any:
        def counted(*tensors: Tensor, **how: Any) -> Any:
            seen.append(tensors[at].nbytes * others)
            return call(*tensors, **how)

        return counted

    with (
        patch.object(distributed, "all_to_all_single",
                     counting(distributed.all_to_all_single, 1, (ranks - 1) / ranks)),
        patch.object(exchanging, "_all_gather", counting(exchanging._all_gather, 1, ranks - 1)),
        patch.object(distributed, "all_reduce", counting(distributed.all_reduce, 0, 1)),
    ):  # fmt: skip
        scattered = exchange.scatter_sum(every[rank], "scatter")
        gathered = exchange.gather_sum(every[rank, 0], "gather")
    wanted = every.sum(0)[rank], every[:, 0].sum(0)
    errors = [
        float((got - want).norm() / want.norm())
        for got, want in zip((scattered, gathered), wanted, strict=True)
    ]
    return errors[0], errors[1], exchange.counts.wire_bytes, int(sum(seen))


def sharded_losses(name: str, options: dict[str, Any], steps: int, gathers: bool) -> list[float]:
    torch.manual_seed(0)
    model = Net()
    exchange = exchange_of(name, **options)
    for unit in (*model.blocks, model):
        fully_shard(unit)
    for unit_name, unit in model.named_modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_reduce_scatter(CompressedReduceScatter(exchange, unit_name))
            if gathers:
                unit.set_custom_all_gather(CompressedAllGather(exchange))
    return train(model, steps)


def ddp_losses(name: str, options: dict[str, Any], steps: int) -> tuple[list[float], list[str]]:
    """Train in DDP with buckets so small that there are several; return the names of residuals."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.003)
    exchange = attach_to_ddp(model, method_named(name, options))
    losses = train(model, steps)
    return losses, sorted(exchange.residuals) if exchange is not None else []


def replicated_losses(name: str, options: dict[str, Any], steps: int) -> list[float]:
    """Train on a mesh of 2 replicas of 2 shards, whose sums between replicas are compressed."""
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    exchange = exchange_of(name, mesh.get_group("replicate"), **options)
    for unit_name, unit in [*model.blocks.named_children(), ("", model)]:
        fully_shard(unit, mesh=mesh["shard"])
        hook = all_reduce_hook(exchange, unit_name)

        def mean(shard: Tensor, hook: Any = hook) -> None:
            hook(shard)
            shard /= 2

        unit.set_all_reduce_hook(mean)
    return train(model, steps)


def poisoned() -> tuple[bool, bool, bool]:
    """One rank has a number that is not finite: return whether both sums tell so, and whether
    residuals stay finite."""
    exchange = exchange_of("int8", error_feedback=True)
    rows = torch.ones(2, 50)
    if distributed.get_rank() == 1:
        rows[:, 3] = torch.inf
    total = exchange.scatter_sum(rows, "a")
    signs = exchange_of("signsgd").gather_sum(rows[0], "b")
    kept = all(bool(t.isfinite().all()) for t in exchange.residuals.values())
    return bool(total.isnan().all()), bool(signs.isnan().all()), kept


def resumed_equal() -> bool:
    """Go on from a state, and compare with not having stopped."""
    options = {"error_feedback": True}
    one, rows = exchange_of("qsgd", **options), torch.randn(2, 300)
    one.scatter_sum(rows, "a")
    other = exchange_of("qsgd", **options)
    other.load_state_dict(one.state_dict())
    return torch.equal(one.scatter_sum(rows, "a"), other.scatter_sum(rows, "a"))


def unlike_sizes() -> str:
    exchange = exchange_of("int8", error_feedback=True)
    exchange.scatter_sum(torch.ones(2, 50), "blocks.0")
    try:
        exchange.scatter_sum(torch.ones(2, 40), "blocks.0")
    except MisusedModel as error:
        return str(error)
    return ""


def measured(count: int) -> tuple[float, float]:
    return measured_link(count, world(), torch.device("cpu"))
