"""Takes over `torch.optim.AdamW.step()` for wrapped parameters.

A global pre-hook sees every optimizer's step. AdamW (by exact type, so that a subclass with other
arithmetic is left alone) is taken over: the engine reads its hyperparameters from `param_groups`
and updates its own arenas, and the gradients are hidden while the original step runs, so that it
has nothing to do. Any other optimizer runs unchanged on the host tensors; a warning says so once.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fluxtrain.core.adamw.hyper import Hyper
from fluxtrain.core.gradients.host_gradients import round_stored
from fluxtrain.core.guards.wrap_checks import refuse_other_group
from fluxtrain.core.guards.writes import check_writes
from fluxtrain.core.memory.group import Group
from fluxtrain.core.optimizer.optimizer_state import (
    Entries,
    attach_state,
    check_state,
    held_state,
    import_state,
    wrapped_parameters,
)
from fluxtrain.core.optimizer.plain_state import make_plain
from fluxtrain.core.runtime.context import Context, Owner, StepInBackward
from fluxtrain.core.runtime.user_gradients import replace, resolve
from fluxtrain.core.updates.norm import GradNorm
from fluxtrain.errors import MisusedModel


@functools.cache
def install() -> None:
    """Register the global hooks, once a process."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    entries = wrapped_parameters(optimizer)
    if not entries:
        make_plain(optimizer)
        return None
    for owner, _, _ in entries:
        owner.hidden = False
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    step = _engine_step if takes_over(optimizer) else _foreign_step
    if closure is None:
        step(optimizer, entries)
        return None
    instead: Callable[[], Any]
    if step is _engine_step:  # the closure runs now; the original step gets its result
        with torch.enable_grad():
            loss = closure()
        step(optimizer, entries)
        instead = lambda: loss  # noqa: E731
    else:  # L-BFGS calls its closure any number of times, each time with new gradients

        def instead() -> Any:
            loss = closure()
            step(optimizer, entries)
            return loss

    if len(args) > 1:
        return (args[0], instead, *args[2:]), kwargs
    return args, {**kwargs, "closure": instead}


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for owner, _, _ in wrapped_parameters(optimizer):
        owner.hidden = False


def takes_over(optimizer: Optimizer) -> bool:
    """Return whether the engine can make this optimizer's step."""
    if type(optimizer) not in (AdamW, Adam):
        return False
    for group in optimizer.param_groups:
        coupled = type(optimizer) is Adam and not group.get("decoupled_weight_decay", False)
        if group.get("amsgrad") or (coupled and float(group["weight_decay"]) != 0.0):
            return False
    return True


def _claim(optimizer: Optimizer, entries: Entries) -> None:
    """Note that this optimizer steps the parameters; raise MisusedModel if another one still does.

    A new optimizer, or one whose state was emptied, starts from moments of zero, as in torch."""
    held = held_state(optimizer)
    anew = [
        owner
        for owner, _, index in entries
        if owner.stepper is not None
        and owner.member.step
        and (owner.stepper() is not optimizer or index not in held)
    ]
    if any(_still_stepped(owner, optimizer) for owner in anew):
        gc.collect()  # a scheduler leaves a dropped optimizer in a reference cycle
    for owner in anew:
        if _still_stepped(owner, optimizer):
            raise MisusedModel(
                f"a second optimizer steps {owner.name}, which another one has stepped "
                f"{owner.member.step} times: keep one optimizer per parameter (the moments "
                "live with the parameter), or delete the first"
            )
    for owner in anew:
        owner.context.flush()
        owner.group.forget_moments(owner.member)
    for owner, _, _ in entries:
        if owner.stepper is None or owner.stepper() is not optimizer:
            owner.stepper = weakref.ref(optimizer)


def _still_stepped(owner: Owner, optimizer: Optimizer) -> bool:
    """Return whether another optimizer that stepped this parameter still holds it."""
    holder = owner.stepper() if owner.stepper is not None else None
    if holder is None or holder is optimizer:
        return False
    parameter = owner.member.parameter
    return any(p is parameter for group in holder.param_groups for p in group["params"])


