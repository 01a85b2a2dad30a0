"""What a step is bound by. Pure arithmetic."""

from __future__ import annotations


def binding_of(phases: list[dict[str, float]], *, together: bool) -> str:
    """The resource with the most seconds in the phases that it (`together`: alone) decides."""
    seconds: dict[str, float] = {}
    for phase in phases:
        deciding = max(phase, key=lambda name: phase[name])
        for name in (deciding,) if together else phase:
            seconds[name] = seconds.get(name, 0.0) + phase[name]
    return max(seconds, key=lambda name: seconds[name])


def binding_words(resource: str, *, has_gpu: bool) -> str:
    """What a plan calls the resource."""
    if not has_gpu:
        update = dict.fromkeys(("update", "moments"), "AdamW on the host")
        return {"compute": "the processor", **update}.get(resource, "copies in host memory")
    return {
        "compute": "the GPU",
        "update": "AdamW on the host",
        "moments": "AdamW on the host",
        "uploads": "copies of weights to the GPU",
        "slots": "copies of weights to the GPU",
        "downloads": "copies of gradients to the host",
        "queueing": "the processor that drives the GPU",
    }[resource]
