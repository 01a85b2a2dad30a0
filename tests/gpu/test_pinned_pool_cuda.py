"""Block inputs wait in page-locked buffers of their exact size on a real GPU, same bits."""

from __future__ import annotations

import pytest
import torch

from fluxtrain.core.device.cuda_device import CudaDevice
from fluxtrain.core.memory.activation_offload import ActivationOffload

pytestmark = pytest.mark.gpu
SIZE = (24 << 20) + 4096  # no power of two
LATE = 200_000_000  # clocks, some 0.1 s


def test_a_buffer_is_not_written_while_a_late_copy_that_nobody_waited_for_reads_it() -> None:
    """The computation that offloads the next input has waited for no copy of this buffer."""
    device = CudaDevice(torch.device("cuda"))
    offload = ActivationOffload(device)
    ones = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    gone = [offload.offload([ones.clone()], [True])[0] for _ in range(3)]
    torch.cuda.synchronize()
    offload.offload([], [])  # copies that were made are let go of
    with torch.cuda.stream(device._up):
        torch.cuda._sleep(LATE)
    with torch.cuda.stream(torch.cuda.Stream()):
        offload.fetch(gone[1])  # which starts to upload the one before it
    back, buffer = gone[0].on_device, gone[0].buffer
    assert back is not None and buffer is not None
    del gone[0]  # the others keep their buffers
    again = offload.offload([torch.full_like(ones, 2)], [True])[0]
    assert again.buffer is buffer
    torch.cuda.synchronize()
    assert int(back.min()) == int(back.max()) == 1
    assert int(again.host.min()) == 2
    device.close()
