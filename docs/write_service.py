"""Runs the commands of docs/service.md against a server of its own, and writes what they print."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "service.md"
PICTURE = Path(__file__).parents[1] / "screenshots" / "service-job.svg"
ADDRESS = "http://127.0.0.1:8199/v1"
_BLOCK = re.compile(r"```(python|sh)\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
_IDS = re.compile(r"\b(file|ftjob|ftevent|chatcmpl)-[0-9a-f]{24}")


def pairs() -> bytes:
    """Return the training data of the page."""
    rows = [
        [
            {"role": "user", "content": f"What is {number} plus one?"},
            {"role": "assistant", "content": f"It is {number + 1}."},
        ]
        for number in range(40)
    ]
    return b"".join(json.dumps({"messages": row}).encode() + b"\n" for row in rows)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """Run `fluxtrain serve` in a folder; give its address, its key and its process."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "fluxtrain", "serve", "--port", "0"],
        cwd=folder,
        env={**os.environ, "FLUXTRAIN_RUNS": str(folder / "runs")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = [process.stdout.readline().split() for _ in range(2)]
        yield said[0][-1], said[1][1], process
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def run_page(text: str, url: str, key: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Run the page's blocks in their order; return it with their output, and Python's names."""
    (folder / "pairs.jsonl").write_bytes(pairs())
    names: dict[str, Any] = {"KEY": key}

    def run(block: re.Match[str]) -> str:
        kind, code, _ = block.groups()
        there = code.replace(ADDRESS, url).replace('"pairs.jsonl"', repr(f"{folder}/pairs.jsonl"))
        if kind == "python":
            told = io.StringIO()
            with contextlib.redirect_stdout(told):
                exec(there, names)
            output = told.getvalue()
        else:
            job = names["job"]
            more = {"KEY": key, "JOB": job.id, "MODEL": job.fine_tuned_model}
            ended = subprocess.run(
                ["bash", "-eu", "-c", there],
                env={**os.environ, **more},
                capture_output=True,
                text=True,
                check=True,
            )
            output = ended.stdout
        output = _IDS.sub(r"\1-...", output)
        return f"```{kind}\n{code}```\n\n```text\n{output}```"

    return _BLOCK.sub(run, text), names


async def draw(journal: Path) -> None:
    """Draw the app on a job, as `fluxtrain-tui --attach JOB` shows it at two thirds."""
    from fluxtui.app import FluxApp
    from fluxtui.sources.replay import ReplaySource

    source = ReplaySource(journal, speed=None, until_share=0.66)
    app = FluxApp(source, sample_machine=False, runs_folder=journal.parents[1])
    async with app.run_test(size=(120, 40)) as pilot:
        while not source.over or app.view.state.hello is None:
            await pilot.pause(0.05)
        await pilot.pause(0.6)
        PICTURE.write_text(app.export_screenshot(title="FluxTrain") + "\n")


def longer_job(names: dict[str, Any]) -> str:
    """Run a job of more steps on the page's file; return its id."""
    jobs = names["client"].fine_tuning.jobs
    train = {"steps": 60, "batch_rows": 8, "evaluate_every": 15}
    job = jobs.create(
        model="demo", training_file=names["file"].id, suffix="longer",
        extra_body={"fluxtrain": {"train": train}},
    )  # fmt: skip
    while job.status not in ("succeeded", "failed"):
        time.sleep(1)
        job = jobs.retrieve(job.id)
    return str(job.id)


def main() -> None:
    """Write the page anew, and its picture."""
    with tempfile.TemporaryDirectory() as made, server(Path(made)) as (url, key, _):
        text, names = run_page(PAGE.read_text(), url, key, Path(made))
        asyncio.run(draw(Path(made) / "runs" / longer_job(names) / "events.ndjson"))
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
