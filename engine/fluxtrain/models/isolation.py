"""Tests whether a model keeps packed documents apart, because many classes do not.

Most decoders of transformers build a block-causal mask from position ids that restart. OPT, Falcon,
XGLM or GraniteMoE take position ids and build none, and layers that carry a state from
token to token (state spaces, recurrences, short convolutions) see across any mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

# Two rows of two documents of two tokens; the rows differ in the first document alone.
_ROWS = ((7, 11, 13, 17), (23, 29, 13, 17))
_POSITIONS = (0, 1, 0, 1)
# Fresh weights leak little (a short convolution 2e-4), so only fp32's last bits may differ: a
# mixture of experts may group tokens otherwise. In doubt each document gets a row of its own.
_TOLERATED_SHARE = 1e-5


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether position ids tell `model` where packed documents begin."""
    return "position_ids" in inspect.signature(model.forward).parameters


@torch.no_grad()
def keeps_documents_apart(model: PreTrainedModel) -> bool:
    """Run 8 tokens through `model` and see whether a document's logits depend on its neighbour's.

    The model is on the CPU and not wrapped; its training mode stays. Only its first blocks run, as
    many as show every kind of block: the whole of a large model would be read from the disk.
    """
    if not takes_positions(model):
        return False
    was_training = model.training
    model.train(False)
    try:
        ids = torch.tensor(_ROWS) % model.config.get_text_config().vocab_size
        positions = torch.tensor([_POSITIONS] * len(_ROWS))
        with first_blocks(model):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    finally:
        model.train(was_training)
    change = (logits[0] - logits[1]).abs().amax(-1)  # (4,)
    return bool(change[2:].max() <= _TOLERATED_SHARE * change[:2].max())


@contextmanager
def first_blocks(model: PreTrainedModel) -> Iterator[None]:
    """Let `model` have only as many of its first blocks inside as show each kind of them, and no
    fewer than two. Blocks are of one kind with equal modules, and equal words in their attributes
    and in the configuration's `layer_types`."""
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.ModuleList and len(child) > 2
    ]
    if not lists:
        yield
        return
    parent, name, blocks = max(lists, key=lambda it: sum(p.numel() for p in it[2].parameters()))
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    named = types if len(types) == len(blocks) else ["" for _ in blocks]
    kinds = [(kind, _kind(block)) for kind, block in zip(named, blocks, strict=True)]
    count = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    setattr(parent, name, blocks[:count])
    try:
        yield
    finally:
        setattr(parent, name, blocks)


def _kind(block: nn.Module) -> tuple[object, ...]:
    words = sorted((k, v) for k, v in vars(block).items() if isinstance(v, str | bool))
    return tuple(words), tuple((name, type(module)) for name, module in block.named_modules())
