"""`wrap`: make a model's blocks stream, in place, without changing how it is used."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import set_multithreading_enabled

from fluxtrain.core.device.cuda_device import open_device
from fluxtrain.core.device.heap import trim_heap
from fluxtrain.core.embedding.lookup import choose_rows
from fluxtrain.core.guards.arguments import to_device
from fluxtrain.core.guards.wrap_checks import (
    advice,
    is_of_a_command,
    refuse_other_objects,
    refuse_unsupported,
)
from fluxtrain.core.head import device_head
from fluxtrain.core.head.vocab_chunks import choose_vocab_chunks
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.group_memory import refuse_tiers
from fluxtrain.core.memory.packed import KeptWeights, all_dense_weights
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.optimizer.hook import install as install_adoption
from fluxtrain.core.optimizer.optimizer_state import bring_home, refuse_copies
from fluxtrain.core.optimizer.plain_state import let_go
from fluxtrain.core.ranks import ddp
from fluxtrain.core.ranks.exchange import NOT_EXCHANGED, Exchange
from fluxtrain.core.ranks.join import ALONE, Ranks, joined, uuids_of_nccl
from fluxtrain.core.runtime.context import Owner
from fluxtrain.core.runtime.parameter import adopt_parameter, owner_of, release_parameter
from fluxtrain.core.runtime.passes import take_in
from fluxtrain.core.wrap.adapters import adapters_of, refuse_late, take_magnitudes_of_packed
from fluxtrain.core.wrap.bitsandbytes_layers import give_back_quantised, take_over_quantised
from fluxtrain.core.wrap.block_discovery import Parts, take_apart
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.core.wrap.equal_ranks import make_equal, share_out, shares_of
from fluxtrain.core.wrap.grouping import Borrowed, group_parameters, head_linear, model_facts
from fluxtrain.core.wrap.module_patches import (
    ancestors,
    guard_module,
    move_buffers,
    release_module,
    replace_forward,
)
from fluxtrain.core.wrap.slots import choose_recompute, make_slots, put_units_on_cards
from fluxtrain.core.wrap.target import compute_devices, devices_of, placed
from fluxtrain.core.wrap.unit_forward import UnitForward
from fluxtrain.errors import BadInput, MisusedModel, UnsupportedModel
from fluxtrain.plan.group_placement import check_groups, check_rows
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.reasons import without_effect
from fluxtrain.plan.request import PlacementRequest, RunRequest
from fluxtrain.plan.states import StateFormat, StorageFormat

# Opens, for the groups before their weights move, where packed weights are kept.
Keeping = Callable[[Iterable[Group]], AbstractContextManager[KeptWeights]]


def wrap(  # noqa: PLR0913 - each is a choice of its own
    model: nn.Module,
    *,
    device: str | torch.device | None = None,
    cards: int | Sequence[int] | None = None,
    offload: str | None = None,
    chunk_rows: int | None = None,
    budget_gib: float | None = None,
    placement: PlacementRequest | Placement | None = None,
    overlap: bool = False,
    states: StateFormat = "fp32",
    frozen: StorageFormat = "plain",
    optimizer_in_backward: bool = False,
    deferred_moments: bool = False,
) -> nn.Module:
    """Let the blocks of `model` stream through `device`; returns the same object.

    The model is used as before: forward, backward, `torch.optim.AdamW`, `clip_grad_norm_`,
    `state_dict`, `generate`. Wrapping twice is wrapping once: the first choices stay.
    The optimizer's `state_dict()` is read by processes that have wrapped a model; torch alone would
    begin anew, unsaid: give it `fluxtrain.plain_optimizer_state(state_dict)`.

    device: where blocks are computed (None: the GPU when torch can use it, else the CPU).
    cards: how many GPUs compute together, or which (None: those that help); blocks are dealt to
        them. With device="cpu" so many parts of the processor that take the same ways (None: one).
    offload: `none` keeps all on the device, `optimizer` the weights; with `weights` these stream,
        with `max` through the fewest slots; `auto` chooses by free memory.
    chunk_rows: rows of a batch that a block computes at a time (None: by memory).
    budget_gib: device memory to plan for (None: what is free).
    placement: every knob of the placement in a `fluxtrain.PlacementRequest`, to which the arguments
        above are added; or a made `Placement`, which is taken as it is.
    overlap: `optimizer.step()` returns at once and blocks wait for their own updates; call
        `fluxtrain.sync(model)` before reading weights through tensors taken earlier.
    states: AdamW's moments in `fp32`, `bf16` (rounded at random) or `8bit` (as bitsandbytes).
    frozen: frozen weights of blocks are kept as they are (`plain`), or packed in 4 or 8 bits
        (`nf4`, `nf4-double`, `int8`) and unpacked for each computation (QLoRA).
    optimizer_in_backward: plan less memory for gradients, as every step will update in backward
        (`Engine.begin_step_in_backward`, before the backward pass).
    deferred_moments: AdamW on the host writes all weights first, fp32 moments later: the same bits.
    Within a torch.distributed process group each rank computes on one GPU, or on so many `cards`
    of its own (a count takes those that follow, by the rank's place on its machine); gradients
    become the mean over ranks as DistributedDataParallel takes it (which may be put around the
    model, and finds nothing to do), and all ranks keep equal weights.
    Raises UnsupportedModel, BadInput or DoesNotFit; MisusedModel in one of several processes that
    are not joined yet.
    What does not work: weights' gradients by `autograd.grad`, second derivatives, `torch.func`, a
    block's own random generator.
    """
    if "_fluxtrain_engine" in getattr(model, "__dict__", {}):
        return model
    refuse_other_objects(model)
    ranks = ALONE if is_of_a_command() else joined()
    take_over_quantised(model)
    refuse_unsupported(model)
    asked: dict[str, Any] = {"offload": offload, "chunk_rows": chunk_rows, "budget_gib": budget_gib}
    asked = {name: value for name, value in asked.items() if value is not None}
    steps: dict[str, Any] = {"optimizer_in_backward": optimizer_in_backward}
    steps["deferred_moments"] = deferred_moments or None
    if isinstance(placement, Placement):
        _refuse_beside_a_placement(asked | {name: True for name, value in steps.items() if value})
        made_for = devices_of(placement, device, cards, ranks)
        exchange = _exchange(ranks, made_for)
        _put_engine(model, made_for, placement, states, frozen, overlap=overlap, exchange=exchange)
        return model
    request = replace(_request_of(placement), **asked)
    device = request.device if device is None and request.device != "auto" else device
    made = RunRequest.of(request, **steps)
    devices = compute_devices(device, cards, ranks)
    how: dict[str, Any] = {"overlap": overlap, "chooses": cards is None}
    how["exchange"] = _exchange(ranks, devices)
    _put_engine(model, devices, made, states, frozen, **how)
    return model


def _exchange(ranks: Ranks, devices: Sequence[torch.device]) -> Exchange:
    if is_of_a_command():
        return NOT_EXCHANGED
    if ranks.world > 1:
        ranks.refuse_other_count(len(devices))
        ranks.refuse_shared_gpu(uuids_of_nccl(devices))
    return Exchange(ranks, devices)


auto_wrap = wrap  # the same under another name


def wrap_placed(
    model: nn.Module,
    device: str,
    placement: Placement,
    *,
    cards: Sequence[int] | None = None,
    states: StateFormat,
    frozen: StorageFormat,
    keeping: Keeping | None = None,
    exchange: Exchange = NOT_EXCHANGED,
) -> nn.Module:
    """Do what `wrap` does, for a trainer that has loaded the model: with a made placement, updates
    during the computation, packed weights that may be kept on disk, and its files' pages given
    back as soon as they were read; `exchange` is that with other processes."""
    refuse_unsupported(model)
    how: dict[str, Any] = {"overlap": True, "keeping": keeping, "drops": True}
    how["exchange"] = exchange
    _put_engine(model, compute_devices(device, cards or 1), placement, states, frozen, **how)
    return model


def _put_engine(
    model: nn.Module,
    devices: Sequence[torch.device],
    asked: RunRequest | Placement,
    states: StateFormat,
    frozen: StorageFormat,
    *,
    overlap: bool,
    chooses: bool = False,
    keeping: Keeping | None = None,
    drops: bool = False,
    exchange: Exchange = NOT_EXCHANGED,
) -> None:
    """Give the model's parts an engine, which adopts optimizers; plan only what is not placed, and
    where it `chooses` on those of the devices that help."""
    parts = _parts_of(model)
    groups, borrowed = group_parameters(model, parts, states, frozen)
    if isinstance(asked, Placement):
        placement, told = asked, list[str]()
        check_groups(placement.groups, [group for group in groups.values() if group.members])
        check_rows(placement.groups, cards=len(devices))
        blocks = [group for group in groups.values() if group.kind == "block"]
        with_files = {b.name for b in blocks if keeping is not None and b.file_segments}
        refuse_tiers(placement.groups, on_disk=with_files)
    else:
        facts = model_facts(model, parts, groups, borrowed)
        facts = replace(facts, processes=exchange.ranks.world)
        placement, devices = placed(
            facts, model, devices, asked, all_of_them=not chooses, ranks=exchange.ranks
        )
        told = without_effect(asked, placement.choices)
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in
        several = len(devices) > 1
        opened = [open_device(device, one_of_several=several) for device in devices]
        engine = Engine(opened, placement, overlap=overlap, exchange=exchange)
        with nullcontext() if keeping is None else keeping(groups.values()) as kept:
            _load_groups(engine, groups, kept, drops=drops)
        take_magnitudes_of_packed(model, engine.groups)
        _make_units(engine, model, parts, groups, borrowed)
        put_units_on_cards(engine)
        choose_rows(engine)
        choose_vocab_chunks(engine)
        make_slots(engine)
        choose_recompute(engine)
        _put_on(engine, model, parts)
        make_equal(engine)
        share_out(engine)
    if several and exchange.ranks.world > 1:  # torch's threads for cards would send in any order
        engine.one_thread = set_multithreading_enabled(False)
    engine.adapters = adapters_of(model)
    engine.again = partial(
        _again, devices, asked, states, frozen, overlap=overlap, exchange=exchange
    )
    if not drops and (advised := advice(groups.values())):
        told.append(advised)
    for text in [*told, *engine.spill.remarks()]:
        engine.say(text)
    install_adoption()
    ddp.install()


def _again(
    devices: Sequence[torch.device],
    asked: RunRequest | Placement,
    states: StateFormat,
    frozen: StorageFormat,
    model: nn.Module,
    **how: Any,
) -> None:
    """Wrap a model as it was, with the adapters that were put into it meanwhile."""
    engine = engine_of(model)
    refuse_late(engine, asked)
    engine.say("adapters were put into the wrapped model: it is wrapped again, with them")
    unwrap(model)
    _put_engine(model, devices, asked, states, frozen, **how)


def unwrap(model: nn.Module) -> nn.Module:
    """Undo `wrap`: plain parameters on the host with their current weights, in the same object.
    Packed weights are unpacked: they stay what 4 or 8 bits have made of them.

    An optimizer that stepped them goes on: its next step or `state_dict()` turns moments and step
    counts into torch's own layout, in the parameters' dtype (8-bit and bf16 moments of fp32
    parameters become fp32). So do copies of model and optimizer, and an optimizer of plain
    parameters that loads a `state_dict()` made while they were wrapped; an optimizer other than
    Adam or AdamW without amsgrad raises MisusedModel then. What completed bf16 and fp16 weights to
    fp32 masters is gone.
    """
    engine = engine_of(model)
    if engine.step_in_backward is not None:
        engine.step_in_backward.drop()
    owners = [owner for owners in engine.owners.values() for owner in owners.values()]
    if any(group.is_on("disk", "state") for group in engine.groups):
        engine.flush()
        away = [group for group in engine.groups if group.memory.trained_on_disk]
        refuse_copies(sum(group.weight_bytes for group in away), "weights")
        bring_home(owners)
        for group in away:
            group.memory.bring_weights_home()
    engine.close()
    let_go(owners)
    for hook in model.__dict__.pop("_fluxtrain_hooks"):
        hook.remove()
    for unit in engine.units:
        release_module(unit.module)
        for group, member in unit.members:
            if member.parameter.__dict__.get("_fluxtrain") is not None:
                key = engine.owners[group][member.index].hook_key
                hooks = getattr(member.parameter, "_post_accumulate_grad_hooks", None) or {}
                release_parameter(member.parameter)
                hooks.pop(key, None)
    for group in engine.groups:
        _give_back_values(group)
    for module in model.modules():
        release_module(module)
    del model.__dict__["_fluxtrain_engine"]
    return model


def _give_back_values(group: Group) -> None:
    """Give the parameters of a group that was wrapped values on the host: packed ones what they
    unpack to, or their layer's own packed form, and plain ones on disk what is in the file."""
    if not give_back_quantised(group):
        for index, weights in all_dense_weights(group.segments).items():
            group.members[index].parameter.data = weights.cpu().clone()
    for segment in group.segments:
        if segment.packed is None and not segment.has_values:
            stored = segment.stored_weights()
            for member in segment.members:
                member.parameter.data = member.slice(stored).clone()


def sync(model: nn.Module, *, written: bool = False) -> None:
    """Wait for all updates, so that any alias of a weight reads its current value.

    written: weights were changed through aliases; their masters are set from them.
    """
    engine = engine_of(model)
    engine.flush()
    for group in engine.groups:
        group.weights_changed(frozen=True)
        if written:
            for segment in group.trained:
                segment.masters_are_weights()


def _parts_of(model: nn.Module) -> Parts:
    """Refuse fp16 parameters outside groups: torch itself updates those, without masters."""
    parts = take_apart(model)
    for name, parameter in parts.loose:
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise UnsupportedModel(
                f"{name} is float16, trained, and belongs to no module of its own, so it would "
                "have no fp32 master: convert it first, or load with dtype=torch.bfloat16"
            )
    return parts


def _request_of(placement: Any) -> PlacementRequest:
    if isinstance(placement, PlacementRequest | None):
        return placement or PlacementRequest()
    raise BadInput(
        f"placement is {placement!r}: give a fluxtrain.PlacementRequest, such as "
        "PlacementRequest(offload='weights')"
    )


def _refuse_beside_a_placement(asked: Iterable[str]) -> None:
    """Refuse arguments that a made placement already sets."""
    for name in asked:
        why = "is part of the placement that was made: leave it out, or give wrap a"
        raise BadInput(f"{name} {why} PlacementRequest")


def _load_groups(
    engine: Engine, groups: dict[str, Group], kept: KeptWeights | None, *, drops: bool
) -> None:
    """Move every group's weights to their tier, one at a time, so that no second copy of the model
    ever exists."""
    engine.groups += [g for g in groups.values() if g.members]
    for group, row in zip(engine.groups, engine.plan.groups, strict=True):
        pin, shares = engine.device.pins and not row.is_on("device"), shares_of(engine, row)
        device, spill = engine.cards[row.card].torch_device, engine.spill
        group.place(row, device, pin=pin, spill=spill, kept=kept, drops=drops, shares=shares)
        engine.owners[group] = {}
        for member in group.members:
            owner = Owner(engine, group, member)
            engine.owners[group][member.index] = owner
            if member.parameter.requires_grad:
                hook = member.parameter.register_post_accumulate_grad_hook(_stray_gradient)
                owner.hook_key = hook.id
            adopt_parameter(member.parameter, owner)
        trim_heap()  # the copies that its weights were may be pieces of the heap
    if engine.exchange.shares is not None and engine.exchange.shares.memory is not None:
        engine.exchange.shares.memory.meet()  # the first has put all weights there
    engine.spill.make_room(sum(sum(group.memory.records_to_make()) for group in engine.groups))
    gc.collect()


def _stray_gradient(parameter: Tensor) -> None:
    """Return a hook without a closure: the garbage collector does not look into a tensor's hooks,
    so a hook that held the parameter would keep it alive for ever."""
    owner = owner_of(parameter)
    if owner is not None:
        take_in(owner, owner.member.parameter)


def _make_units(
    engine: Engine, model: nn.Module, parts: Parts, groups: dict[str, Group], borrowed: Borrowed
) -> None:
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    named = sorted([*parts.edges, *parts.blocks], key=lambda part: order.get(part[0], 0))
    for position, (name, module) in enumerate(named):
        unit = Unit(name, module, position, groups[name])
        for group, indices in borrowed.get(name, {}).items():
            unit.borrowed[group] = [group.members[i] for i in indices]
        members = {id(m.parameter): m for _, m in unit.members}
        unit.places = [
            (inner, key, members[id(parameter)])
            for inner in module.modules()
            for key, parameter in inner._parameters.items()
            if parameter is not None and id(parameter) in members
        ]
        unit.linear = head_linear(model, module)
        replace_forward(module, UnitForward(engine, unit))
        guard_module(module, engine)
        engine.units.append(unit)


def _put_on(engine: Engine, model: nn.Module, parts: Parts) -> None:
    """Let the model itself know its engine: the modules outside the blocks, and its surface."""
    device = engine.device.torch_device
    for _, parameter in parts.loose:
        parameter.data = parameter.data.to(device)
        engine.loose.append(parameter)
    hooks = [
        parameter.register_post_accumulate_grad_hook(engine.exchange.reduce_gradient)
        for parameter in engine.loose
        if parameter.requires_grad and engine.exchange.ranks.world > 1
    ]
    if device.type != "cpu":
        move_buffers(model, device)
        for unit in engine.units:
            move_buffers(unit.module, engine.card_of(unit).torch_device)
    model.__dict__["_fluxtrain_engine"] = engine
    model.__dict__["_fluxtrain_hooks"] = (
        model.register_forward_pre_hook(_before_model, with_kwargs=True),
        model.register_forward_hook(_after_model, always_call=True),
        *hooks,
    )
    for module in ancestors(model, {id(u.module) for u in engine.units}):
        guard_module(module, engine)


def _before_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Move inputs to the device; the user's own gradient checkpointing has nothing left to do."""
    engine = model.__dict__.get("_fluxtrain_engine")
    if engine is None:
        raise MisusedModel("this model was copied while wrapped: wrap the copy")
    if adapters_of(model) != engine.adapters:
        engine.again(model)
        engine = engine_of(model)
    if kwargs.get(device_head.FLAG):
        device_head.serve(model, engine)
    for unit in engine.units:
        if getattr(unit.module, "gradient_checkpointing", False):
            unit.module.gradient_checkpointing = False
            engine.say("gradient checkpointing is off: wrapped blocks recompute by themselves")
    if engine.device.torch_device.type == "cpu":
        return None
    moved: tuple[tuple[Any, ...], dict[str, Any]]
    moved, _ = to_device((args, kwargs), engine.device.torch_device)
    engine.host_ids.note((args, kwargs), moved)
    return moved


def _after_model(model: nn.Module, *_: object) -> None:
    engine = model.__dict__.get("_fluxtrain_engine")
    if engine is not None:
        engine.host_ids.forget()
        device_head.end(model, engine)
