"""`ShardedEngine`: the trainer's engine over a model that torch's FSDP2 shards.

Each rank keeps its shard of the fp32 masters and of AdamW's moments; a block's weights are gathered
for its forward and backward pass, and its gradients summed and scattered (`fully_shard`). Losses
are divided by what all ranks count, so that sums over ranks are the gradients of one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from fluxtrain.core.adamw.reference import decode, encode
from fluxtrain.core.device.device import Device
from fluxtrain.core.device.spill import Spill
from fluxtrain.core.optimizer.state_shards import EXCHANGE, Held
from fluxtrain.core.ranks.exchange import Exchange as NotExchanged
from fluxtrain.core.runtime.counters import CardCounts, Traffic, held_by_torch
from fluxtrain.core.updates.loss_scale import LossScale
from fluxtrain.core.updates.norm import GradNorm
from fluxtrain.errors import BadInput, Diverged, MisusedModel
from fluxtrain.events.events import MemorySampled, Move, ResidencySampled
from fluxtrain.methods.optimizer import EngineAdamW
from fluxtrain.parallel.compress.exchange import Exchange
from fluxtrain.plan.placement import Placement


@dataclass(frozen=True)
class Part:
    """A block, or a module outside of blocks, with its parameters by their names in it."""

    name: str
    is_block: bool
    parameters: dict[str, nn.Parameter]
    dtypes: dict[str, torch.dtype]  # that checkpoints hold the weights in


@dataclass(frozen=True)
class Card:
    """The device of this rank, and its peaks."""

    device: Device
    counts: CardCounts


class ShardedEngine:
    """One rank's part of a sharded model; see `TrainingEngine` for the methods."""

    retries_blocks = False
    in_lockstep = True
    loss_scale: LossScale | None = None
    partly_updated = False
    held_s = 0.0
    card_count = 1
    groups: tuple[Any, ...] = ()  # of weights in files: none

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        loose: Sequence[nn.Parameter],
        device: Device,
        plan: Placement,
        shards: distributed.ProcessGroup,
    ) -> None:
        """`shards` are the ranks that hold one copy of the model together."""
        self.model, self.parts, self.loose = model, parts, loose
        self._shards_here = list(model.parameters())  # a pass puts whole ones in their places
        self.device, self.plan, self.chunk_rows = device, plan, 0
        self.cards = [Card(device, CardCounts(device.torch_device))]
        self.exchanges: list[Exchange] = []  # of compressed gradients
        self.units: dict[str, nn.Module] = {}  # gathered at once; "" is the model itself
        self.packed: set[int] = set()  # parameters that are bytes in a dtype that computes
        self.mesh: Any = None
        self.takes_less: tuple[str, ...] = ()  # settings with which the device holds less
        self.offloads = False  # shards are in host memory, and a GPU computes
        self.spill = Spill(Path())  # nothing of it lives on disk
        self.norm: GradNorm | None = None
        self._gradients_bytes = 0
        self.optimizer: torch.optim.Optimizer | None = None
        self.exchange = NotExchanged()  # of the engine that streams: here torch exchanges
        self._shards = shards

    @property
    def compression(self) -> str:
        """Tell how gradients are compressed, and between which ranks."""
        if not self.exchanges:
            return ""
        between = "replicas" if self.mesh.ndim == 2 else "shards"
        return f"{self.exchanges[0].name} between {between} on {distributed.get_world_size()} ranks"

    @property
    def unit_names(self) -> list[str]:
        """Return the names of the blocks."""
        return [part.name for part in self.parts if part.is_block]

    # -- a step ------------------------------------------------------------------------------------

    def clip_grad_norm(self, max_norm: float | None, losses: Sequence[Tensor] = ()) -> GradNorm:
        """Measure the global norm, and add up the losses of all ranks; a collective."""
        device = self.device.torch_device
        self._count_gradients()
        squares = torch.stack([_square_of(part, device) for part in self.parts])
        distributed.all_reduce(squares, group=self._shards)
        if losses:
            total = torch.stack([loss.detach().float() for loss in losses])
            distributed.all_reduce(total)
            losses = list(total)
        names = [part.name for part in self.parts]
        self.norm = GradNorm(self.device, [squares.sqrt()], max_norm, losses, None, names)
        return self.norm

    def begin_step_in_backward(
        self, optimizer: torch.optim.Optimizer, loss: Tensor | None = None
    ) -> None:
        """Refuse: the optimizer of a sharded model steps after the backward pass."""
        raise MisusedModel("a sharded model has no step in backward")

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale the gradients by the measured norm and update; a refused step changes nothing.

        torch's fused AdamW leaves a refused step out itself, as for gradient scaling: the host
        queues it without waiting for the norm.
        """
        norm, self.norm = self.norm, None
        scale: Tensor | float = 1.0
        if norm is not None and norm.skips and optimizer.defaults["fused"]:
            scale = 1.0 if norm.max_norm is None else norm.device_scale()
            optimizer.found_inf = (~norm.all_finite()).float()  # type: ignore[attr-defined]
        elif norm is not None:
            scale = norm.scale()
            if math.isnan(scale):
                if not norm.skips:
                    raise Diverged("the loss or the gradient norm is not finite")
                return
        if isinstance(scale, Tensor) or scale != 1.0:
            grads = [_local(p.grad) for p in self._trained() if p.grad is not None]
            torch._foreach_mul_(grads, scale)
        optimizer.step()
        if self.device.torch_device.type == "cpu":  # a GPU knows its peak
            counts = self.cards[0].counts
            counts.peak_bytes = max(counts.peak_bytes, sum(self._bytes().values()))

    def forget_gradients(self) -> None:
        """Drop all gradients."""
        for parameter in self._shards_here:
            parameter.grad = None
        self._gradients_bytes = 0

    free_gradients = begin_step_again = forget_gradients

    def flush(self) -> None:
        """Do nothing: updates are made when `step` returns."""

    forget_refused = flush

    def evaluating(self) -> nullcontext[None]:
        """Do nothing: losses without gradients are computed as in training."""
        return nullcontext()

    def close(self) -> None:
        """Stop the device's threads."""
        self.device.close()

    # -- what it holds and has done ----------------------------------------------------------------

    @property
    def parameter_counts(self) -> tuple[int, int]:
        """Return how many parameters there are, and how many of them are trained."""
        every = self._shards_here
        return sum(p.numel() for p in every), sum(p.numel() for p in every if p.requires_grad)

    def residency(self) -> ResidencySampled:
        """Say that this rank has its shard of each block."""
        by = self._bytes()
        letters = ("C" if self.offloads else "G") * len(self.unit_names)
        return ResidencySampled(
            weights=letters, gradients=letters, optimizer=letters,
            weights_bytes=by["weights"] + by["frozen"], gradients_bytes=by["gradients"],
            optimizer_bytes=by["optimizer"], frozen_bytes=by["frozen"],
        )  # fmt: skip

    def memory(self) -> MemorySampled:
        """Add up the bytes of this rank's shards; on a GPU also what torch holds besides."""
        by, device, counts = self._bytes(), self.device.torch_device, self.cards[0].counts
        on_host = sum(by.values()) if self.offloads or device.type == "cpu" else 0
        if self.offloads:
            by = dict.fromkeys(by, 0)
        total: int | None = None
        if device.type == "cuda":
            used, reserved = (held["current"] for held in held_by_torch(device))
            by["workspace"] = max(0, used - sum(by.values()))  # gathered weights, activations
            by["cache"] = max(0, reserved - used)
            total = torch.cuda.get_device_properties(device).total_memory
            counts.peak_bytes = counts.device_peaks()[1]
        counts.peak_bytes = max(counts.peak_bytes, sum(by.values()))
        return MemorySampled(
            device_total_bytes=total, device_used_bytes=sum(by.values()),
            device_peak_bytes=counts.peak_bytes, device_budget_bytes=None, device_by=by,
            host_rss_bytes=None, host_peak_bytes=None, host_arena_bytes=on_host,
            host_pinned_bytes=0, host_limit_bytes=None,
        )  # fmt: skip

    def _bytes(self) -> dict[str, int]:
        """Count the bytes of this rank's shards by what they are.

        The gauges' thread calls this. To read `.grad` of a DTensor there, while a backward pass
        assigns it, corrupts memory (torch 2.13): the training thread counts gradients.
        """
        by = dict.fromkeys(
            ("weights", "frozen", "packed", "unpacked", "gradients", "optimizer", "activations",
             "workspace", "cache"), 0,
        )  # fmt: skip
        for parameter in self._shards_here:
            kind = "weights" if parameter.requires_grad else "frozen"
            by["packed" if id(parameter) in self.packed else kind] += _nbytes(parameter)
        by["gradients"] = self._gradients_bytes
        for state in self._states().values():
            by["optimizer"] += sum(map(_nbytes, state.values()))
        return by

    def _count_gradients(self) -> None:
        grads = (parameter.grad for parameter in self._shards_here)
        self._gradients_bytes = sum(_nbytes(grad) for grad in grads if grad is not None)

    def traffic(self) -> Traffic:
        """Count nothing over the bus: what ranks send to each other is in `exchanges`."""
        return Traffic(h2d_bytes=0, d2h_bytes=0)

    def take_moves(self, limit: int) -> tuple[list[Move], int]:
        """Return no moves."""
        return [], 0

    def lacks_bytes(self) -> tuple[int, ...]:
        """Return no lack: nothing can be given up while a sharded model trains."""
        return ()

    def take_stalls(self) -> dict[str, float]:
        """Return no stalls: waits for other ranks are inside of torch's collectives."""
        return {}

    # -- its training state: that of an engine that streams, gathered one tensor at a time ---------

    def state_shards(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the training state of each part, whole on the first rank; a collective. The others
        get empty tensors."""
        for part in self.parts:
            found: dict[str, Tensor] = {}
            for name, parameter in part.parameters.items():
                if parameter.requires_grad:
                    found |= self._gathered(part, name, parameter)
            if found:
                yield part.name, found
        if self.loose:
            yield "loose", {str(i): _whole(p) for i, p in enumerate(self.loose)}
        for exchange in self.exchanges:
            yield from exchange_shards(exchange, self.compression)

    def _gathered(self, part: Part, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        state, master = self._states().get(parameter, {}), _whole(parameter)
        if part.dtypes[name] == torch.bfloat16:
            hi, lo = encode(master)
            found = {f"{name}.weight_bits": hi} | ({f"{name}.lo": lo} if state else {})
        else:
            found = {f"{name}.weight_bits": master}
        if state:
            found[f"{name}.step"] = _whole(state["step"]).to(torch.int64).reshape(1)
            found[f"{name}.m"] = _whole(state["exp_avg"])
            found[f"{name}.v"] = _whole(state["exp_avg_sq"])
        return found

    def load_state_shard(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Take this rank's part of one shard. Raises BadInput when it belongs to another model."""
        if name.startswith(EXCHANGE):
            if name == f"{EXCHANGE}{distributed.get_rank()}.{self.compression}":
                self.exchanges[0].load_state_dict(tensors)
            return
        if name == "loose":
            for number, parameter in enumerate(self.loose):
                _put(parameter, _of(tensors, str(number), name, parameter))
            return
        part = next((part for part in self.parts if part.name == name), None)
        if part is None:
            raise BadInput(f"the checkpoint has a part {name!r} that this model does not have")
        for own, parameter in part.parameters.items():
            if parameter.requires_grad:
                self._load(part, own, parameter, tensors)

    def _load(
        self, part: Part, name: str, parameter: nn.Parameter, tensors: dict[str, Tensor]
    ) -> None:
        weight = _of(tensors, f"{name}.weight_bits", part.name, parameter)
        low = tensors.get(f"{name}.lo")
        _put(parameter, weight.float() if low is None else decode(weight, low))
        if f"{name}.m" not in tensors or self.optimizer is None:
            return  # from before the first step, or nothing is trained afterwards
        state = self.optimizer.state[parameter]
        fused = self.optimizer.defaults["fused"]  # which counts on the device
        where = _local(parameter).device if fused else torch.device("cpu")
        state["step"] = tensors[f"{name}.step"].float().reshape(()).to(where)
        for ours, theirs in (("m", "exp_avg"), ("v", "exp_avg_sq")):
            state[theirs] = torch.zeros_like(parameter)
            _put(state[theirs], _of(tensors, f"{name}.{ours}", part.name, parameter))

    def shard_bytes(self) -> int:
        """Return the most bytes that all shards take: masters and two moments in fp32, and what
        compression keeps on each rank."""
        kept = (sum(map(_nbytes, exchange.residuals.values())) for exchange in self.exchanges)
        lost = distributed.get_world_size() * sum(kept)
        return 12 * self.parameter_counts[1] + 8 * len(self.parts) + lost

    def hold_for_saving(self, name: str) -> Held | None:
        """Return None: each shard is copied before the next update."""
        return None

    def _trained(self) -> Iterable[nn.Parameter]:
        return (p for p in self._shards_here if p.requires_grad)

    def _states(self) -> dict[Any, dict[str, Tensor]]:
        return {} if self.optimizer is None else dict(self.optimizer.state)


class ShardedAdamW(EngineAdamW):
    """torch's AdamW over the shards of a rank; fp32 masters and moments."""

    updates_in_backward = False

    def __init__(self, engine: ShardedEngine, groups: Any, **options: Any) -> None:
        super().__init__(engine, groups, **options)
        self._sharded = engine
        engine.optimizer = self._adamw

    def step(self) -> None:
        """Update this rank's shards."""
        self._sharded.step(self._adamw)


def exchange_shards(exchange: Exchange, named: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield what compression keeps on each rank, a shard a rank, on the first one; a collective.

    It may be as large as all gradients of the model: no rank ever has more than one rank's.
    """
    here, world, own = distributed.get_rank(), distributed.get_world_size(), exchange.state_dict()
    shapes: list[Any] = [None] * world
    distributed.all_gather_object(shapes, {key: (t.shape, t.dtype) for key, t in own.items()})
    for rank, every in enumerate(shapes):
        state: dict[str, Tensor] = {}
        for key, (shape, dtype) in every.items():
            if rank == here == 0:
                state[key] = own[key].cpu()
            elif rank == here:
                distributed.send(own[key].cpu(), 0)
            elif here == 0:
                state[key] = torch.empty(shape, dtype=dtype)
                distributed.recv(state[key], rank)
        yield f"{EXCHANGE}{rank}.{named}", state


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of this rank's shard, without an operation of torch."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).nbytes


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, without its graph: that would take the host 20 times as long."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    """Gather a tensor of all ranks in the host memory of the first, an empty one on the others; a
    collective."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
        if distributed.get_rank():
            tensor = tensor.new_empty(0)
    return tensor.cpu()


def _put(into: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole`."""
    with torch.no_grad():
        if isinstance(into, DTensor):
            device = into.device_mesh.device_type
            part = distribute_tensor(
                whole.to(device), into.device_mesh, into.placements, src_data_rank=None
            )
            _local(into).copy_(_local(part))
        else:
            into.copy_(whole)


def _of(tensors: dict[str, Tensor], key: str, shard: str, parameter: Tensor) -> Tensor:
    found = tensors.get(key)
    if found is None or found.shape != parameter.shape:
        has = "lacks" if found is None else f"has {tuple(found.shape)} for"
        raise BadInput(
            f"the checkpoint's part {shard!r} {has} {key!r}, which is {tuple(parameter.shape)} "
            "here: it is of another model"
        )
    return found


def _square_of(part: Part, device: torch.device) -> Tensor:
    """Return the square of the norm of this rank's gradients of a part, fp32 on the device."""
    grads = [_local(p.grad) for p in part.parameters.values() if p.grad is not None]
    if not grads:
        return torch.zeros((), device=device)
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(grads)])
    return norms.square().sum().to(device)


def gathered_on_first(engine: ShardedEngine) -> None:
    """Put the whole weights in place of the shards of rank 0, one after the other, in the dtypes of
    the loaded model; the others drop theirs. A collective; the model is not computed with again."""
    model = engine.model
    engine.forget_gradients()
    engine.optimizer = None
    for unit in engine.units.values():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    dtypes = {
        f"{part.name}.{name}": dtype for part in engine.parts for name, dtype in part.dtypes.items()
    }
    made: dict[int, nn.Parameter] = {}  # tied ones once
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                whole = _whole(parameter)
                if id(parameter) not in engine.packed:
                    whole = whole.to(dtypes.get(f"{path}.{name}", whole.dtype))
                made[id(parameter)] = nn.Parameter(whole, parameter.requires_grad)
                made[id(made[id(parameter)])] = made[id(parameter)]
            module._parameters[name] = made[id(parameter)]
