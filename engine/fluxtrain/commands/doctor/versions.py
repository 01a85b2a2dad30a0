"""Collect the versions that a bug report needs. No torch."""

from __future__ import annotations

import platform
from importlib import metadata

import fluxtrain
from fluxtrain.events.answers.machine import Machine

_PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "textual")


def versions(machine: Machine, cuda: str | None) -> dict[str, str]:
    """Return versions by name; `cuda` is what torch was built for (None: a CPU build)."""
    found = {"fluxtrain": fluxtrain.__version__, "python": platform.python_version()}
    found |= {name: _package(name) for name in _PACKAGES}
    found["cuda"] = cuda or "none"
    found["driver"] = machine.driver or "none"
    found["os"] = f"{_system()}, Linux {platform.release()}" + (" (WSL2)" if machine.wsl else "")
    found["cpu"] = machine.cpu_name or "unknown"
    return found


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()
