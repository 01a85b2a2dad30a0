"""Drives the wizard in tests: its screen with a stand-in engine, its keys, and what it shows."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from textual.app import App
from textual.events import Paste
from textual.pilot import Pilot

from fluxtrain.events.answers.machine import ProbeAnswer
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtui.answers.answers import Answers
from fluxtui.answers.launching import Launch
from fluxtui.wizard.screen import WizardScreen

# Stands in for the engine's answers; what it was asked is kept beside it. The real engine is
# asked in test_end_to_end.py.
ENGINE = """
import json, pathlib, sys, time
here = pathlib.Path(__file__).parent
with open(here / "asked", "a") as asked:
    asked.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "plan":
    while (here / "hold").exists():
        time.sleep(0.02)
print("step 1/3", file=sys.stderr, flush=True)
while sys.argv[1] == "dry-run" and (here / "hold-trial").exists():
    time.sleep(0.02)
answer = here / (sys.argv[1] + ".json")
if not answer.exists():
    sys.exit("error: the model needs 80 GiB and 24 GiB is free")
print(answer.read_text())
"""
LAYOUT = {
    "offload": "none", "device_groups": 0, "device_first": "embedding", "resident_blocks": 0,
    "blocks_without_recompute": 0, "activations": "device", "activations_on_device": 0,
    "batch_rows": 8, "chunk_rows": 4, "embedding": "whole", "head": "whole",
    "deferred_moments": False,
}  # fmt: skip
PLAN = {
    "layout": LAYOUT, "steps": 200, "device": "cpu", "device_bytes": 2**20,
    "device_budget_bytes": 2**30, "host_bytes": 2**21, "host_limit_bytes": 2**31,
    "need": {}, "process_bytes": 2**20, "accumulation": 1, "sequence_length": 128,
    "estimated_rows": 4000, "machine": "2 cores", "predicted_because": "a probe", "notes": [],
    "fitting_share": 0.9,
    "model": {"name": "demo", "parameters": 5_800_000, "blocks": 6, "dtype": "float32"},
    "method": {"name": "full", "trained_parameters": 5_800_000, "trained_bytes": 2**24,
               "frozen_bytes": 0, "packed_bytes": 0, "storage": "plain", "saved_bytes": 2**24},
    "settings": [{"key": "model.path", "value": "demo", "default": "", "changed": False,
                  "description": ""}],
    "choices": [
        {"name": "train.batch_rows", "value": "8", "because": "1,024 tokens make a step"},
        {"name": "placement.chunk_rows", "value": "4",
         "because": "two chunks keep the device busy"},
    ],
    "disk_bytes": 2**22, "checkpoint_bytes": 2**20,
    "config": {"train": {"checkpoint_every": "auto"}},
    "predicted": {"step_s": 0.5, "tokens_per_s": 2000.0, "eta_s": 100.0,
                  "binds": "the processor", "parts_s": {}},
    "plans": [
        {"name": name, "share": 0.5,
         "layout": {**LAYOUT, "offload": offload, "chunk_rows": chunk},
         "device_bytes": size, "host_bytes": 2**21,
         "predicted": {"step_s": 0.5 / chunk, "tokens_per_s": 500.0 * chunk,
                       "eta_s": 400.0 / chunk, "binds": "the processor", "parts_s": {}},
         "settings": {"train.batch_rows": 8, "placement.chunk_rows": chunk}}
        for name, offload, chunk, size in (("fast", "weights", 4, 2**20),
                                           ("balanced", "weights", 2, 2**19),
                                           ("fit", "max", 1, 2**18))
    ],
}  # fmt: skip
INSPECTION = {
    "path": "/talks.jsonl", "format": "messages", "because": "its first line",
    "files": [{"name": "/talks.jsonl", "container": "json lines", "shape": "messages",
               "title": "conversations", "because": "its first line", "size_bytes": 4000,
               "weight": 1.0}],
    "held_out_files": [],
    "notes": ["keys that are left out: `id` (in 4 rows)"], "read_share": 1.0,
    "sequence_length": 128, "sequence_length_because": "as set",
    "fitting_share": 0.75, "cut_samples": 0, "left_out_samples": 0,
    "max_positions": 512, "sampled_documents": 4, "sampled_share": 0.25,
    "sampled_tokens": 400, "estimated_documents": 16, "estimated_tokens": 1600,
    "estimated_rows": 13, "trained_share": 0.5, "cut_documents_share": 0.25,
    "cut_tokens_share": 0.5, "padding_share": 0.1, "lengths": [10, 40, 150, 200],
    "samples": [
        {"tokens": 10, "shown_tokens": 10, "trained_tokens": 4, "rows": 1,
         "pieces": [{"text": "<|user|>Why?", "trained": False},
                    {"text": "So it is.<|end|>", "trained": True}]},
    ],
}  # fmt: skip
TRIAL = {
    "steps": 3, "total_steps": 200, "eta_s": {"predicted": 100.0, "low": 90.0, "high": 120.0},
    "loading_s": 1.0, "steps_s": [0.9, 0.5, 0.6], "losses": [3.0, 2.0, 1.0], "seconds": 5.0,
    "step_s": {"predicted": 0.5, "measured": 0.55},
    "device_bytes": {"predicted": 2**20, "measured": 2**20, "limit": 2**30},
    "host_bytes": {"predicted": 2**21, "measured": 2**22, "limit": 2**31},
}  # fmt: skip
MACHINE = {
    "cores": 2, "cpu_quota": None, "cpu_name": None, "instruction_set": "avx2",
    "memory_total_bytes": 2**33, "memory_available_bytes": 2**32, "memory_limit_bytes": None,
    "gpus": [], "driver": None, "unknown": {"gpus": "no driver"},
}  # fmt: skip
GPU = {
    "index": 0, "name": "NVIDIA GeForce RTX 4090", "uuid": None, "memory_total_bytes": 24 << 30,
    "memory_free_bytes": 20 << 30, "other_processes": [], "compute_capability": "8.9",
    "pcie_generation": 4, "pcie_width": 16,
}  # fmt: skip
DISK = {
    "path": "/runs", "total_bytes": 2**41, "free_bytes": 2**40, "file_system": "ext4",
    "in_memory": False, "on_network": False,
}  # fmt: skip
PROBE = {
    "machine": MACHINE, "disk": DISK, "measured_at_s": 0.0, "measuring_s": 9.0,
    "rates": {"host_copy": {"per_s": 1e10, "how": "256 MiB"},
              "h2d_pinned": {"per_s": None, "how": "not measured: no driver"}},
}  # fmt: skip


def planned(**changes: Any) -> PlanAnswer:
    """The engine's answer to `plan`, with other fields in the place of some."""
    return msgspec.convert({**PLAN, **changes}, PlanAnswer)


