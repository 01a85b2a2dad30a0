"""Device slots: never overwritten in use, filled ahead, and correct when the guess was wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.device.device import Transfer
from fluxtrain.core.device.recorder import Stalls
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.window import Window
from fluxtrain.core.ranks.join import Ranks
from fluxtrain.core.ranks.shares import Shares
from fluxtrain.plan.group_placement import GroupPlacement
from fluxtrain.plan.states import STATE_BLOCK
from tests.engine.slow_device import SlowDevice

CPU = torch.device("cpu")
SIZE = 64


class Copy:
    """A copy that a test finishes by hand, or that its first waiter does."""

    duration_s: float | None = None

    def __init__(self, to: Tensor, source: Tensor, after: Future[None] | None) -> None:
        self._to, self._source, self._after = to, source, after
        self.arrived = False

    def failed(self) -> bool:
        return False

    def done(self) -> bool:
        return self.arrived

    def instants(self) -> tuple[float, float] | None:
        return (0.0, 0.0) if self.arrived else None

    def wait_host(self) -> None:
        if not self.arrived:
            if self._after is not None:
                self._after.result(5)
            self._to.copy_(self._source)
            self.arrived = True

    def wait_compute(self, cause: str) -> None:
        self.wait_host()


class LazyDevice:
    """Copies arrive as late as possible: only when somebody waits for them."""

    torch_device = CPU
    pins = False
    lanes = 1

    def __init__(self) -> None:
        self.stalls = Stalls()
        self.copies: list[Copy] = []

    def upload(self, to: Tensor, source: Tensor, after: Any, free: Any, *_: Any) -> Copy:
        for earlier in self.copies:  # one stream: copies run in order
            earlier.wait_host()
        self.copies = [Copy(to, source, after)]
        return self.copies[0]

    def for_copies(self, memory: Tensor) -> Tensor:
        return memory

    def mark(self) -> None:
        return None

    def close(self) -> None: ...


def group(value: int, elements: int = SIZE) -> Group:
    made = Group(f"block {value}", "block")
    made.add(nn.Parameter(torch.full((elements,), float(value))), "weight")
    made.place(GroupPlacement.on("host"), CPU, pin=False)
    return made


def window(slots: int, device: Any = None) -> tuple[Window, list[tuple[str, str]]]:
    moves: list[tuple[str, str]] = []
    home: Any = device or LazyDevice()
    made = Window(home, lambda g, cause, transfer, size: moves.append((g.name, cause)))
    for _ in range(slots):
        made.add_slot(4 * SIZE)
    return made, moves


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "release", "prefetch", "write"]), st.integers(0, 4)),
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(ACTIONS, st.integers(1, 4))
def test_what_is_taken_holds_its_current_weights_until_it_is_released(
    actions: list[tuple[str, int]], slots: int
) -> None:
    groups = [group(i) for i in range(5)]
    made, _ = window(slots)
    held: dict[int, tuple[Tensor, float]] = {}
    for action, i in actions:
        g = groups[i]
        if action == "take" and i not in held and len(held) < slots:
            views = made.take(g)
            held[i] = views[0], float(g.memory.views[0][0])
        elif action == "release" and i in held:
            made.release(g)
            del held[i]
        elif action == "prefetch":
            made.prefetch(g)
        elif action == "write" and i not in held:
            made.drain()  # the engine's updates run between copies
            g.memory.views[0].add_(10.0)
            g.weights_changed(frozen=True)
        for view, value in held.values():
            assert bool((view == value).all())


def test_a_pass_with_prefetch_copies_every_block_once_and_stalls_on_none() -> None:
    groups = [group(i) for i in range(6)]
    made, moves = window(3)
    for i, g in enumerate(groups):
        for ahead in groups[i + 1 : i + 3]:
            made.prefetch(ahead)
        assert made.take(g)[0][0] == i
        made.release(g)
    assert [name for name, _ in moves] == [g.name for g in groups] or len(moves) == 6
    assert sum(cause == "demand" for _, cause in moves) == 1  # only the first


def test_a_wrong_guess_costs_a_copy_and_nothing_else() -> None:
    a, b, c = (group(i) for i in range(3))
    made, moves = window(2)
    assert made.prefetch(a) and made.prefetch(b)
    assert not made.prefetch(c)  # both slots wait for their use
    assert made.take(c)[0][0] == 2  # and are overwritten when something else is asked for
    made.release(c)
    assert moves[-1] == (c.name, "demand")
    assert made.take(a)[0][0] == 0 and made.take(b)[0][0] == 1


def test_a_resident_group_is_copied_again_only_after_its_weights_change() -> None:
    own, other = group(1), group(2)
    made, moves = window(1)
    made.add_slot(4 * SIZE, owner=own)
    for _ in range(3):
        for g in (own, other):
            made.take(g)
            made.release(g)
    assert moves == [(own.name, "demand"), (other.name, "demand")]
    own.memory.views[0].fill_(5.0)
    own.weights_changed(frozen=True)
    assert made.take(own)[0][0] == 5.0


def test_an_upload_waits_for_the_groups_own_update() -> None:
    device = CpuDevice()
    made, _ = window(2, device)
    g, other = group(1), group(2)
    g.jobs.pending = Future()
    g.weights_changed(frozen=True)
    assert made.prefetch(g)
    slot = made.holds(g)
    assert slot is not None and slot.transfer is not None and not slot.transfer.done()
    g.memory.views[0].fill_(9.0)
    g.jobs.pending.set_result(None)
    assert made.take(g)[0][0] == 9.0
    assert made.take(other)[0][0] == 2
    device.close()


def test_a_copy_that_waits_for_an_update_never_lands_on_weights_that_took_its_slot() -> None:
    """They wait for nothing (a frozen block, a step of another part), so theirs is ready sooner."""
    device = SlowDevice()
    made, _ = window(1, device)
    g, other = group(1), group(2)
    g.jobs.pending = Future()
    g.weights_changed(frozen=True)
    assert made.prefetch(g)
    timer = threading.Timer(0.05, g.jobs.pending.set_result, [None])
    timer.start()
    weights = made.take(other)[0]
    timer.join()
    for copy in device.asked:
        copy.wait_host()
    assert bool((weights == 2).all())
    device.close()


class LateBehind(SlowDevice):
    """Copies that follow others come last."""

    def _copy(self, to: Tensor, source: Tensor, follows: Sequence[Transfer]) -> tuple[float, float]:
        if follows:
            time.sleep(0.1)
        return super()._copy(to, source, follows)


def test_parts_that_other_ranks_were_to_complete_never_land_on_weights_that_took_their_slot() -> (
    None
):
    """Parts after the first are copied behind it, and other uploads do not queue behind them."""
    device = LateBehind()
    made, _ = window(0, device)
    made.add_slot(4 * 3 * STATE_BLOCK)
    g, other = group(1, 3 * STATE_BLOCK - 1), group(2, 3 * STATE_BLOCK - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "device_group", lambda *_: None)  # nothing is sent here
        g.share_out(Shares(Ranks(world=2), [CPU], lambda: None))
    assert made.prefetch(g) and len(device.asked) == 2
    weights = made.take(other)[0]
    for copy in device.asked:
        copy.wait_host()
    assert bool((weights == 2).all())
    device.close()


def test_a_slot_whose_copy_failed_serves_another_group() -> None:
    device = SlowDevice()
    made, _ = window(1, device)
    g, other = group(1), group(2)
    g.jobs.pending = Future()
    assert made.prefetch(g)
    timer = threading.Timer(0.05, g.jobs.pending.set_exception, [ArithmeticError("diverged")])
    timer.start()
    assert made.take(other)[0][0] == 2
    timer.join()
    device.close()


def test_a_failed_update_reaches_whoever_takes_the_group() -> None:
    device = CpuDevice()
    made, _ = window(1, device)
    g = group(1)
    g.jobs.pending = Future()
    g.jobs.pending.set_exception(ArithmeticError("diverged"))
    with pytest.raises(ArithmeticError, match="diverged"):
        made.take(g)
    device.close()
