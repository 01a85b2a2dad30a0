"""Chooses the device. A GPU that torch cannot use stops the run; it never falls back to the CPU."""

from __future__ import annotations

from typing import Literal

from fluxtrain.errors import BadInput
from fluxtrain.events.events import ChoiceMade
from fluxtrain.machine.gpu import Gpus, read_gpus
from fluxtrain.units import bytes_text

DeviceWish = Literal["auto", "cpu", "cuda"]


def check_accelerator(
    torch_cuda_available: bool,
    device: DeviceWish = "auto",
    *,
    torch_cuda_version: str | None = None,
    gpus: Gpus | None = None,
) -> ChoiceMade:
    """Choose "cuda" or "cpu", with the reason, from `torch.cuda.is_available()` and the request.

    `torch_cuda_version` is `torch.version.cuda` (None for a CPU build) and makes the cure exact.
    Raises `BadInput` if torch cannot use the GPU of this machine, unless the user asked for the
    CPU, and if the user asked for a GPU and there is none.
    """
    if device == "cpu":
        return ChoiceMade(name="placement.device", value="cpu", because="as set")
    found = read_gpus() if gpus is None else gpus
    visible = found.visible()
    named = ", ".join(
        f"{gpu.name or 'NVIDIA GPU'} ({bytes_text(gpu.memory_total_bytes)})" for gpu in visible
    )
    if torch_cuda_available:
        because = f"torch can use {named or 'a GPU'}"
        return ChoiceMade(name="placement.device", value="cuda", because=because)
    if visible:
        raise BadInput(
            f"torch cannot use {named}: {_cure(found.driver, torch_cuda_version)}, "
            "or train on the CPU with placement.device=cpu"
        )
    why = "CUDA_VISIBLE_DEVICES hides all GPUs" if found.gpus else f"no NVIDIA GPU: {found.reason}"
    if device == "cuda":
        raise BadInput(f"placement.device=cuda, but {why}: set placement.device=cpu or auto")
    return ChoiceMade(name="placement.device", value="cpu", because=why)


def _cure(driver: str | None, torch_cuda_version: str | None) -> str:
    if torch_cuda_version is None:
        return (
            "install the CUDA build of torch in place of this CPU build (pytorch.org/get-started)"
        )
    return (
        f"this torch is built for CUDA {torch_cuda_version}, the driver is {driver or 'unknown'}: "
        "update the driver, or install a build of torch for its CUDA version"
    )
