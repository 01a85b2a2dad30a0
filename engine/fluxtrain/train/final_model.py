"""Choose the weights that a run saves at its end, those of its last step or of its best one, and
save them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fluxtrain.config.schema import TrainSettings
from fluxtrain.core.ranks.join import ALONE, Ranks
from fluxtrain.errors import BadInput, FluxTrainError
from fluxtrain.events.run_folder import own_files
from fluxtrain.files.cache import Damaged
from fluxtrain.train.checkpoint.checkpoint import Checkpoint
from fluxtrain.train.checkpoint.newest import with_cure
from fluxtrain.train.checkpoint.run_state import RunState
from fluxtrain.train.checkpoint.writer import CheckpointWriter

if TYPE_CHECKING:
    from fluxtrain.methods.engine import TrainingEngine
    from fluxtrain.train.session import Session


def refuse_without_evaluations(settings: TrainSettings, held_out_rows: int) -> None:
    """Raise BadInput where settings compare evaluations and the data has no row to evaluate on."""
    if held_out_rows:
        return
    compares = {
        "train.early_stopping_patience": settings.early_stopping_patience is not None,
        "train.final_model = best": settings.final_model == "best",
    }
    for name, is_set in compares.items():
        if is_set:
            raise BadInput(
                f"{name} compares evaluations, and no row of the data is held out to evaluate on: "
                "raise data.held_out, name data.held_out_path, or leave this setting out"
            )


def tell_of_other_data(state: RunState, held_out: str | None, warn: Callable[[str], None]) -> None:
    """Warn where a resumed run evaluates on other data than before; the best one counts anew.

    `held_out` is the fingerprint of the rows to evaluate on; None: there are none.
    """
    if state.evaluates(held_out):
        warn(
            "the held-out data is not that of the evaluations so far: the best one, and "
            "train.early_stopping_patience, count from here on"
        )


def save_model(session: Session, save: Callable[[Path], object]) -> None:
    """Save the trained model with `save` in the run's folder, wherever that is now, and list its
    files. Waits for room. Raises as `save` and `Holding.look`."""
    run_dir = session.run_dir

    def once() -> None:
        session.holding.look()
        own_files.clear_model(run_dir, session.announcer.warn)
        save(run_dir.model)

    def saved() -> None:
        try:
            once()
        except BadInput:
            before = run_dir.path
            session.holding.look()
            if run_dir.path == before:
                raise
            once()  # the folder was renamed meanwhile

    session.disk.until_written(saved)
    own_files.remove_unfinished_models(run_dir, also_earlier=True)
    with suppress(FluxTrainError):  # without the list, deleting the run leaves more behind
        own_files.note_model(run_dir)
    session.model_path = str(run_dir.model)


def choose_final_weights(
    wanted: Literal["last", "best"],
    state: RunState,
    checkpoints: CheckpointWriter,
    engine: TrainingEngine,
    warn: Callable[[str], None],
    ranks: Ranks = ALONE,
) -> int:
    """Load the weights of the best evaluation where these are wanted; return the step they are of.
    Where each of several `ranks` has a part of the weights, all load what the first one finds.

    The run has made its last step. The last weights stay, with a warning that says why, where the
    best checkpoint is gone or damaged. Raises Damaged where that shows while its weights are loaded
    and those of the last step were not saved.
    """
    if wanted == "last" or state.best_step in (None, state.step):
        return state.step
    found, why = _best(state, checkpoints) if ranks.is_first else (None, "")
    found, why, last = ranks.of_first((found, why, checkpoints.last))
    if found is not None:
        damage = _load_on_all(found, checkpoints, engine, ranks)
        if damage is None:
            return found.step
        if last is None or last.step != state.step:  # some weights may be the best's already
            raise with_cure(damage) from None
        why, damage = str(damage), _load_on_all(last, checkpoints, engine, ranks)
        if damage is not None:
            raise damage
    warn(
        f"the best evaluation was {state.best_loss:.4f} at step {state.best_step}, and {why}: "
        f"the model is saved with the weights of step {state.step}, the last"
    )
    return state.step


def _best(state: RunState, checkpoints: CheckpointWriter) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint of the best evaluation; None where there is none, and why."""
    try:
        return checkpoints.best(state), "its checkpoint is not there"
    except Damaged as damage:
        return None, str(damage)


def _load_on_all(
    found: Checkpoint, checkpoints: CheckpointWriter, engine: TrainingEngine, ranks: Ranks
) -> Damaged | None:
    """Load the weights of a checkpoint; return what the first rank that could not says."""
    own = None
    try:
        checkpoints.load_weights(found, engine)
        engine.flush()
    except Damaged as damage:
        own = damage
    return next((one for one in ranks.gather(own) if one is not None), None)