def _one_of_each_group(entries: Entries) -> list[Owner]:
    return list({id(owner.group): owner for owner, _, _ in entries}.values())


def _contexts(entries: Entries) -> list[Context]:
    return list({id(o.context): o.context for o in _one_of_each_group(entries)}.values())


def _engine_step(optimizer: Optimizer, entries: Entries) -> None:
    contexts = _contexts(entries)
    refuse_broken_step(contexts)
    for context in contexts:
        context.wait_for_skipped()
        if context.loss_scale is not None:
            context.loss_scale.take_back_skipped()
    own = [context for context in contexts if own_step(context, optimizer)]
    if own and getattr(optimizer, "grad_scale", None) is not None:
        raise MisusedModel(
            "a step in backward has updated weights with gradients that a GradScaler was still to "
            "unscale: leave begin_step_in_backward out, or the scaler (bf16 needs none)"
        )
    if not own:
        prepare(optimizer, entries)  # a step in backward did so before its first update
    if not _overflowed(optimizer):
        _submit(optimizer, entries)
    attach_state(optimizer, entries)
    for owner, _, _ in entries:
        owner.hidden = True


def begin_step_in_backward(
    context: Context, optimizer: Optimizer, loss: Tensor | None
) -> StepInBackward:
    """Prepare a step that updates groups in the backward pass of `loss`."""
    entries = wrapped_parameters(optimizer)
    if not takes_over(optimizer):
        raise MisusedModel(
            f"{type(optimizer).__name__} cannot step block by block: use torch.optim.AdamW"
        )
    prepare(optimizer, entries)
    work: dict[Group, list[tuple[Owner, Hyper]]] = {}
    by_options = hypers_of(optimizer)
    for owner, options, _ in entries:
        if owner.context is context:
            work.setdefault(owner.group, []).append((owner, by_options[id(options)]))
    return StepInBackward(optimizer, context, work, loss)


def own_step(context: Context, optimizer: Optimizer) -> StepInBackward | None:
    """Return the step in backward that this optimizer began, if one is under way."""
    context.forget_orphaned_step()
    step = context.step_in_backward
    return step if step is not None and step.is_of(optimizer) else None


def refuse_broken_step(contexts: list[Context]) -> None:
    """Raise MisusedModel if the backward pass of a step in backward failed: a part of the model may
    be updated already, and stepping the rest would mix two states."""
    if not any(
        context.step_in_backward is not None and context.graphs.broke_off for context in contexts
    ):
        return
    steps = [
        context.step_in_backward for context in contexts if context.step_in_backward is not None
    ]
    updated = sum(len(step.updated) for step in steps if not step.was_refused())
    for context in contexts:
        context.abandon_backward()
    raise MisusedModel(
        f"the backward pass of this step in backward raised an error when {updated} of "
        f"{sum(len(context.groups) for context in contexts)} parts of the model were updated: "
        + ("go on from a checkpoint" if updated else "call zero_grad() and compute it again")
    )


def prepare(optimizer: Optimizer, entries: Entries) -> None:
    """Check and import the optimizer's state and the weights before the first update of a step."""
    for context in _contexts(entries):
        refuse_other_group(context.exchange)
        context.exchange.refuse_kept()
    make_plain(optimizer, but={index for _, _, index in entries})
    check_state(optimizer, entries)
    _claim(optimizer, entries)
    for owner in _one_of_each_group(entries):
        check_writes(owner.group)
    import_state(optimizer, entries)


