"""The names that a configuration has for what a plan chooses."""

from __future__ import annotations

SETTINGS = {
    "device": "placement.device",
    "offload": "placement.offload",
    "device_groups": "placement.device_groups",
    "device_first": "placement.device_first",
    "resident_blocks": "placement.resident_blocks",
    "blocks_without_recompute": "placement.blocks_without_recompute",
    "activations": "placement.activations",
    "chunk_rows": "placement.chunk_rows",
    "prefetch": "placement.prefetch",
    "embedding": "placement.embedding",
    "head": "placement.head",
    "aggressiveness": "placement.aggressiveness",
    "batch_rows": "train.batch_rows",
    "moments": "train.moments",
    "kernels": "model.kernels",
    "page_locks": "page-locked memory",  # no setting
}


def setting_name(choice: str) -> str:
    """Return the setting for `choice`: a part of a layout, or a name from the journal of an older
    version, whose settings had no groups. Other names stay."""
    return SETTINGS.get(choice, choice)
