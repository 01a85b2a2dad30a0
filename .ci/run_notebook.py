"""Runs examples/zero_to_hero.ipynb in build/notebook, as Jupyter would: `make notebook`."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[1]
LONGEST_CELL_S = 1800


def main() -> None:
    """Run every cell; print what each took, and what a cell that failed said."""
    folder = ROOT / "build" / "notebook"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ["PATH"] = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    os.environ["FLUXTRAIN_RUNS"] = "runs"
    read = nbformat.read(ROOT / "examples" / "zero_to_hero.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in read.cells), "commit it without outputs"
    client = NotebookClient(
        read, timeout=LONGEST_CELL_S, resources={"metadata": {"path": str(folder)}}
    )
    started_s = time.perf_counter()
    with client.setup_kernel():
        for number, cell in enumerate(read.cells):
            if cell.cell_type != "code":
                continue
            began_s = time.perf_counter()
            try:
                client.execute_cell(cell, number)
            except CellExecutionError as error:
                sys.exit(f"cell {number} failed:\n{error}")
            first = cell.source.splitlines()[-1]
            print(f"{time.perf_counter() - began_s:6.1f} s  {first:.70}", flush=True)
    nbformat.write(read, folder / "zero_to_hero.ipynb")
    print(f"{time.perf_counter() - started_s:6.1f} s in all; with its outputs: {folder}")


if __name__ == "__main__":
    main()
