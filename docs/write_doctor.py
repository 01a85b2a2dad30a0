"""Writes docs/doctor.md from recorded reports: `python docs/write_doctor.py`.

With `--record NAME` it first runs the doctor on this machine and keeps its report as
docs/doctor/NAME.json, without what names the machine or its folders. The page draws each report
with the code as it is now, so it shows what the command would print.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from msgspec.structs import replace

from fluxtrain.commands.doctor.examine import findings
from fluxtrain.commands.doctor.screen import screen
from fluxtrain.events.answers.machine import DoctorAnswer

PAGE = Path(__file__).with_name("doctor.md")
RECORDED = Path(__file__).with_name("doctor")
HEAD = """\
# fluxtrain doctor

<!-- Written by docs/write_doctor.py from the reports in docs/doctor; a test checks that it is
current. -->

```
fluxtrain doctor           # what was measured, what to change, whether the engine computes right
fluxtrain doctor --fresh   # measure again; rates are kept for a week, or until torch,
                           # OMP_NUM_THREADS or FLUXTRAIN_ISA change, sizes never; what could
                           # not be measured is tried again after five minutes, or once there
                           # is more of the memory that was lacking
fluxtrain doctor --json    # the same for programs, and for a bug report
```

It ends with exit code 0 when all self-tests pass and with 1 when one fails; findings do not count.

- **Measured**: what this process may really use (affinity, control groups, page locks), not what
  the machine has. What could not be measured is `-`; `fluxtrain probe` says why.
- **Several cards**: which card of nvidia-smi each of torch's is, the bus and the arithmetic of each
  alone, all buses at once, and copies between every two: their bytes are compared first, and a pair
  that delivers others gets no rate. Cards that other programs fill, or that MIG splits, are named.
- **Findings**: what works slower, or fits less, than on a machine of this class, with its numbers
  and the cure; first what does not work at all, then by how much there is to gain.
- **Self-tests**: a tiny model of Llama's shape, always bit for bit. The native optimizer against
  torch; training streamed through the device against training with everything resident; a
  checkpoint through files on the disk of the runs.
- **Versions**: paste them into a bug report.
"""


def page() -> str:
    """The whole page: one section for each recorded machine, the smallest first."""
    reports = [
        msgspec.json.decode(path.read_bytes(), type=DoctorAnswer)
        for path in RECORDED.glob("*.json")
    ]
    reports.sort(key=lambda report: (len(report.probe.machine.gpus), report.probe.machine.cores))
    parts = [HEAD]
    for report in reports:
        current = replace(report, findings=findings(report.probe))
        parts.append(f"## {report.probe.machine.line()}\n\n```\n{screen(current)}\n```\n")
    return "\n".join(parts)


def record(name: str) -> None:
    """Run the doctor here and keep its report."""
    from fluxtrain.commands.doctor.examine import examine

    told = examine(Path.cwd(), fresh=True, say=lambda line: print(line, file=sys.stderr))
    gpus = tuple(replace(gpu, uuid=None, other_processes=()) for gpu in told.probe.machine.gpus)
    nameless = replace(
        told.probe,
        machine=replace(told.probe.machine, gpus=gpus),
        disk=replace(told.probe.disk, path="runs"),
    )
    RECORDED.mkdir(exist_ok=True)
    kept = replace(told, probe=nameless, findings=findings(nameless))
    written = msgspec.json.format(msgspec.json.encode(kept), indent=2)
    (RECORDED / f"{name}.json").write_bytes(written + b"\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", metavar="NAME")
    wish = parser.parse_args().record
    if wish is not None:
        record(wish)
    PAGE.write_text(page(), encoding="utf-8")
