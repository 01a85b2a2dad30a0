"""FluxTrain: train models larger than the GPU on one card, with no configuration.

The front door imports nothing heavy; torch comes with the first use of `wrap`.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as `typing` would say, which takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from fluxtrain.core.optimizer.hook import GradScaler
    from fluxtrain.core.optimizer.plain_state import plain_optimizer_state
    from fluxtrain.core.wrap.wrap import auto_wrap, sync, unwrap, wrap
    from fluxtrain.plan.request import PlacementRequest

__all__ = [
    "GradScaler",
    "PlacementRequest",
    "__version__",
    "auto_wrap",
    "plain_optimizer_state",
    "sync",
    "unwrap",
    "wrap",
]

_LAZY = dict.fromkeys(("auto_wrap", "sync", "unwrap", "wrap"), "fluxtrain.core.wrap.wrap")
_LAZY["PlacementRequest"] = "fluxtrain.plan.request"
_LAZY["GradScaler"] = "fluxtrain.core.optimizer.hook"
_LAZY["plain_optimizer_state"] = "fluxtrain.core.optimizer.plain_state"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # it brings the mail parser: 10 ms

        try:
            found = metadata.version("fluxtrain")
        except metadata.PackageNotFoundError:
            found = "unknown"  # run from its sources, not installed
        return globals().setdefault(name, found)
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
