"""Group parameters that move together, and compute the sizes that a placement needs."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from fluxtrain.core.device.arena import aligned
from fluxtrain.core.embedding.lookup import is_plain_embedding
from fluxtrain.core.memory.group import Group
from fluxtrain.core.wrap.block_discovery import Parts, take_apart
from fluxtrain.errors import BadInput
from fluxtrain.plan.facts import GroupFacts, HeadFacts, ModelFacts
from fluxtrain.plan.states import PACKED_FORMATS, STATE_FORMATS, StateFormat, StorageFormat

_HEAD_COLUMNS = 8192  # an edge Linear this wide is taken for a language model's head
_LOOSE_COPIES = 4  # weight, gradient and the two moments of torch's own AdamW

Borrowed = dict[str, dict[Group, list[int]]]  # part -> group of another part -> member indices


def group_parameters(
    model: nn.Module,
    parts: Parts,
    states: StateFormat = "fp32",
    frozen: StorageFormat = "plain",
) -> tuple[dict[str, Group], Borrowed]:
    """Make one group for each part, in forward order. A parameter that several parts share belongs
    to the first of them: edges come before blocks. `frozen`: how frozen weights are stored."""
    _check_formats(states, frozen)
    groups: dict[str, Group] = {}
    borrowed: Borrowed = {}
    owner: dict[int, tuple[Group, int]] = {}
    kinds = [(n, m, "edge") for n, m in parts.edges] + [(n, m, "block") for n, m in parts.blocks]
    parts_of = Counter(id(p) for _, module, _ in kinds for p in module.parameters())
    for name, module, kind in kinds:
        group = groups[name] = Group(name, "edge" if kind == "edge" else "block", states, frozen)
        group.users = 1
        for own_name, parameter in module.named_parameters():
            if id(parameter) not in owner:
                if parameter.numel():
                    shared = parts_of[id(parameter)] > 1
                    member = group.add(parameter, own_name, shared=shared)
                    owner[id(parameter)] = (group, member.index)
                continue
            other, index = owner[id(parameter)]
            if other is not group:
                borrowed.setdefault(name, {}).setdefault(other, []).append(index)
    for others in borrowed.values():
        for group in others:
            group.users += 1
    for name, module in parts.edges:
        group = groups[name]
        group.by_rows = group.users == 1 and len(group.members) == 1 and is_plain_embedding(module)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(groups.items(), key=lambda item: order.get(item[0], 0))), borrowed


def _check_formats(states: str, frozen: str) -> None:
    for name, given, known in (
        ("states", states, STATE_FORMATS),
        ("frozen", frozen, ("plain", *PACKED_FORMATS)),
    ):
        if given not in known:
            raise BadInput(f"{name} is {given!r}: use one of {', '.join(known)}")


def head_linear(model: nn.Module, module: nn.Module) -> nn.Linear | None:
    """Return the last linear layer, whose loss is computed in chunks of tokens: the module itself,
    or the one around which peft put adapters. None for any other module."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if type(module) is nn.Linear:
        return module if module is output or module.out_features >= _HEAD_COLUMNS else None
    inner: object = module if module is output else None
    while inner is not None and type(inner) is not nn.Linear:
        inner = getattr(inner, "base_layer", None) or getattr(inner, "original_module", None)
    return inner


def facts_of(
    model: nn.Module, states: StateFormat = "fp32", frozen: StorageFormat = "plain"
) -> ModelFacts:
    """Compute the sizes of a model before it is wrapped; it may be on the meta device."""
    parts = take_apart(model)
    groups, borrowed = group_parameters(model, parts, states, frozen)
    return model_facts(model, parts, groups, borrowed)


def model_facts(
    model: nn.Module, parts: Parts, groups: dict[str, Group], borrowed: Borrowed
) -> ModelFacts:
    """Compute the sizes that a placement needs, with the padding of the arenas."""
    heads = [module for _, module in parts.edges if head_linear(model, module) is not None]
    trained = [[w for w in _weights(head) if w.requires_grad] for head in heads]
    modules = dict([*parts.edges, *parts.blocks])
    embeddings = {
        name for name, m in parts.edges if is_plain_embedding(m) and len(groups[name].members) == 1
    }
    for name, others in borrowed.items():
        embeddings.discard(name)
        if modules[name] not in heads:
            embeddings -= {group.name for group in others}
    return ModelFacts(
        groups=tuple(
            _group_facts(group, is_one=name in embeddings)
            for name, group in groups.items()
            if group.members
        ),
        head_parameters=max((sum(w.numel() for w in weights) for weights in trained), default=0),
        head=_head_facts(parts, groups, borrowed, heads),
        head_dtype_bytes=max((w.element_size() for weights in trained for w in weights), default=2),
        loose_bytes=sum(
            parameter.nbytes * (_LOOSE_COPIES if parameter.requires_grad else 1)
            for _, parameter in parts.loose
        ),
        groups_at_once=max(
            bool(group.members) + len(borrowed.get(name, {})) for name, group in groups.items()
        ),
    )


def _weights(head: nn.Module) -> list[torch.Tensor]:
    """Return the weights whose gradients the loss adds up."""
    return [head.weight] if isinstance(head, nn.Linear) else list(head.parameters())


def _head_facts(
    parts: Parts, groups: dict[str, Group], borrowed: Borrowed, heads: list[nn.Module]
) -> HeadFacts | None:
    """Describe the first head whose weight, but for a bias, is all of its own group or of an
    embedding's."""
    for name, module in parts.edges:
        if not any(module is head for head in heads) or not isinstance(module, nn.Linear):
            continue
        others = borrowed.get(name, {})
        if (others and groups[name].members) or len(others) > 1:
            continue
        group = next(iter(others), groups[name])
        return HeadFacts(
            group=group.name,
            vocabulary=module.out_features,
            row_bytes=module.in_features * module.weight.element_size(),
            dtype_bytes=module.weight.element_size(),
            trained=module.weight.requires_grad,
            tied=group.users > 1,
        )
    return None


def _group_facts(group: Group, *, is_one: bool) -> GroupFacts:
    """Return the sizes of one group; `is_one`: it is an embedding whose rows can be looked up."""
    elements: Counter[torch.dtype] = Counter()
    for segment in group.trained:
        elements[segment.dtype] += segment.elements
    return GroupFacts(
        name=group.name,
        kind="block" if group.kind == "block" else "edge",
        weight_bytes=sum(aligned(segment.size_bytes) for segment in group.segments),
        trained_bf16=elements[torch.bfloat16],
        trained_fp32=elements[torch.float32],
        trained_fp16=elements[torch.float16],
        users=group.users,
        states=group.states,
        narrow=group.low_bit_elements,
        table_rows=group.members[0].shape[0] if is_one else 0,
        frozen=sum(m.count for m in group.members if not m.trained),
        storage=next((s.storage for s in group.packed_segments), "plain"),
        packed_bytes=sum(segment.size_bytes for segment in group.packed_segments),
        dense_bytes=group.dense_bytes,
        file_bytes=sum(aligned(segment.size_bytes) for segment in group.file_segments),
    )
