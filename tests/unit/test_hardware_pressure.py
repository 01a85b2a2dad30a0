"""The kernel's count of waiting for memory, of the container before that of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.machine.system import memory_waited_s

TEXT = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0 avg300=0 total=7\n"


@pytest.mark.parametrize(
    ("files", "waited_s"),
    [
        ({"proc/pressure/memory": 2_500_000}, 2.5),
        ({"proc/pressure/memory": 2_500_000, "sys/fs/cgroup/memory.pressure": 1_000_000}, 1.0),
        ({}, None),
    ],
)
def test_seconds_that_tasks_waited_for_memory(
    tmp_path: Path, files: dict[str, int], waited_s: float | None
) -> None:
    for name, total in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT.format(total))
    assert memory_waited_s(tmp_path) == waited_s
