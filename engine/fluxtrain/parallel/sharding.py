"""Shard a model with torch's `fully_shard`: its units, where its shards are, what it sends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from fluxtrain.config.parallel_settings import CommSettings, FsdpSettings
from fluxtrain.core.device.cuda_device import open_device
from fluxtrain.core.wrap.block_discovery import Parts, take_apart
from fluxtrain.core.wrap.module_patches import move_buffers
from fluxtrain.errors import BadInput, UnsupportedModel
from fluxtrain.parallel.compress.exchange import (
    CompressedAllGather,
    CompressedReduceScatter,
    Exchange,
    all_reduce_hook,
)
from fluxtrain.parallel.compress.registry import Method, method_named
from fluxtrain.parallel.engine import Part, ShardedEngine
from fluxtrain.parallel.packed_linear import pack_frozen
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.states import StorageFormat

REPLICAS, SHARDS = "replicas", "shards"


def shard(
    model: nn.Module,
    device: torch.device,
    settings: FsdpSettings,
    comm: CommSettings,
    plan: Placement,
    *,
    frozen: StorageFormat = "plain",
    seed: int = 0,
) -> ShardedEngine:
    """Shard `model`, loaded alike on every rank, in place; a collective.

    `frozen`: how large frozen weights of blocks are stored. Raises UnsupportedModel for a model
    without blocks or with what FSDP2 cannot shard, BadInput for a method that is none.
    """
    named = "none" if comm.compress == "auto" else comm.compress  # decided once it is measured
    method = method_named(named, comm.config if named == comm.compress else None)
    taken = take_apart(model)
    parts = parts_of(taken)
    refuse_unshardable(model)
    mesh = mesh_of(settings, device)
    compute = _compute_dtype(model) if settings.mixed_precision else torch.float32
    _widen(model, compute)
    packed: list[str] = []
    if frozen != "plain":
        for name, block in taken.blocks:
            packed += [f"{name}.{own}" for own in pack_frozen(block, frozen, compute)]
    if settings.sync_module_states:
        _send_from_first(model, device)
    units = _units(model, taken, settings)
    if settings.activation_checkpointing:
        for _, block in taken.blocks:
            block.forward = _recomputed(block.forward)
    hooked = mesh.ndim == 2 and method.bytes_of_torch is None  # sums between replicas are ours
    _shard_units(units, mesh[SHARDS] if hooked else mesh, settings, compute, method)
    if settings.cpu_offload:  # else FSDP2 moves them
        move_buffers(model, device)
    _prefetch(units, settings)
    opened = open_device(device)
    group = mesh.get_group(SHARDS)
    loose = [model.get_parameter(name) for name, _ in taken.loose]
    for part in parts:
        module = model.get_submodule(part.name)
        part.parameters.update((name, module.get_parameter(name)) for name in part.dtypes)
    engine = ShardedEngine(model, parts, loose, opened, plan, group)
    engine.units, engine.mesh = units, mesh
    if method.bytes_of_torch is None:
        compress(engine, method, seed)
    engine.packed = {id(model.get_parameter(name)) for name in packed}
    if comm.gather != "none" and group.size() > 1 and not packed:  # whose bytes cannot be rounded
        _compress_gathers(engine, method_named(comm.gather))
    engine.takes_less = tuple(_takes_less(settings))
    engine.offloads = settings.cpu_offload and device.type != "cpu"
    return engine


def parts_of(taken: Parts) -> list[Part]:
    """Return blocks and modules outside of blocks, a shared parameter in the first that has it.

    Without the parameters: a whole one that is held on to stays on the card beside its shards.
    """
    seen: set[int] = set()
    parts = []
    named = [(n, m, False) for n, m in taken.edges] + [(n, m, True) for n, m in taken.blocks]
    for name, module, is_block in named:
        own = {n: p for n, p in module.named_parameters() if id(p) not in seen}
        seen |= {id(p) for p in own.values()}
        if own or is_block:
            parts.append(Part(name, is_block, {}, {n: p.dtype for n, p in own.items()}))
    return parts


def refuse_unshardable(model: nn.Module) -> None:
    """Raise UnsupportedModel for parameters that FSDP2 cannot shard, with the cure."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise UnsupportedModel(
                f"{name} is a single number without a dimension, which FSDP2 cannot shard: give it "
                "the shape (1,), or use parallel.mode=layers"
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise UnsupportedModel(f"{name} is trained and {parameter.dtype}: freeze it")
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise UnsupportedModel(
                f"{name} is float16, which needs a loss scale that parallel.mode=fsdp does not "
                "have: use model.dtype=bfloat16 or float32, or parallel.mode=layers"
            )
    taken = take_apart(model)
    in_blocks = [{id(p) for p in block.parameters()} for _, block in taken.blocks]
    outside = {id(p) for _, edge in taken.edges for p in edge.parameters()}
    seen = set(outside)
    for (name, _), block in zip(taken.blocks, in_blocks, strict=True):
        if seen & block:
            raise UnsupportedModel(
                f"{name} shares a weight with another part of the model, and FSDP2 gathers each "
                "block by itself: use parallel.mode=layers, or give it a weight of its own"
            )
        seen |= block