def probed(**changes: Any) -> ProbeAnswer:
    """The engine's answer to `probe`, with other fields in the place of some."""
    return msgspec.convert({**PROBE, **changes}, ProbeAnswer)


class Host(App[None]):
    """Shows the wizard and keeps what it ends with."""

    def __init__(self, wizard: WizardScreen) -> None:
        super().__init__()
        self.wizard = wizard
        self.ended_with: list[Launch | None] = []

    def on_mount(self) -> None:
        self.push_screen(self.wizard, self.ended_with.append)


class Wizard:
    """A wizard under test with its pilot."""

    def __init__(self, app: Host, pilot: Pilot[None], folder: Path) -> None:
        self.app, self.pilot, self.folder = app, pilot, folder

    @property
    def screen(self) -> WizardScreen:
        return self.app.wizard

    @property
    def step(self) -> str:
        return self.screen.answers.step

    @property
    def plan(self) -> Any:
        return self.screen.background.plan.state.value

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def write(self, text: str) -> None:
        """Type the first letter, which may open an entry, and paste the others."""
        await self.pilot.press(text[0])
        await self.pilot.pause()
        focused = self.app.focused
        assert focused is not None
        focused.post_message(Paste(text[1:]))
        await self.pilot.pause()

    async def until(self, true: Callable[[], Any]) -> None:
        for _ in range(3000):
            if true():
                await self.pilot.pause()
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"did not come about; the screen says\n{self.text()}")

    async def go_to(self, step: str) -> None:
        while self.step != step:
            before = self.step
            if before == "strategy":
                await self.until(lambda: self.plan)
            await self.press("enter")
            await self.until(lambda before=before: self.step != before)

    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in strips)

    def asked(self) -> list[list[str]]:
        lines = (self.folder / "asked").read_text().splitlines()
        return [json.loads(line) for line in lines]


def furnish(tmp_path: Path) -> Path:
    """A folder with a stand-in engine that answers everything."""
    (tmp_path / "engine.py").write_text(ENGINE)
    answers = {"plan": PLAN, "probe": PROBE, "inspect": INSPECTION, "dry-run": TRIAL}
    for name, answer in answers.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(answer))
    return tmp_path


@asynccontextmanager
async def opened(
    folder: Path, answers: Answers | None = None, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[Wizard]:
    """The wizard on screen, with its runs, draft and engine in `folder`."""
    screen = WizardScreen(
        answers,
        folder / "runs",
        draft=folder / "draft.json",
        engine=(sys.executable, str(folder / "engine.py")),
    )
    app = Host(screen)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield Wizard(app, pilot, folder)
