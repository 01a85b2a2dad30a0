"""`DistributedDataParallel` around a wrapped model: it finds nothing to do.

Its reducer would hold a copy of all gradients, broadcast all weights, and wait for hooks that never
fire, since the blocks of a wrapped model are single nodes of torch's graph. So its constructor,
which programs such as Hugging Face's Trainer call, is given one small weight of a wrapped model.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's own name


@functools.cache
def install() -> None:
    """Take over the constructor of DistributedDataParallel for wrapped models, once a process."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: DistributedDataParallel, module: nn.Module, *args: Any, **options: Any) -> None:
        wrapped = [one for one in module.modules() if "_fluxtrain_engine" in one.__dict__]
        if not wrapped:
            original(self, module, *args, **options)
            return
        names = ("device_ids", "output_device", "dim", "broadcast_buffers")
        options.update(zip(names, args, strict=False))
        _begin_idle(original, self, module, wrapped, options)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _begin_idle(
    original: Any,
    parallel: DistributedDataParallel,
    module: nn.Module,
    wrapped: list[nn.Module],
    options: dict[str, Any],
) -> None:
    ours = {id(p) for one in wrapped for p in one.parameters()}
    names = {name: p for name, p in module.named_parameters() if id(p) in ours}
    others = any(p.requires_grad for p in module.parameters() if id(p) not in ours)
    kept = ""
    if not others:  # DDP refuses a module without any
        trained = [(p.numel(), name) for name, p in names.items() if p.requires_grad]
        kept = min(trained, default=(0, ""))[1]
        options |= {"device_ids": None, "output_device": None, "find_unused_parameters": False}
        options.pop("static_graph", None)
        if options.get("process_group") is None and torch.cuda.is_available():
            options["process_group"] = distributed.new_group(backend="gloo")  # of host memory
    constant = {
        f"{prefix}.{name}" if prefix else name
        for prefix, inner in module.named_modules()
        for name in inner._non_persistent_buffers_set
    }
    setattr(module, _IGNORED, {*getattr(module, _IGNORED, ()), *constant, *names} - {kept})
    original(parallel, module, **options)
    reference = weakref.ref(parallel)

    def waits() -> bool:
        there = reference()
        return there is not None and not there.require_backward_grad_sync

    for one in wrapped:
        one.__dict__["_fluxtrain_engine"].exchange.follow(waits)