def _submit(optimizer: Optimizer, entries: Entries) -> None:
    """Queue the update of every parameter that has a gradient."""
    factor = _unscale_factor(optimizer)
    work: dict[Group, dict[int, Hyper]] = {}
    by_options = hypers_of(optimizer)
    contexts = _contexts(entries)
    own = {context: step for context in contexts if (step := own_step(context, optimizer))}
    updated = {group for step in own.values() for group in step.updated}
    for owner, options, _ in entries:
        member = owner.member
        if not member.has_gradient or (updated and owner.group in updated):
            continue
        member.step += 1
        member.gradient_scale *= factor
        work.setdefault(owner.group, {})[member.index] = by_options[id(options)]
    for context in contexts:
        in_backward, norm = own.get(context), _guarding_norm(context)
        mine = {group: work[group] for group in context.groups if group in work}
        if in_backward is None:
            context.updates.submit(mine, norm)
        else:
            context.step_in_backward = None
            for group, hypers in mine.items():
                context.updates.submit_one(group, hypers, norm)
        if context.norm is not None and context.loss_scale is not None:
            stepped = [g.members[i] for g in context.groups for i in work.get(g, ())]
            context.loss_scale.after(context.norm, stepped)
        if in_backward is not None:
            in_backward.end()
        context.graphs.end_step()
        _clip_others(context, {id(o.member) for o, _, _ in entries}, norm)
        context.norm, context.norm_before = None, context.norm
        context.counters.step += 1
        context.begin_next_step()
    for context in contexts:  # after all are submitted, because a refused update raises here
        if not context.overlap:
            context.flush()


def _guarding_norm(context: Context) -> GradNorm | None:
    """Return the norm that guards this step against values that are not finite.

    A step in backward has no global norm: its loss alone is checked, whichever optimizer began it.
    """
    norm, in_backward = context.norm, context.step_in_backward
    unguarded = norm is None or not norm.guards
    return in_backward.guard or norm if in_backward is not None and unguarded else norm


def _clip_others(context: Context, stepped: set[int], norm: GradNorm | None) -> None:
    """Clip the gradients that this step does not take: of parameters outside all groups, and of
    parameters that another optimizer is going to step. If the norm refuses the step, drop them.
    The host waits for the norm here; few models have such parameters."""
    if norm is None or not norm.guards:
        return
    loose = [parameter for parameter in context.loose if parameter.grad is not None]
    others = [
        (group, member)
        for group in context.groups
        for member in group.members
        if member.has_gradient and id(member) not in stepped
    ]
    refused = bool(loose or others) and (norm.overflowed() or norm.refuses())
    for parameter in loose:
        if refused:
            parameter.grad = None
        elif parameter.grad is not None and (norm.max_norm is not None or norm.scaled):
            parameter.grad.mul_(norm.device_scale())
    for group, member in others:
        if refused:
            replace(context, group, member, None)
        else:
            member.gradient_scale *= norm.scale()


def hypers_of(optimizer: Optimizer) -> dict[int, Hyper]:
    """Return the hyperparameters by the id of each parameter group."""
    return {id(options): _hyper(options) for options in optimizer.param_groups}


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
    """Return whether GradScaler found an overflow; it hands `found_inf` to fused optimizers."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(float(found) > 0.0)


def _unscale_factor(optimizer: Optimizer) -> float:
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)


def _foreign_step(optimizer: Optimizer, entries: Entries) -> None:
    """Let another optimizer work on the host tensors; the next forward notices its writes."""
    make_plain(optimizer)
    for context in _contexts(entries):
        refuse_other_group(context.exchange)
        context.exchange.refuse_kept()
        context.flush()
        _clip_others(context, {id(o.member) for o, _, _ in entries}, context.norm)
        norm, context.norm = context.norm, None
        factor = 1.0 if norm is None else norm.scale()
        for owner, _, _ in entries:
            if owner.context is context:
                round_stored(owner.group)
                if owner.member.has_gradient:
                    owner.member.gradient_scale *= factor
                    resolve(context, owner.group, owner.member)
        context.say(
            f"{type(optimizer).__name__} runs on the host, on the weights as they are (no fp32 "
            "masters): torch.optim.AdamW is updated by FluxTrain's own kernels"
        )


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that also takes gradients in fp16; used in the same way.

    torch's own refuses to unscale fp16 gradients, because small ones would vanish. Gradients of a
    wrapped model keep their size: the factor is recorded and the update of the fp32 masters applies
    it. (torch.distributed.fsdp's ShardedGradScaler allows them in the same place.)
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)
