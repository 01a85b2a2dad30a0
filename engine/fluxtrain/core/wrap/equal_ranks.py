"""Processes that train one model begin with equal weights, or say which differ."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, distributed

from fluxtrain.core.gradients.host_sums import HostSums
from fluxtrain.core.memory.group import Group
from fluxtrain.core.ranks.join import Ranks
from fluxtrain.core.ranks.shares import Shares
from fluxtrain.core.runtime.context import Context
from fluxtrain.errors import BadInput
from fluxtrain.plan.group_placement import KINDS, GroupPlacement

_ANOTHER = "every process must wrap the same model"


def make_equal(context: Context) -> None:
    """Give every rank the trained weights of rank 0, as DistributedDataParallel does: adapters, for
    one, are random at first.

    Raises BadInput where the models themselves, or frozen weights, are not the same.
    """
    ranks = context.exchange.ranks
    if ranks.world == 1:
        return
    ranks.refuse_others({"the model": _shape_of(context)} | _ways_of(context), _ANOTHER)
    told = ranks.gather([_sums(group) for group in context.groups])
    for place, group in enumerate(context.groups):
        of_each = [sums[place] for sums in told]
        if any(frozen != of_each[0][1] for _, frozen in of_each):
            raise BadInput(
                f"the frozen weights of {group.name} are not those of the other processes: load "
                "the same model, from the same files, in each"
            )
        if any(trained != of_each[0][0] for trained, _ in of_each):
            _take_first(group, ranks)
            context.say("trained weights differed between processes: those of rank 0 are taken")
    for parameter in context.loose:
        _broadcast(parameter.detach(), ranks)


def share_out(context: Context) -> None:
    """Leave to other ranks what they are home to, of what lives on the host."""
    for group in context.groups:
        if (shares := shares_of(context, group.placement)) is not None:
            group.share_out(shares)
    exchange, device = context.exchange, context.device
    shared = [group for group in context.groups if HostSums.takes(group)]
    if exchange.on_host and exchange.memory is not None and shared:
        sums = HostSums(shared, exchange.memory, device, exchange.factor)
        for card in context.cards:
            card.gradients.sums = sums


def shares_of(context: Context, row: GroupPlacement) -> Shares | None:
    """Return the ranges of processes that share the weights of this row; None: they do not. Parts
    that uploads would have to gather are those of blocks."""
    shares = context.exchange.shares
    if shares is None or (row.kind != "block" and shares.memory is None):
        return None
    return shares if all(row.is_on("host", kind) for kind in KINDS) else None


def collect_weights(context: Context) -> None:
    """Give rank 0 the weights of all ranks, for what it does alone at the end."""
    shares = context.exchange.shares
    context.flush()
    if shares is None or shares.memory is not None:
        return
    for group in context.groups:
        for segment in group.segments if group.shares is not None else ():
            assert segment.weights is not None
            found = shares.at_first(segment.weights, segment.stored[1])
            if found is not None:
                segment.weights.copy_(found)
    shares.ended = True
    for group in context.groups:
        group.weights_changed(frozen=True)


def _shape_of(context: Context) -> str:
    """Return a digest of names, shapes, dtypes and of what is trained."""
    told = hashlib.sha256()
    for group in context.groups:
        for m in group.members:
            told.update(f"{group.name} {m.name} {m.shape} {m.segment.dtype} {m.trained};".encode())
    return told.hexdigest()[:12]


def _ways_of(context: Context) -> dict[str, str]:
    """Return how each gradient is sent, which decides what ranks exchange."""
    chunks = {u.vocab_chunks.group: u.vocab_chunks.rows for u in context.units if u.vocab_chunks}
    return {
        f"the way of {group.name} (placement.embedding, placement.head)": (
            f"{'rows' if group.by_rows else 'whole'}, chunks of {chunks.get(group, 'all')}"
        )
        for group in context.groups
        if group.rows is not None or group in chunks
    }


def _sums(group: Group) -> tuple[int, int]:
    """Return checksums of the trained and of the frozen weights; of those on disk none."""
    sums = {True: 0, False: 0}
    for place, segment in enumerate(group.segments):
        if segment.weights is not None:
            total = int(_words(segment.weights).sum())
            sums[segment.trained] = hash((sums[segment.trained], place, total))
    return sums[True], sums[False]


def _words(flat: Tensor) -> Tensor:
    data = flat.detach().view(torch.uint8)
    whole = data[: len(data) // 8 * 8].view(torch.int64)
    return whole if len(whole) else data


def _take_first(group: Group, ranks: Ranks) -> None:
    for segment in group.trained:
        assert segment.weights is not None
        _broadcast(segment.weights, ranks)
    group.weights_changed(frozen=False)


def _broadcast(weights: Tensor, ranks: Ranks) -> None:
    """Overwrite `weights` with those of rank 0, through host memory."""
    sent = weights.detach().to("cpu").contiguous()
    distributed.broadcast(sent.view(-1).view(torch.uint8), 0, group=ranks.host)
    weights.copy_(sent)