def mesh_of(settings: FsdpSettings, device: torch.device) -> DeviceMesh:
    """Return the ranks as replicas of shards. Raises BadInput where machines have unlike counts."""
    world = distributed.get_world_size()
    if settings.sharding_strategy == "NO_SHARD":
        shards = 1
    elif settings.sharding_strategy == "HYBRID":
        shards = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    else:
        return init_device_mesh(device.type, (world,), mesh_dim_names=(SHARDS,))
    if world % shards:
        raise BadInput(
            f"fsdp.sharding_strategy=HYBRID needs equally many ranks on each machine, and {world} "
            f"ranks are no multiple of the {shards} here: use FULL_SHARD, or as many everywhere"
        )
    if shards == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=(SHARDS,))
    sizes = (world // shards, shards)
    return init_device_mesh(device.type, sizes, mesh_dim_names=(REPLICAS, SHARDS))


def _takes_less(settings: FsdpSettings) -> Iterator[str]:
    yield "lower train.batch_rows"
    for name in ("activation_checkpointing", "cpu_offload"):
        if not getattr(settings, name):
            yield f"set fsdp.{name}=true"
    if settings.sharding_strategy != "FULL_SHARD":
        yield "set fsdp.sharding_strategy=FULL_SHARD"


def _compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of most weights."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype])


def _widen(model: nn.Module, compute: torch.dtype) -> None:
    """Give trained weights fp32 masters; frozen ones stay in the dtype that computes."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(
                torch.float32 if parameter.requires_grad else compute
            )


def _send_from_first(model: nn.Module, device: torch.device) -> None:
    """Give every rank the weights of rank 0. Only what differs is written: a weight that is mapped
    from a file would become a copy in host memory, in every process."""
    for tensor in (*model.parameters(), *model.buffers()):
        own = tensor.detach().to(device).contiguous()
        sent = own.clone()
        distributed.broadcast(sent, 0)
        if not torch.equal(sent, own):
            tensor.data.copy_(sent)


def _units(model: nn.Module, taken: Parts, settings: FsdpSettings) -> dict[str, nn.Module]:
    """Return what is gathered at once, by name, in forward order; the model itself is the last."""
    large = {
        name: block
        for name, block in taken.blocks
        if sum(p.numel() for p in block.parameters()) >= settings.min_num_params
    }
    return {**large, "": model}


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def recompute(*arguments: object, **named: object) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        run = partial(forward, **named)
        made: Tensor = checkpoint(run, *arguments, use_reentrant=False)
        return made

    return recompute


def _shard_units(
    units: dict[str, nn.Module],
    mesh: DeviceMesh,
    settings: FsdpSettings,
    compute: torch.dtype,
    method: Method,
) -> None:
    reduce = {2: torch.bfloat16, 4: torch.float32}.get(method.bytes_of_torch or 4, torch.float32)
    if method.compressor.name == "fp16":
        reduce = torch.float16
    precision = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False
    )
    offload = OffloadPolicy()
    if settings.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    keeps = settings.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD")
    for name, unit in units.items():
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=not keeps and bool(name), mp_policy=precision,
            offload_policy=offload,
        )  # fmt: skip
    for sharded in _sharded(units):
        sharded.set_gradient_divide_factor(1.0)  # losses are shares of one mean: gradients add up
        sharded.set_force_sum_reduction_for_comms(True)


def _sharded(units: dict[str, nn.Module]) -> list[Any]:
    return [unit for unit in units.values() if isinstance(unit, FSDPModule)]


def compress(engine: ShardedEngine, method: Method, seed: int = 0) -> None:
    """Put an exchange of ours where FSDP2 would reduce; between replicas it is made for that."""
    mesh, units = engine.mesh, engine.units
    between = mesh.ndim == 2
    group = mesh.get_group(REPLICAS if between else SHARDS)
    exchange = Exchange(method, group, engine.device.torch_device, seed)
    engine.exchanges.append(exchange)
    for name, unit in zip(units, _sharded(units), strict=True):
        if between:
            unit.set_all_reduce_hook(all_reduce_hook(exchange, name or "model"))
        else:
            unit.set_custom_reduce_scatter(CompressedReduceScatter(exchange, name or "model"))


def _compress_gathers(engine: ShardedEngine, method: Method) -> None:
    gathers = Exchange(method, engine.mesh.get_group(SHARDS), engine.device.torch_device)
    for unit in _sharded(engine.units):
        unit.set_custom_all_gather(CompressedAllGather(gathers))


def _prefetch(units: dict[str, nn.Module], settings: FsdpSettings) -> None:
    for before, after in pairwise(_sharded(units)[:-1]):
        if settings.forward_prefetch:
            before.set_modules_to_forward_prefetch([after])
        if settings.backward_prefetch == "BACKWARD_POST":
            # a block that prefetches itself has no default prefetch; the one before it is
            # gathered when its gradients are there
            after.set_modules_to_backward_prefetch([after])
            after.register_full_backward_hook(partial(_unshard, before))


def _unshard(unit: FSDPModule, *_: object) -> None:
    unit.unshard(async_op=True)
