"""A change is taken back also where others, made before it, leave less room for what was set."""

from __future__ import annotations

from fluxtrain.telemetry import events as ev
from tests.unit.test_train_live import Run, ground


def test_what_was_in_force_as_far_as_it_could_be_is_so_again_after_an_undo() -> None:
    run = Run(context=ground(resident_blocks=4, blocks_without_recompute=4))
    for change in ({"resident_blocks": 2}, {"blocks_without_recompute": 1}):
        assert run.ask(**change)[0]
        run.steps(1)
    for name, value in (("blocks_without_recompute", 4), ("resident_blocks", 4)):
        assert run.live.ask("undo", {})[0]
        run.steps(1)
        last = run.told(ev.ChangeApplied)[-1]
        assert (last.name, last.after, last.why) == (name, value, "undo")
    assert not run.told(ev.ChangeRefused)
    assert not run.ask(blocks_without_recompute=9)[0]
