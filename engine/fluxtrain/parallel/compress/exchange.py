"""The exchange of compressed numbers between ranks, and its place in FSDP2 and DDP.

torch calls these objects where it would reduce gradients or gather weights: `fully_shard`'s
`set_custom_reduce_scatter`, `set_custom_all_gather` and `set_all_reduce_hook`, DDP's
`register_comm_hook`. A row on the wire is one byte (1: all its values were finite), then the
compressor's bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from fluxtrain.errors import MisusedModel
from fluxtrain.parallel.compress.compressor import Columns, columns_of, joined
from fluxtrain.parallel.compress.low_rank import PowerSgd
from fluxtrain.parallel.compress.registry import Method

RAW_BYTES = 2  # of a number without compression: bf16
_BUCKET = "bucket"
_all_gather = getattr(  # its name from torch 2.13 on, and before
    distributed, "all_gather_single", distributed.all_gather_into_tensor
)


@dataclass(kw_only=True)
class Counts:
    """What one rank has sent, in bytes, and computed for it, in seconds."""

    raw_bytes: int = 0  # had it been bf16
    wire_bytes: int = 0  # with indices, scales and the bytes of agreements
    index_bytes: int = 0
    exchanges: int = 0
    extra_collectives: int = 0
    values: int = 0  # that were encoded, and of them those sent
    sent_values: int = 0
    encode_s: float = 0.0  # on a GPU read with `seconds`
    decode_s: float = 0.0
    agree_s: float = 0.0  # in extra collectives, while the host waits
    relative_error: float | None = None  # of the last exchange for which it was asked
    cosine: float | None = None  # of what was decoded there and what was sent

    @property
    def density(self) -> float | None:
        """Return the share of values that is sent; None: nothing was."""
        return self.sent_values / self.values if self.values else None


class Exchange:
    """Sums rows of numbers over the ranks of a group, compressed; counts what is sent."""

    def __init__(
        self,
        method: Method,
        group: distributed.ProcessGroup,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        """Prepare; each rank draws its own numbers, by `seed` and its rank.

        Raises BadInput where the method cannot sum over so many ranks.
        """
        self.name = method.compressor.name
        self._compressor = method.compressor.for_ranks(group.size())
        self._feedback, self._group, self._ranks = method.feedback, group, group.size()
        self.counts = Counts()
        self.residuals: dict[str, Tensor] = {}  # of error feedback, fp32
        self.measures_error = False  # of the next exchange
        self.draws = torch.Generator(device).manual_seed(seed * 1_000_003 + distributed.get_rank())
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def scatter_sum(self, rows: Tensor, key: str) -> Tensor:
        """Send row r of (W, N) to rank r; return the sum (N,) of what this rank received.

        `key` names the rows from step to step, for what error feedback keeps.
        """
        columns, agreed = self._encoded(rows, self._residual(key, rows), key)
        wire = joined(columns)
        received = torch.empty_like(wire)
        distributed.all_to_all_single(received, wire, group=self._group)
        self._count(rows.shape[1] * (self._ranks - 1), rows.shape[1], columns, agreed)
        return self._decoded_sum(columns_of(received, columns), rows.shape[1], agreed)

    def gather_sum(self, values: Tensor, key: str, residual: Tensor | None = None) -> Tensor:
        """Send (N,) to every rank; return the sum (N,) of all, the same bits on each.

        What is lost is kept by `key`, and added to the next values of it; or `residual` is.
        """
        rows, count = values.unsqueeze(0), values.numel()
        lost = None if residual is None else residual.unsqueeze(0)
        columns, agreed = self._encoded(
            rows, self._residual(key, rows) if lost is None else lost, key
        )  # not held on to: what it is replaced by is as large
        self._count(count * 2 * (self._ranks - 1) // self._ranks, count, columns, agreed)  # a ring
        return self._decoded_sum(self._gathered(columns), count, agreed)

    def gather(self, values: Tensor) -> Tensor:
        """Send (N,) to every rank; return (W, N) as all decode it, this rank's own included."""
        count = values.numel()
        columns = self._compressor.encode(values.float().unsqueeze(0), self.draws)
        self._count(count * (self._ranks - 1), count, columns)
        return self._compressor.decode(self._gathered(columns), count)

    def _gathered(self, columns: Columns) -> Columns:
        wire = joined(columns)
        received = wire.new_empty(self._ranks, wire.shape[1])
        _all_gather(received.flatten(), wire.flatten(), group=self._group)
        return columns_of(received, columns)

    def seconds(self) -> Counts:
        """Return the counts with the seconds of all work that was queued; waits for a GPU."""
        for name, start, stop in self._events:
            stop.synchronize()
            setattr(self.counts, name, getattr(self.counts, name) + start.elapsed_time(stop) / 1e3)
        self._events.clear()
        return self.counts

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a resumed run needs for the same numbers: residuals and the draws' state."""
        return {**self.residuals, "draws": self.draws.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from `state_dict` of this rank; residuals are of use to error feedback alone."""
        self.draws.set_state(state["draws"].cpu())
        kept = {key: t.to(self.draws.device) for key, t in state.items() if key != "draws"}
        self.residuals = kept if self._feedback else {}

    def _residual(self, key: str, rows: Tensor) -> Tensor | None:
        kept = self.residuals.get(key)
        if kept is not None and kept.shape != rows.shape:
            raise MisusedModel(
                f"{key} has gradients of {rows.numel():,} numbers where it had {kept.numel():,}: "
                "some of its parameters have none in this pass, and error feedback needs the same "
                "ones in each: take error_feedback off, or freeze what is not always used"
            )
        return kept

    def _encoded(self, rows: Tensor, residual: Tensor | None, key: str) -> tuple[Columns, float]:
        """Encode rows with what was lost before; keep what is lost now."""
        with self._timed("encode_s", rows.device):
            rows = rows.float()
            finite = torch.isfinite(rows).all(1, keepdim=True)
            rows = torch.where(finite, rows, 0.0)
            if residual is not None:
                rows = rows + residual
        agreed = self._agreed(self._compressor.proposal(rows))
        with self._timed("encode_s", rows.device):
            sent = self._compressor.encode(rows, self.draws, agreed)
            if self._feedback:
                lost = rows - self._compressor.decode(sent, rows.shape[1], agreed)
                before = torch.zeros_like(lost) if residual is None else residual
                self.residuals[key] = torch.where(finite, lost, before)
            if self.measures_error:
                self._measure_error(rows, sent, agreed)
            return (finite.to(torch.uint8), *sent), agreed

    def _measure_error(self, rows: Tensor, sent: Columns, agreed: float) -> None:
        """Note how far what is decoded of `rows` is from them."""
        self.measures_error = False
        back = self._compressor.decode(sent, rows.shape[1], agreed)
        size = float(rows.norm())
        if size:
            self.counts.relative_error = float((back - rows).norm()) / size
            cosine = torch.nn.functional.cosine_similarity(back.flatten(), rows.flatten(), dim=0)
            self.counts.cosine = float(cosine)

    def _agreed(self, proposal: Tensor | None) -> float:
        """Return the largest proposal of all ranks; on a GPU the host waits for it."""
        if proposal is None:
            return 0.0
        started_s = time.perf_counter()
        largest = proposal.detach().float().reshape(1)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self._group)
        self.counts.extra_collectives += 1
        self.counts.wire_bytes += largest.nbytes
        agreed = float(largest)
        self.counts.agree_s += time.perf_counter() - started_s
        return agreed

    def _decoded_sum(self, received: Columns, count: int, agreed: float) -> Tensor:
        finite, *sent = received
        with self._timed("decode_s", finite.device):
            total = self._compressor.decode_sum(tuple(sent), count, agreed)
            return torch.where((finite == 1).all(), total, torch.nan)

    def _count(self, raw: int, count: int, columns: Columns, agreed: float = 0.0) -> None:
        """Count an exchange of `raw` numbers in rows of `count`, one to each other rank."""
        counts, rows = self.counts, self._ranks - 1
        sizes = [one[0].nbytes for one in columns]
        counts.exchanges += 1
        counts.raw_bytes += raw * RAW_BYTES
        counts.wire_bytes += rows * sum(sizes)
        counts.values += rows * count
        counts.sent_values += rows * self._compressor.kept(count, agreed)
        counts.index_bytes += rows * sum(sizes[1 : 1 + self._compressor.index_columns])

    @contextmanager
    def _timed(self, name: str, device: torch.device) -> Iterator[None]:
        """Add the seconds of what runs inside to the counts, and name it in traces."""
        with record_function(f"fluxtrain::{name.removesuffix('_s')}"):
            if device.type == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                yield
                stop.record()
                self._events.append((name, start, stop))
                return
            started_s = time.perf_counter()
            yield
            setattr(self.counts, name, getattr(self.counts, name) + time.perf_counter() - started_s)


class _Allocates:
    """Buffers as torch's own collectives get them."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class CompressedReduceScatter(_Allocates):
    """For `set_custom_reduce_scatter`; one for each unit, whose name keeps its residuals apart."""

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchange, self._name = exchange, name

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: distributed.ProcessGroup,
        op: distributed.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum, or mean, over the ranks to `output_tensor`."""
        rows = input_tensor.view(group.size(), -1)
        total = self._exchange.scatter_sum(rows, self._name)
        if op == distributed.ReduceOp.AVG:
            total /= group.size()
        output_tensor.copy_(total)


class CompressedAllGather(_Allocates):
    """For `set_custom_all_gather`: every rank computes with the same rounded weights."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Write all ranks' numbers to `output_tensor`."""
        output_tensor.view(group.size(), -1).copy_(self._exchange.gather(input_tensor))


def all_reduce_hook(exchange: Exchange, name: str) -> Callable[[Tensor], None]:
    """Return a hook for `set_all_reduce_hook`: the sum, over the replicas, of what was reduced over
    the shards, in place."""

    def reduce(shard: Tensor) -> None:
        shard.copy_(exchange.gather_sum(shard.flatten(), name).view_as(shard))

    return reduce


class DdpHook:
    """The mean of a bucket over the ranks, for DDP.

    Residuals are kept by parameter, since DDP makes its buckets anew after the first step.
    """

    def __init__(self, exchange: Exchange, names: dict[Tensor, str]) -> None:
        """`names`: of the parameters, as in `{p: n for n, p in model.named_parameters()}`."""
        self._exchange = exchange
        self._names = {id(parameter): name for parameter, name in names.items()}

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Return a future that is done, with the mean of the bucket."""
        flat, kept = bucket.buffer(), self._exchange.residuals
        sizes = {self._names[id(p)]: p.numel() for p in bucket.parameters()}
        residual = torch.zeros_like(flat, dtype=torch.float32)
        for name, part in zip(sizes, residual.split([*sizes.values()]), strict=True):
            if name in kept:
                part.copy_(kept[name])
        total = self._exchange.gather_sum(flat, _BUCKET, residual)
        if (lost := kept.pop(_BUCKET, None)) is not None:
            kept.update(zip(sizes, lost.flatten().split([*sizes.values()]), strict=True))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result((total / distributed.get_world_size()).to(flat.dtype))
        return done


def attach_to_ddp(model: DistributedDataParallel, method: Method, seed: int = 0) -> Exchange | None:
    """Let DDP reduce by `method`; None where torch's own hooks do that, which count nothing."""
    compressor, name = method.compressor, method.compressor.name
    device = next(model.parameters()).device
    if isinstance(compressor, PowerSgd):
        power = powerSGD_hook.PowerSGDState(
            None, compressor.rank, use_error_feedback=method.feedback, start_powerSGD_iter=2
        )
        model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
    elif name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "bf16" and device.type == "cuda":  # torch's hook wants NCCL
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif name != "none":
        group = distributed.group.WORLD
        assert group is not None
        exchange = Exchange(method, group, device, seed)
        names = {parameter: name for name, parameter in model.module.named_parameters()}
        hook = DdpHook(exchange, names)
        model.register_comm_hook(None, lambda _, bucket: hook.reduce(bucket))  # not annotated:
        # torch compares annotations with its types, and ours are text
        return exchange
    return None
