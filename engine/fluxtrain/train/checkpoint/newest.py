"""Find the newest whole checkpoint, and refuse one of another run, with what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from fluxtrain.config.schema import RunConfig
from fluxtrain.errors import BadInput, brief
from fluxtrain.files.cache import Damaged
from fluxtrain.models.model_files import is_pipeline
from fluxtrain.train.checkpoint.checkpoint import (
    Checkpoint,
    list_checkpoints,
    read_checkpoint,
    step_folder,
)
from fluxtrain.units import count_text

_RATE, _WARMUP = "learning rate", "train.warmup_steps"


class BeyondEnd(Damaged):
    """A checkpoint's step is after the run's last one."""


def newest_resumable(
    root: Path, warn: Callable[[str], None], before: str | None = None
) -> Checkpoint | None:
    """Find the newest checkpoint without damage; name and skip damaged ones.

    before: the name of a folder; only those of earlier steps are looked at.
    None if there are no checkpoints. Raises BadInput if none is whole.
    """
    every = list_checkpoints(root)
    for path in every:
        if before is not None and path.name >= before:
            continue
        try:
            found = read_checkpoint(path)
            if path.name != step_folder(root, found.step).name:  # such as a copy
                raise Damaged(f"{path.name} holds step {found.step}")
            found.trainer_state()
            return found
        except Damaged as damage:
            warn(f"skipped a damaged checkpoint: {damage}")
    if every or before is not None:
        raise BadInput(
            f"all {len(every)} checkpoints under {root} are damaged: start again in another "
            "--run-dir"
        )
    return None


def older_resumable(
    root: Path, warn: Callable[[str], None], refused: Checkpoint, why: Damaged
) -> Checkpoint:
    """Find the newest one before a checkpoint that was `refused`. Raises BadInput if none is whole:
    for one beyond the run's end, which is whole itself, with that."""
    kind = "checkpoint" if isinstance(why, BeyondEnd) else "damaged checkpoint"
    warn(f"skipped a {kind}: {why}")
    try:
        older = newest_resumable(root, warn, refused.path.name)
    except BadInput:
        if isinstance(why, BeyondEnd):
            raise why from None
        raise
    assert older is not None, "without an older one it raises"
    return older


def with_cure(damage: Damaged) -> Damaged:
    """Add the cure for a damaged checkpoint that the user named."""
    return Damaged(
        f"{damage}: name another checkpoint, or the run's folder to go on from its newest whole one"
    )


@contextmanager
def damage_in_words_of(checkpoint: Checkpoint, kind: type[BadInput] = BadInput) -> Iterator[None]:
    """Raise Damaged for a state that a component of the run refuses."""
    try:
        yield
    except kind as error:
        raise Damaged(f"{checkpoint.path.name}: {error}") from error


def refuse_beyond_end(checkpoint: Checkpoint, total_steps: int) -> None:
    """Raise BeyondEnd for a checkpoint of a step after the run's last."""
    if checkpoint.step > total_steps:
        raise BeyondEnd(
            f"{checkpoint.path.name} is of step {checkpoint.step} and the run ends at step "
            f"{total_steps}: raise train.steps (or train.epochs) if it was lowered"
        )


def batch_rows_of(checkpoint: Checkpoint) -> int:
    """Return the rows of a micro-batch."""
    rows: int = checkpoint.trainer_state()["fingerprint"]["batch_rows"]
    return rows


def changed_settings(path: Path, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return in words what a resume changes of a run: it may lower the learning rate and set
    another warm-up that is no shorter.

    Raises BadInput, with what differs, for a checkpoint of another model, data or settings.
    """
    different = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    allowed = set()
    if _RATE in old and new[_RATE] <= old[_RATE]:
        allowed |= {_RATE, "train.learning_rate"}
    was, now = old.get(_WARMUP), new.get(_WARMUP)
    if isinstance(now, int) and (was == "auto" or (isinstance(was, int) and now >= was)):
        allowed.add(_WARMUP)
    words = {
        key: f"{brief(key)} was {brief(repr(old.get(key)))} and is {brief(repr(new.get(key)))}"
        for key in sorted(different)
    }
    if different <= allowed:
        return [words[key] for key in sorted(different - {"train.learning_rate"})]
    raise BadInput(
        f"{path.name} belongs to another run ({'; '.join(words.values())}): resume with the "
        "settings it was made with (a lower learning rate and a longer warm-up are taken), or "
        "start a new run in another --run-dir"
    )


def chunk_rows_of(content: dict[str, Any], asked: int | None, warn: Callable[[str], None]) -> int:
    """Return the chunk of a resumed run: the former one, as losses depend on it, unless the user
    has set another one since (`asked`; None: not set)."""
    had: int = content["chunk_rows"]
    if asked is None or asked in (had, content.get("chunk_rows_set", asked)):
        return had
    warn(
        f"placement.chunk_rows is {asked} now, as set, and was {had}: losses differ in their "
        "last digits from those of a run that never stopped, and with dropout by what is drawn"
    )
    return asked


def fingerprint(
    config: RunConfig, model: str, batch_rows: int, learning_rate: float, base: str = ""
) -> dict[str, Any]:
    """Return the settings that must be equal to resume exactly; compared key by key. `model` is the
    `model_digest` of the loaded one.

    `learning_rate` is the chosen one where the configuration leaves it to the trainer. `base`: the
    key of the model's weight files. It counts where checkpoints hold no frozen weights.
    """
    settings = config.train.model_dump(mode="json")
    keys = (
        "accumulation", "learning_rate", "schedule", "warmup_steps", "weight_decay", "no_decay",
        "betas", "eps", "states", "optimizer", "max_grad_norm", "seed",
    )  # fmt: skip
    return {
        "model": model,
        **_method(config, base),
        "data.sequence_length": config.data.row_tokens,
        "data.held_out": config.data.held_out,
        "data.seed": config.data.seed,
        "batch_rows": batch_rows,
        _RATE: learning_rate,
        **{f"train.{key}": settings[key] for key in keys},
        **_of_images(config),
    }


def _of_images(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide what is learned of images."""
    keys = ("size", "caption_tokens", "caption_dropout", "timesteps", "guidance")
    image = config.image.model_dump(mode="json") if is_pipeline(config.model.path) else {}
    return {f"image.{key}": image[key] for key in keys if image}


def _method(config: RunConfig, base: str) -> dict[str, Any]:
    """Return the method, with the settings that decide an adapter's result."""
    chosen = config.method.model_dump(mode="json")
    if chosen["name"] == "full":
        return {"method": "full"}
    if chosen["name"] != "qlora":
        chosen.pop("base")
    settings = {f"method.{key}": value for key, value in chosen.items() if key != "name"}
    return {"method": chosen["name"], "model.weights": base, **settings}


def model_digest(model: nn.Module) -> str:
    """Hash names, shapes and dtypes of all parameters, as they were loaded."""
    digest = hashlib.sha256()
    count = 0
    for name, parameter in model.named_parameters():
        facts = (name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
        digest.update(repr(facts).encode())
        count += parameter.numel()
    kind = type(model).__name__
    return f"{kind}, {count_text(count)} parameters ({digest.hexdigest()[:8]})"
