"""Start the processes of a run on this machine with torch.distributed.run, and pass signals on.

Imports no torch: the process that starts the others only waits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from fluxtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED
from fluxtrain.files.parent import environment_of_child

# Ranks say by themselves why they end: of torch's report a line is enough.
_AGENT = """
import sys
from fluxtrain.files.parent import end_with_parent
end_with_parent()
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main()
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    print(f"torchrun: rank {rank} has ended with exit code {failure.exitcode}", file=sys.stderr)
    sys.exit(failure.exitcode if 1 < failure.exitcode < 9 else 1)  # what ranks say by themselves
"""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def launch(words: Sequence[str], processes: int, first_process: Callable[[], int | None]) -> int:
    """Run `python -m fluxtrain WORDS` in so many processes; return the exit code of the rank that
    failed first (1 where it was killed), or 130 or 143 where a signal to this process has ended
    them at once.

    Signals go to rank 0, whose process id `first_process` returns (None while it is unknown), since
    it decides for all. Before that, and with a second Ctrl-C, all are killed: a rank that waits for
    another one hears no signal.
    """
    command = [
        *(sys.executable, "-c", _AGENT, "--nnodes=1", f"--nproc-per-node={processes}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.5"),
        *("-m", "fluxtrain", *words),
    ]
    # a session of its own: Ctrl-C of a terminal would end the agent, and the ranks in mid-step
    environment = {"OMP_NUM_THREADS": "1", **environment_of_child()}  # as torchrun with a warning
    agent = subprocess.Popen(command, env=environment, start_new_session=True)
    received: list[int] = []
    ended: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        first = first_process()
        if first is not None and received.count(signal.SIGINT) < 2:
            os.kill(first, number)
        elif number not in (signal.SIGUSR1, signal.SIGUSR2):
            ended.append(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED)
            agent.kill()  # and the kernel its ranks: `end_with_parent`

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        status = agent.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if agent.poll() is None:
            agent.kill()
    return ended[0] if ended else status
