"""Two processes of a gloo group that run functions for tests, started once a session."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LONGEST_S = 50.0  # that a function may take


class Ranks:
    """Processes that call a function together, each with its rank's process group."""

    def __init__(self, count: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["tests.parallel.rank_work", "tests.parallel.sharded_work"]
        )  # torch, imported once
        self.count = count
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, count, str(folder / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(*arguments)` on every rank; return the answers in order of the ranks.

        Raises AssertionError with the traceback of a rank that raised.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        waits = all(pipe.poll(LONGEST_S) for pipe in self._pipes)
        assert waits, f"a rank waits for another in {function.__name__}: its stack is on stderr"
        answers = [pipe.recv() for pipe in self._pipes]
        failed = [text for good, text in answers if not good]
        assert not failed, failed[0]
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            process.kill()


def _serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count
    )
    while (work := pipe.recv()) is not None:
        function, arguments = work
        faulthandler.dump_traceback_later(0.8 * LONGEST_S)
        try:
            torch.manual_seed(0)
            pipe.send((True, function(*arguments)))
        except BaseException:  # noqa: BLE001 - told to the test
            pipe.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
    distributed.destroy_process_group()
