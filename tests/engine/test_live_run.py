"""A real run that is changed through its control socket while it trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxtrain.core.wrap.engine import Engine
from fluxtrain.errors import Interrupted
from fluxtrain.events import events as ev
from fluxtrain.events.run_folder.control import CommandAnswer, send_command
from fluxtrain.plan import footprint
from fluxtrain.train.requests import Requests
from tests.engine import forked
from tests.engine.runs import MakeConfig, of, run, told

Say = Callable[[Path], CommandAnswer]
STEPS = 40


def say(command: str, **arguments: Any) -> Say:
    return lambda run_dir: send_command(run_dir / "ctl.sock", command, arguments)


class Script:
    """Says one thing after the other, each once the step has come; steps wait for it meanwhile."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, run_dir: Path, script: list[tuple[int, Say]]
    ) -> None:
        self.answers: list[CommandAnswer] = []
        self._run_dir, self._script = run_dir, dict(script)
        self._steps = 0
        real = Engine.clip_grad_norm

        def counted(engine: Engine, max_norm: float | None, losses: Any = ()) -> Any:
            self._steps += 1
            if self._steps in self._script:
                said = threading.Thread(target=self._say, args=(self._script[self._steps],))
                said.start()
                said.join()
            return real(engine, max_norm, losses)

        monkeypatch.setattr(Engine, "clip_grad_norm", counted)

    def _say(self, what: Say) -> None:
        self.answers.append(what(self._run_dir))


@pytest.fixture
def config(run_config: MakeConfig) -> Path:
    return run_config(
        train__steps=STEPS, train__evaluate_every="end", train__checkpoint_every="end"
    )


def losses(run_dir: Path) -> list[tuple[float, float | None]]:
    return [(step.loss, step.grad_norm) for step in told(run_dir, ev.StepFinished)]


