"""Finds the elements of a group that take the same optimizer step, and steps them on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain.adamw.flat import Flat
from fluxtrain.adamw.hyper import AdamWUpdate, Hyper
from fluxtrain.adamw.reference import rounding
from fluxtrain.adamw.step import step_
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Segment
from fluxtrain.plan.states import STATE_BLOCK
from fluxtrain.updates.norm import GradNorm


@dataclass(frozen=True)
class Range:
    """Neighbouring members of one segment that take the same step."""

    segment: Segment
    gradient: Tensor  # the segment's, kept here because zero_grad may come before the update runs
    start: int  # elements
    stop: int
    hyper: Hyper
    step: int
    scale: float  # recorded by the caller (clip_grad_norm_, a manual mul_)

    def update(self, factor: float = 1.0, clip: Tensor | None = None) -> AdamWUpdate:
        """Return the step, with gradients also multiplied by `factor` and `clip`."""
        return AdamWUpdate(hyper=self.hyper, step=self.step, scale=self.scale * factor, clip=clip)


def ranges(group: Group, hypers: dict[int, Hyper]) -> list[Range]:
    """Cut the group's members (index -> hyperparameters) into the fewest ranges that take the same
    step. A segment stores matrices first and vectors last, so two ranges suffice when only the
    matrices have weight decay."""
    found: list[Range] = []
    for segment in group.trained:
        how: tuple[Hyper, int, float] | None = None  # of the range that the member before ended
        start = stop = 0
        for member in segment.by_offset:
            hyper = hypers.get(member.index)
            mine = None if hyper is None else (hyper, member.step, member.gradient_scale)
            if mine != how:
                if how is not None:
                    found.append(Range(segment, segment.gradient, start, stop, *how))
                how, start = mine, member.offset
            stop = member.offset + member.count
        if how is not None:
            found.append(Range(segment, segment.gradient, start, stop, *how))
    return found


def flat_of(part: Range) -> Flat:
    """Return the range's slices of its segment's tensors."""
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
    """Queue the step on the compute stream; nothing is read back."""
    if not work:
        return
    weights = work[0].segment.weights
    assert weights is not None
    one = torch.ones((), device=weights.device)
    clip = one if norm is None else norm.device_scale().to(weights.device)  # of another card
    for part in work:
        step_(flat_of(part), part.update(clip=clip))
