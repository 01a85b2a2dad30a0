"""Which elements of a group take the same optimizer step, and that step on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Segment
from fluxtrain.optim.hyper import Hyper, Turns
from fluxtrain.optim.reference import rounding
from fluxtrain.optim.stepping import Flat, step_on_device_
from fluxtrain.plan.states import STATE_BLOCK
from fluxtrain.stream.norm import GradNorm

MOST_BORDERS = 16  # a kernel is compiled for each number of them


@dataclass(frozen=True)
class Range:
    """Neighbouring members of one segment that take the same step, or but for the weight decay."""

    segment: Segment
    gradient: Tensor  # the segment's; taken now: zero_grad may come before the update runs
    start: int  # elements
    stop: int
    hyper: Hyper
    step: int
    scale: float  # recorded by the caller (clip_grad_norm_, a manual mul_)
    adjoins: bool = False  # the range before it: between the two there is nothing but padding
    turns: Turns | None = None  # of parts with the decay of `hyper` and another one


def ranges(group: Group, hypers: dict[int, Hyper]) -> list[Range]:
    """Cut the group's members (index -> hyperparameters) into the fewest ranges that a kernel takes
    at once."""
    return [_as_one(parts) for parts in stretches(same_steps(group, hypers))]


def same_steps(group: Group, hypers: dict[int, Hyper]) -> list[Range]:
    """The fewest ranges of members that take the same step."""
    found: list[Range] = []
    for segment in group.trained:
        how: tuple[Hyper, int, float] | None = None  # of the range that the member before ended
        start = stop = 0
        adjoins = False
        for member in segment.members:
            hyper = hypers.get(member.index)
            mine = None if hyper is None else (hyper, member.step, member.gradient_scale)
            if mine != how:
                if how is not None:
                    found.append(Range(segment, segment.gradient, start, stop, *how, adjoins))
                how, start, adjoins = mine, member.offset, how is not None
            stop = member.offset + member.count
        if how is not None:
            found.append(Range(segment, segment.gradient, start, stop, *how, adjoins))
    return found


def flat_of(part: Range) -> Flat:
    """The range's slices of its segment's tensors."""
    s, cut = part.segment, slice(part.start, part.stop)
    blocks = slice(part.start // STATE_BLOCK, -(-part.stop // STATE_BLOCK))
    assert s.weights is not None and s.m is not None and s.v is not None
    return Flat(
        weights=s.weights[cut],
        lo=s.lo[cut] if s.lo is not None else None,
        m=s.m[cut],
        v=s.v[cut],
        m_scale=s.m_scale[blocks] if s.m_scale is not None else None,
        v_scale=s.v_scale[blocks] if s.v_scale is not None else None,
        gradient=part.gradient[cut],
        master=s.master[cut] if s.master is not None else None,
        rounding=rounding(s.seed, part.step, part.start),
    )


def step_on_device(work: Sequence[Range], norm: GradNorm | None) -> None:
    """Queued on the computation's stream; nothing is read back."""
    if not work:
        return
    weights = work[0].segment.weights
    assert weights is not None
    clip = norm.device_scale() if norm is not None else torch.ones((), device=weights.device)
    for part in work:
        step_on_device_(
            flat_of(part),
            hyper=part.hyper, step=part.step, scale=part.scale, clip=clip, turns=part.turns,
        )  # fmt: skip


def _as_one(parts: list[Range]) -> Range:
    if len(parts) == 1:
        return parts[0]
    first, second = parts[:2]
    borders = tuple(part.start - first.start for part in parts[1:])
    return replace(first, stop=parts[-1].stop, turns=Turns(borders, second.hyper.weight_decay))


def stretches(work: Sequence[Range]) -> list[list[Range]]:
    """Ranges that one kernel steps: neighbours that are decayed in turn, the first as the third and
    so on, and single ones."""
    found: list[list[Range]] = []
    for part in work:
        if found and part.adjoins and _takes_its_turn(part, found[-1]):
            found[-1].append(part)
        else:
            found.append([part])
    return found


def _takes_its_turn(part: Range, before: list[Range]) -> bool:
    """Does it take the step of those before it, next to it, but for the weight decay in turn?"""
    last, s = before[-1], part.segment
    known = s.format == "fp32" and (s.master is None or s.master.is_cuda)
    if not known or len(before) > MOST_BORDERS:
        return False
    if (part.step, part.scale) != (last.step, last.scale):
        return False
    if len(before) > 1:
        return part.hyper is before[-2].hyper or part.hyper == before[-2].hyper
    return part.hyper == replace(last.hyper, weight_decay=part.hyper.weight_decay)
