"""Reads NVIDIA GPUs through the driver's own library (NVML), without torch or any GPU memory, and
chooses the device: a GPU that torch cannot use stops the run; it never falls back to the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from fluxtrain.errors import BadInput
from fluxtrain.events.answers.machine import Gpu, GpuProcess
from fluxtrain.events.events import ChoiceMade
from fluxtrain.units import bytes_text


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The cards of this machine, or the reason for an empty list."""

    gpus: tuple[Gpu, ...]
    driver: str | None
    reason: str | None  # why `gpus` is empty

    def visible(self, environment: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
        """Return the cards that CUDA_VISIBLE_DEVICES leaves to programs.

        As CUDA reads it: indices, beginnings of UUIDs or slices of MIG; the first unknown name ends
        the list.
        """
        wanted = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
        if wanted is None:
            return self.gpus
        found: list[Gpu] = []
        for name in (part.strip() for part in wanted.split(",")):
            match = next((gpu for gpu in self.gpus if _is_named(gpu, name)), None)
            if match is None:
                break
            found.append(match)
        return tuple(found)


def read_gpus(
    nvml: Any = None,
    driver_folder: Path = Path("/proc/driver/nvidia/gpus"),
    devices: Path = Path("/sys/bus/pci/devices"),
) -> Gpus:
    """Ask NVML. Tests pass another module with its functions as `nvml`, and other folders."""
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return _none("the package nvidia-ml-py is missing", driver_folder)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _none(f"NVML says: {error}", driver_folder)
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        gpus = tuple(_read_gpu(nvml, index, devices) for index in range(nvml.nvmlDeviceGetCount()))
        return Gpus(gpus=gpus, driver=driver, reason=None if gpus else "the driver lists no GPU")
    except nvml.NVMLError as error:
        return _none(f"NVML says: {error}", driver_folder)
    finally:
        nvml.nvmlShutdown()


def own_process_bytes(nvml: Any = None, pid: int | None = None) -> int | None:
    """Return the memory that this process holds on all visible cards, CUDA's own share included.

    None if NVML is missing or hides it. In a container the driver may list pids of another
    namespace: then the only process on the cards is this one if its pid is unused here; among
    several this one cannot be identified.
    """
    mine = os.getpid() if pid is None else pid
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        held = _held_bytes(nvml)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    pids = {one for one, _ in held}
    if mine not in pids:
        if len(pids) != 1 or Path(f"/proc/{min(pids)}").exists():
            return None
        mine = min(pids)
    sizes = [size for (one, _), size in held.items() if one == mine]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _held_bytes(nvml: Any) -> dict[tuple[int, int], int | None]:
    """Return (process, card) -> bytes; NVML lists a process that computes and draws twice."""
    held: dict[tuple[int, int], int | None] = {}
    for gpu in read_gpus(nvml).visible():
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        for one in _running(nvml, handle):
            held[one.pid, gpu.index] = None if one.usedGpuMemory is None else int(one.usedGpuMemory)
    return held


def _none(reason: str, driver_folder: Path) -> Gpus:
    """Return no cards and the reason; the driver's folder tells without NVML whether some exist."""
    try:
        count = len(list(driver_folder.iterdir()))
    except OSError:
        count = 0
    facts = [name for name in Gpu.__struct_fields__ if name not in ("index", "unknown")]
    nameless = dict.fromkeys(facts, reason)
    gpus = tuple(
        Gpu(index=index, **dict.fromkeys(nameless), unknown=nameless) for index in range(count)
    )
    return Gpus(gpus=gpus, driver=None, reason=reason)


def _read_gpu(nvml: Any, index: int, devices: Path) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    unknown: dict[str, str] = {}

    def ask(names: str | Sequence[str], question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError as error:  # each fact is optional: cards and virtual machines differ
            unknown.update(dict.fromkeys([names] if isinstance(names, str) else names, str(error)))
            return None

    memory_fields = ("memory_total_bytes", "memory_free_bytes")
    memory = ask(memory_fields, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    capability = ask(
        ("compute_capability", "bf16"), lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle)
    )
    bus = ask("numa_node", lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    node = None if bus is None else _numa_node(bus, devices)
    if bus is not None and node is None:
        unknown["numa_node"] = "the kernel names no node for its slot"
    slices = _mig_slices(nvml, handle)
    return Gpu(
        index=index,
        name=ask("name", lambda: _text(nvml.nvmlDeviceGetName(handle))),
        uuid=ask("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        other_processes=ask("other_processes", lambda: _other_processes(nvml, handle)),
        compute_capability=None if capability is None else "{}.{}".format(*capability),
        pcie_generation=ask(
            "pcie_generation", lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        ),
        pcie_width=ask("pcie_width", lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
        bf16=None if capability is None else tuple(capability) >= (8, 0),
        pcie_card_generation=ask(
            "pcie_card_generation", lambda: int(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(handle))
        ),
        pcie_card_width=ask(
            "pcie_card_width", lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
        ),
        power_limit_w=ask(
            "power_limit_w", lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3
        ),
        power_default_w=ask(
            "power_default_w", lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1e3
        ),
        numa_node=node,
        mig=slices is not None,
        mig_slices=slices or (),
        unknown=unknown,
    )


def _other_processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    running = _running(nvml, handle)
    used = {one.pid: one.usedGpuMemory for one in running if one.pid != os.getpid()}
    return tuple(
        GpuProcess(pid=pid, used_bytes=None if size is None else int(size))
        for pid, size in sorted(used.items())
    )


def _running(nvml: Any, handle: Any) -> list[Any]:
    """Return the processes that compute on a card and that draw with it."""
    return [
        *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
        *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
    ]


def _numa_node(bus: str, devices: Path) -> int | None:
    """Return the NUMA node that the kernel names for a slot (NVML's domain has eight digits)."""
    domain, _, slot = bus.lower().partition(":")
    try:
        node = int((devices / f"{domain[-4:]}:{slot}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: a machine with one node


def _mig_slices(nvml: Any, handle: Any) -> tuple[str, ...] | None:
    """Return the UUIDs of a card's MIG slices; None where it is not split: most cards cannot be."""
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return None
        most = int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    except nvml.NVMLError:
        return None
    found: list[str] = []
    for number in range(most):
        try:
            one = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            found.append(_text(nvml.nvmlDeviceGetUUID(one)))
        except nvml.NVMLError:  # no slice of this number
            continue
    return tuple(found)


def _is_named(gpu: Gpu, name: str) -> bool:
    if name.isdigit():
        return gpu.index == int(name)
    if name.startswith("MIG-"):  # a slice: by its own UUID, or MIG-<UUID of the card>/<numbers>
        card, numbered, _ = name.removeprefix("MIG-").partition("/")
        slices = gpu.mig_slices or ()
        return card == gpu.uuid if numbered else any(one.startswith(name) for one in slices)
    return bool(name) and gpu.uuid is not None and gpu.uuid.startswith(name)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


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
