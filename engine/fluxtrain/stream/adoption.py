"""Takes over `torch.optim.AdamW.step()` for wrapped parameters.

A global pre-hook sees every optimizer's step. AdamW (by exact type, so that a subclass with other
arithmetic is left alone) is adopted: its hyperparameters are read from `param_groups`, the engine
updates its arenas, and the gradients are hidden while the original step runs, so that it has
nothing to do. Any other optimizer runs on the host tensors as it is, and that is said once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fluxtrain.errors import MisusedModel
from fluxtrain.memory.group import Group
from fluxtrain.optim.split_adamw import Hyper
from fluxtrain.stream.optimizer_state import attach_state, import_state
from fluxtrain.stream.parameter import Owner, owner_of
from fluxtrain.stream.writes import check_writes

if TYPE_CHECKING:
    from fluxtrain.stream.engine import Engine

_installed = False


def install() -> None:
    """Register the global hooks, once a process."""
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)


def _owners(optimizer: Optimizer) -> list[tuple[Owner, dict[str, Any], int]]:
    """Owner, parameter group and index of every wrapped parameter, in the optimizer's order."""
    found: list[tuple[Owner, dict[str, Any], int]] = []
    index = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owner_of(parameter)
            if owner is not None:
                found.append((owner, group, index))
            index += 1
    return found


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    owners = _owners(optimizer)
    if not owners:
        return None
    for owner, _, _ in owners:
        owner.hidden = False
    args, kwargs, changed = _closure_done(args, kwargs)
    for engine in {id(o.engine): o.engine for o, _, _ in owners}.values():
        mine = [entry for entry in owners if entry[0].engine is engine]
        if _adoptable(optimizer):
            _adopted_step(engine, optimizer, mine)
        else:
            _foreign_step(engine, optimizer, mine)
    return (args, kwargs) if changed else None


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for owner, _, _ in _owners(optimizer):
        owner.hidden = False


def _closure_done(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Run a closure now, before the update; the original step gets its result."""
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs, False
    with torch.enable_grad():
        loss = closure()
    if len(args) > 1:
        return (args[0], lambda: loss, *args[2:]), kwargs, True
    return args, {**kwargs, "closure": lambda: loss}, True


def _adoptable(optimizer: Optimizer) -> bool:
    if type(optimizer) not in (AdamW, Adam):
        return False
    for group in optimizer.param_groups:
        coupled = type(optimizer) is Adam and not group.get("decoupled_weight_decay", False)
        if group.get("amsgrad") or (coupled and float(group["weight_decay"]) != 0.0):
            return False
    return True


def _claim(engine: Engine, optimizer: Optimizer) -> None:
    """One optimizer steps a parameter."""
    holder = engine.optimizer() if engine.optimizer is not None else None
    if holder is None:
        engine.optimizer = weakref.ref(optimizer)
        return
    if holder is not optimizer:
        theirs = {id(p) for g in holder.param_groups for p in g["params"]}
        shared = [p for g in optimizer.param_groups for p in g["params"] if id(p) in theirs]
        stepped = [o for o in map(owner_of, shared) if o is not None and o.member.step > 0]
        if stepped:
            raise MisusedModel(
                f"a second optimizer steps {stepped[0].member.name}, which another one has stepped "
                f"{stepped[0].member.step} times: keep one optimizer per parameter (the moments "
                "live with the parameter), or delete the first"
            )


def _adopted_step(
    engine: Engine, optimizer: Optimizer, owners: list[tuple[Owner, dict[str, Any], int]]
) -> None:
    _claim(engine, optimizer)
    for group in {id(o.group): o.group for o, _, _ in owners}.values():
        check_writes(engine, group)
    import_state(engine, optimizer, owners)
    if _overflowed(optimizer):
        _hide(owners)
        return
    factor = _unscale_factor(optimizer)
    work: dict[Group, dict[int, Hyper]] = {}
    for owner, options, _ in owners:
        member = owner.member
        if not member.has_gradient:
            continue
        member.step += 1
        member.gradient_scale *= factor
        work.setdefault(owner.group, {})[member.index] = _hyper(options)
    for group in engine.groups:
        if group in work:
            engine.updates.submit(group, work[group], engine.norm)
    engine.norm = None
    engine.accounts.step += 1
    attach_state(engine, optimizer, owners)
    _hide(owners)
    if not engine.overlap:
        engine.flush()


def _hide(owners: list[tuple[Owner, dict[str, Any], int]]) -> None:
    for owner, _, _ in owners:
        owner.hidden = True


def _hyper(options: dict[str, Any]) -> Hyper:
    beta1, beta2 = options["betas"]
    return Hyper(
        lr=float(options["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(options["eps"]),
        weight_decay=float(options["weight_decay"]),
        maximize=bool(options.get("maximize", False)),
    )


def _overflowed(optimizer: Optimizer) -> bool:
    """GradScaler hands `found_inf` to fused optimizers."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(float(found) > 0.0)


def _unscale_factor(optimizer: Optimizer) -> float:
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)


def _foreign_step(
    engine: Engine, optimizer: Optimizer, owners: list[tuple[Owner, dict[str, Any], int]]
) -> None:
    """Let another optimizer work on the host tensors; writes are noticed at the next forward."""
    engine.flush()
    norm, engine.norm = engine.norm, None
    factor = 1.0 if norm is None else norm.scale()
    for owner, _, _ in owners:
        owner.group.narrow_gradients()
        if owner.member.has_gradient:
            owner.member.gradient_scale *= factor
            engine.settle_gradient(owner.group, owner.member)
    engine.say(
        f"{type(optimizer).__name__} runs on the host, on the weights as they are (no fp32 masters): "
        "torch.optim.AdamW is updated by FluxTrain's own kernels"
    )
