"""Keeps the packed weights of a run on disk, so that its next start packs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fluxtrain.core.memory.packed import kept_name
from fluxtrain.core.quantization.packed_cache import PackedCache, Parameter, Say, cache_key
from fluxtrain.errors import BadInput
from fluxtrain.models.loading import LoadedModel
from fluxtrain.plan.states import PackedFormat

if TYPE_CHECKING:
    from fluxtrain.core.memory.group import Group


def packed_cache(
    loaded: LoadedModel, frozen: PackedFormat, say: Say, groups: Iterable[Group]
) -> PackedCache:
    """Open the cache of a loaded model whose `groups` are not settled yet.

    Raises BadInput where the model's files have gone since they were loaded.
    """
    sizes: dict[str, int] = {}
    parameters: list[Parameter] = []
    for group in groups:
        for segment in group.packed_segments:
            sizes[kept_name(segment, group.name)] = segment.size_bytes
            parameters += [
                (f"{group.name}.{m.name}", tuple(m.shape), segment.dtype) for m in segment.members
            ]
    try:
        key = cache_key(frozen, loaded.weight_files, parameters)
    except OSError as error:
        raise BadInput(f"the model's weights cannot be read any more: {error}") from error
    return PackedCache(key, sizes, say)
