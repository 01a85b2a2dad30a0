"""The doctor's page shows what the command prints now, and names no machine."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from fluxtrain.events.answers.machine import DoctorAnswer

DOCS = Path(__file__).resolve().parents[2] / "docs"
RECORDED = sorted((DOCS / "doctor").glob("*.json"))


def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_doctor", DOCS / "write_doctor.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current() -> None:
    written = (DOCS / "doctor.md").read_text(encoding="utf-8")
    assert written == writer().page(), "run: python docs/write_doctor.py"


def test_the_page_shows_a_machine_of_two_cores_without_a_gpu() -> None:
    assert re.search(r"^## 2 cores .* no GPU$", (DOCS / "doctor.md").read_text(), re.M)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_report_is_whole_passed_and_names_no_machine(path: Path) -> None:
    report = msgspec.json.decode(path.read_bytes(), type=DoctorAnswer)
    assert not report.failed and not report.probe.from_cache
    assert report.probe.disk.path == "runs"
    assert all(gpu.uuid is None for gpu in report.probe.machine.gpus)
    text = path.read_text()
    assert not re.search(r'"/(?!proc/|sys/)', text), "a path of the machine"
    assert os.uname().nodename not in re.findall(r"[\w.-]+", text)