def test_residency_changes_and_is_undone_through_the_socket_and_the_losses_keep_their_bits(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config, tmp_path / "plain")
    run_dir = tmp_path / "changed"
    script = Script(
        monkeypatch,
        run_dir,
        [
            (6, say("apply", resident_blocks=2)),
            (31, say("apply", resident_blocks=3)),
            (32, say("undo")),
        ],
    )
    run(config, run_dir)
    assert losses(run_dir) == losses(tmp_path / "plain")
    assert [answer.ok for answer in script.answers] == [True, False, True]
    assert "2 blocks are on the host, use 0 to 2" in script.answers[1].message
    made, undone = told(run_dir, ev.ChangeApplied)
    assert (made.step, made.before, made.after, made.why) == (6, 0, 2, "asked")
    assert (undone.step, undone.before, undone.after, undone.why) == (32, 2, 0, "undo")
    (measured,) = told(run_dir, ev.ChangeMeasured)
    assert measured.steps_before == 4  # of six the first two are warm-up
    assert measured.steps_after == 20
    assert measured.measured_gain == pytest.approx(1 - measured.after_s / measured.before_s)
    (checked,) = told(run_dir, ev.PlanChecked)
    found = {row.quantity: row for row in checked.rows}
    assert found["step_s"].predicted == undone.step_s != made.step_s
    steps_s = sorted(step.step_s for step in told(run_dir, ev.StepFinished) if step.step > 35)
    assert found["step_s"].measured == pytest.approx(steps_s[len(steps_s) // 2])
    (planned,) = told(run_dir, ev.Planned)
    assert made.device_bytes == undone.device_bytes >= planned.device_bytes
    assert (undone.step_s, undone.binds) == (planned.step_s, planned.binds)
    answered = told(run_dir, ev.CommandAnswered)
    assert answered[0].arguments == {"resident_blocks": 2}
    assert answered[1].arguments == {}
    between = [
        sampled.weights
        for sampled in told(run_dir, ev.ResidencySampled)
        if made.seq < sampled.seq < undone.seq
    ]
    assert all(set(weights) <= {"G", ">", "C"} for weights in between)


def test_a_chunk_applied_from_the_command_line_survives_a_resume_and_the_window_does_not(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(
        train__steps=STEPS, train__evaluate_every="end", train__checkpoint_every="end",
        placement__chunk_rows=4,
    )  # fmt: skip
    run_dir = tmp_path / "run"

    def by_command(_: Path) -> CommandAnswer:
        done = forked.python("-m", "fluxtrain", "apply", run_dir, "chunk_rows=2")
        return CommandAnswer(done.returncode == 0, done.stdout + done.stderr)

    script = Script(
        monkeypatch,
        run_dir,
        [(4, by_command), (6, say("apply", resident_blocks=1)), (9, say("stop"))],
    )
    with pytest.raises(Interrupted):
        run(config, run_dir)
    assert [answer.ok for answer in script.answers] == [True, True, True]
    assert "chunk_rows goes from 4 to 2" in script.answers[0].message
    run(config, run_dir, resume="auto")
    first, second = told(run_dir, ev.Planned)
    assert (first.chunk_rows, second.chunk_rows) == (4, 2)
    assert (first.resident_blocks, second.resident_blocks) == (0, 0)
    assert [step.step for step in told(run_dir, ev.StepFinished)] == list(range(1, STEPS + 1))


def test_a_paused_run_is_changed_while_it_waits(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    answers: list[CommandAnswer] = []

    def wait_for(kind: type[Any], **wanted: Any) -> None:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            if (run_dir / "events.ndjson").exists() and any(
                all(getattr(event, name) == value for name, value in wanted.items())
                for event in told(run_dir, kind)
            ):
                return
            time.sleep(0.01)
        raise AssertionError(f"{kind.__name__} {wanted} never came")

    def control() -> None:
        wait_for(ev.PhaseChanged, phase="loading")
        answers.append(say("apply", dance=2)(run_dir))  # loading or not: never
        answers.append(say("pause")(run_dir))
        wait_for(ev.PhaseChanged, phase="paused")
        answers.append(say("apply", resident_blocks=1)(run_dir))
        wait_for(ev.ChangeApplied)
        answers.append(say("resume")(run_dir))

    thread = threading.Thread(target=control)
    thread.start()
    run(config, run_dir)
    thread.join()
    assert [answer.ok for answer in answers] == [False, True, True, True]
    (applied,) = [e for e in told(run_dir, ev.ChangeApplied) if e.name == "resident_blocks"]
    steps = [step.seq for step in told(run_dir, ev.StepFinished) if step.step <= applied.step]
    assert not steps or max(steps) < applied.seq


def test_a_step_without_room_for_one_row_gives_up_resident_blocks_and_keeps_its_bits(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(
        train__steps=12, train__evaluate_every="end", train__checkpoint_every="end",
        placement__chunk_rows=1,
    )  # fmt: skip
    run(config, tmp_path / "plain")
    run_dir = tmp_path / "scarce"
    Script(monkeypatch, run_dir, [(3, say("apply", resident_blocks=2))])
    real, calls = Engine.clip_grad_norm, 0

    def scarce(engine: Engine, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (7, 8):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(engine, *args)

    monkeypatch.setattr(Engine, "clip_grad_norm", scarce)
    run(config, run_dir)
    assert losses(run_dir) == losses(tmp_path / "plain")
    made = [(e.before, e.after, e.why) for e in told(run_dir, ev.ChangeApplied)]
    assert made == [(0, 2, "asked"), (2, 1, "memory"), (1, 0, "memory")]
    warnings = [log.text for log in told(run_dir, ev.LogWritten) if log.level == "warning"]
    assert any("resident_blocks 1 instead of 2" in text for text in warnings)


def test_parts_move_to_the_device_and_back_in_steps_in_backward_too(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(
        train__steps=16, train__evaluate_every="end", train__checkpoint_every="end",
        train__max_grad_norm=None, model__dtype="bfloat16",
    )  # fmt: skip
    run(config, tmp_path / "plain")
    run_dir = tmp_path / "moved"
    script = [(4, say("apply", device_groups=2)), (9, say("apply", device_groups=4))]
    asked = Script(monkeypatch, run_dir, [*script, (12, say("undo"))])
    run(config, run_dir)
    assert [answer.ok for answer in asked.answers] == [True, True, True]
    assert losses(run_dir) == losses(tmp_path / "plain")
    made = [(e.before, e.after) for e in told(run_dir, ev.ChangeApplied)]
    assert made == [(0, 2), (2, 4), (4, 2)]
    assert told(run_dir, ev.ResidencySampled)[-1].optimizer == "GC"


@pytest.mark.parametrize("disk", ["auto", "off"])
def test_states_leave_a_host_that_gets_short_and_losses_stay(
    disk: str, config: Path, run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(train__steps=8, train__checkpoint_every=4, placement__disk=disk)
    undisturbed = of(ev.StepFinished, run(config, tmp_path / "undisturbed"))
    asked = iter([0, 0, 0, 1, 0, 1, 0, 0])  # a group leaves after three steps, then another
    granted: list[bool] = []

    def lack(requests: Requests) -> int:
        if size_bytes := next(asked):
            granted.append(requests.free_host(size_bytes))
        return size_bytes if granted and granted[-1] else 0

    monkeypatch.setattr(Requests, "take_host_lack", lack)
    monkeypatch.setattr(footprint, "RECORD_BYTES", 1 << 12)  # or buffers would take what is freed
    events = run(config, tmp_path / "short")
    steps = of(ev.StepFinished, events)
    assert [step.loss for step in steps] == [step.loss for step in undisturbed]
    moved = [one for one in of(ev.ChangeApplied, events) if one.why == "host"]
    assert granted == [disk == "auto"] * 2
    assert [one.step for one in moved] == ([3, 5] if disk == "auto" else [])
    assert all(one.before < one.after for one in moved)
    assert [p for p in (tmp_path / "short").iterdir() if "spill" in p.name] == []
