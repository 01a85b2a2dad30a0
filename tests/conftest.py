"""What every test starts from: one OpenMP thread, no hurry for hypothesis, no GPU pretended; and
what it leaves: the process as it was, for the workers run the tests in no order of ours."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from fluxtrain.machine.before_torch import let_segments_grow
from tests.own_gpu import own_gpu_first
from tests.process_state import changes, process_state

# What is imported until all tests are collected stays: to look for garbage in it costs a quarter.
gc.disable()

# Before torch is imported. Test processes that each use every core only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As the trainer does before it imports torch: with segments of fixed sizes a test that lets a GPU's
# memory run out would find it in pieces.
let_segments_grow()

# What the tests were started to ignore (`nohup`, a script's job in the background) the programs
# that they start would ignore too; what has a handler, one that does nothing, is not inherited.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

# What is measured about this machine is kept for these tests alone: not what was measured before
# them decides what they do, and nothing of theirs stays. Workers inherit the place.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="fluxtrain-tests-")
    os.environ["XDG_CACHE_HOME"] = _CACHE.name
else:  # which run was the last is what each worker does
    _CACHE = tempfile.TemporaryDirectory(prefix="fluxtrain-tests-state-")
    os.environ |= own_gpu_first(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")))
os.environ["XDG_STATE_HOME"] = os.path.join(_CACHE.name, "state")

# A shared or slow machine is no failure; a failing example is printed so that it can be run again.
# The same examples each time, so that a change fails for what it does; `make soak` draws new ones.
EXPLORES = "FLUXTRAIN_EXPLORE" in os.environ
settings.register_profile(
    "fluxtrain", deadline=None, print_blob=True, derandomize=not EXPLORES, database=None,
    max_examples=100 if EXPLORES else 25,
)  # fmt: skip
settings.load_profile("fluxtrain")
MANY = 2000 if EXPLORES else 25  # examples of what somebody else may have made


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of thinned tests to the soak; skip, with the reason, the tests that need a
    GPU where torch can use none."""
    _thin(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = _mixed(items)
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if not needy:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="torch can use no NVIDIA GPU here"))


def _thin(items: list[pytest.Item]) -> None:
    """Mark as slow all but N cases of each test that is marked `thinned(N)`."""
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("thinned"):
            assert isinstance(item, pytest.Function)
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("thinned")
        assert marker is not None
        kept = _least_alike(cases, marker.args[0])
        for case in cases:
            if case not in kept:
                case.add_marker(pytest.mark.slow)


def _least_alike(cases: list[pytest.Function], number: int) -> list[pytest.Function]:
    """`number` of the cases, among which each value of each parameter is about as often."""
    left, chosen, used = list(cases), list[pytest.Function](), Counter[tuple[str, int]]()

    def chosen_before(case: pytest.Function) -> int:
        return sum(used[value] for value in case.callspec.indices.items())

    while left and len(chosen) < number:
        chosen.append(min(left, key=chosen_before))
        left.remove(chosen[-1])
        used.update(chosen[-1].callspec.indices.items())
    return chosen


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """The files of each folder evenly among those of the others: the engine's tests compute, the
    app's wait, and workers that do the one while others do the other use the processors better."""
    folders: dict[Path, dict[Path, list[pytest.Item]]] = {}
    for item in items:
        folders.setdefault(item.path.parent, {}).setdefault(item.path, []).append(item)
    placed = [
        ((at + 0.5) / len(files), file)
        for files in folders.values()
        for at, file in enumerate(files.values())
    ]
    return [item for _, file in sorted(placed, key=lambda pair: pair[0]) for item in file]


def pytest_collection_finish() -> None:
    """The collector passes over what lives as long as the tests: every model that is wrapped asks
    for it, and to look through all modules takes it a third of a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


# -- a test leaves the process as it was -----------------------------------------------------------

_STATE: pytest.StashKey[dict[str, Any]] = pytest.StashKey()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """What a test draws is the same whichever tests ran before it on its worker."""
    if _STATE not in item.config.stash:
        item.config.stash[_STATE] = process_state()
    random.seed(0)
    if hasattr(sys.modules.get("torch"), "default_generator"):
        sys.modules["torch"].default_generator.manual_seed(0)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that leaves the process other than it was, when its fixtures are gone."""
    try:
        done = yield
    finally:
        before, after = item.config.stash[_STATE], process_state()
        item.config.stash[_STATE] = after
    told = changes(before, after)
    if told:
        pytest.fail(f"the test leaves changed: {', '.join(told)}", pytrace=False)
    return done


CONTROL_GROUPS = Path("/sys/fs/cgroup")


def _control_group(controller: str, values: dict[str, str]) -> Path:
    """A group below the root with `values` in its files; OSError where that is not allowed."""
    is_v2 = (CONTROL_GROUPS / "cgroup.controllers").exists()
    group = (
        CONTROL_GROUPS if is_v2 else CONTROL_GROUPS / controller
    ) / f"fluxtrain-test-{os.getpid()}-{controller}"
    group.mkdir()
    try:
        for name, value in values.items():
            (group / name).write_text(value)
    except OSError:
        group.rmdir()
        raise
    return group


@pytest.fixture
def limited() -> Iterator[Callable[[dict[str, dict[str, str]]], list[Path]]]:
    """`limited({controller: {file: value}})`: real groups, removed afterwards; skips without."""
    made: list[Path] = []

    def make(controllers: dict[str, dict[str, str]]) -> list[Path]:
        for controller, values in controllers.items():
            try:
                made.append(_control_group(controller, values))
            except OSError as error:
                pytest.skip(f"control groups cannot be made here: {error}")
        return made

    yield make
    for group in made:
        group.rmdir()
