"""Tells what a run wrote into its folder from what others put there, and removes that alone.

Everything goes by handles of folders (openat, unlinkat): if a folder is swapped for a link
meanwhile, nothing outside is seen or removed. Links are never a run's own.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.atomic import read_json, storage_error, write_json
from fluxtrain.files.folders import MARK
from fluxtrain.files.opening import is_plain_folder, kind_of, refuse_odd

TRACKERS = ("trackers", "tensorboard", "wandb")  # folders that trackers make
SAMPLES = "samples"  # a folder: pictures that were made between steps
KEPT_MODEL = "kept-from-model"
KEPT = "kept-from-run"  # holds what others put in the place of a run's own
# Says of a name and its facts: not the run's own; its own file; a folder, with the rule within it.
Rule = Callable[[str, os.stat_result], "Rule | bool"]

_CHECKPOINT = re.compile(r"(\.writing-(old-)?)?step-\d{8,}")
# Of models that were saved without a list, as by a process that was killed after it.
_OF_MODEL = re.compile(
    r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|adapter_config\.json|"
    r"config\.json|generation_config\.json|tokenizer(_config)?\.json|tokenizer\.model|"
    r"special_tokens_map\.json|added_tokens\.json|chat_template\.jinja|vocab\.(json|txt)|merges\.txt|"
    + re.escape(MARK)
)
_UNFINISHED_MODEL = re.compile(r"\.model-(?P<old>old-)?[a-z0-9_]{8}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def refuse_odd_places(run: RunDir) -> None:
    """Raise BadInput where a link, a pipe or a device stands in the place of something that a run
    reads or writes: it would choose files beyond the folder."""
    files = (run.run, run.plan, run.journal, run.timeline, run.log, run.result, run.error, run.pid)
    folders = (run.checkpoints, run.model, *(run.path / name for name in TRACKERS))
    refuse_odd((*files, run.model_list), folders)


def note_model(run: RunDir) -> None:
    """List the files of the trained model, which was just saved. Raises as `write_json`."""
    files = [path for path in run.model.rglob("*") if path.is_file() and not path.is_symlink()]
    sizes = {str(path.relative_to(run.model)): path.stat().st_size for path in files}
    write_json(run.model_list, {"model_files": sizes})


def model_files(run: RunDir) -> dict[str, int] | None:
    """Return the sizes of the trained model's files by their paths in its folder, as they were
    saved; None without a list."""
    listed = (read_json(run.model_list) or {}).get("model_files")
    if not isinstance(listed, dict):
        return None
    return {name: size for name, size in listed.items() if isinstance(size, int)}


@dataclass
class Visited:
    """Counts a folder: the bytes of the run's own files, and the paths of others' in it."""

    own_bytes: int = 0
    others: list[str] = field(default_factory=list)


def open_folder(name: Path | str, within: int | None = None) -> int:
    """Return a handle of a folder, in the folder of handle `within`. Raises OSError, also for a
    link."""
    return os.open(name, _FOLDER, dir_fd=within)


def visit(folder: int, rule: Rule, *, remove: bool = False, at: str = "") -> Visited:
    """Walk the folder of a handle, and `remove` the run's own files.

    A folder of the run is removed once it is empty; `folder` itself stays. Raises OSError where
    something cannot be removed.
    """
    found = Visited()
    for name in sorted(os.listdir(folder)):
        try:
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            kind = rule(name, facts)
            if kind is False:
                found.others.append(f"{at}{name}")
            elif kind is True:
                if remove:
                    os.unlink(name, dir_fd=folder)
                found.own_bytes += facts.st_size
            else:
                _visit_inner(folder, name, kind, found, remove, at)
        except FileNotFoundError:
            continue  # gone meanwhile
    return found


def _visit_inner(folder: int, name: str, rule: Rule, found: Visited, remove: bool, at: str) -> None:
    try:
        inner = open_folder(name, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):  # swapped meanwhile
            raise
        found.others.append(f"{at}{name}")
        return
    try:
        within = visit(inner, rule, remove=remove, at=f"{at}{name}/")
    finally:
        os.close(inner)
    found.own_bytes += within.own_bytes
    found.others += within.others
    if remove and not within.others:
        os.rmdir(name, dir_fd=folder)


def others_in(path: Path, rule: Rule) -> list[str]:
    """Return all names in a folder that holds foreign files; [] without a folder."""
    try:
        folder = open_folder(path)
    except OSError:
        return []
    try:
        return sorted({name.partition("/")[0] for name in visit(folder, rule).others})
    finally:
        os.close(folder)


def kept_beside(path: Path, folder: Path) -> Path:
    """Move a file or folder into `folder`, made if missing, and return its new place.

    Nothing in it is replaced; where a link or a file has the folder's name, another folder is made
    next to it.
    """
    beside = (folder.with_name(f"{folder.name}-{number}") for number in range(1, 1000))
    folder = next(
        one for one in (folder, *beside) if is_plain_folder(one) or not os.path.lexists(one)
    )
    folder.mkdir(exist_ok=True)
    names = (f"{path.name}-{number}" if number else path.name for number in range(1000))
    place = next(folder / name for name in names if not os.path.lexists(folder / name))
    path.rename(place)
    return place


def of_checkpoints(name: str, facts: os.stat_result) -> Rule | bool:
    """Apply the rule of the folder `checkpoints`."""
    is_ours = stat.S_ISDIR(facts.st_mode) and _CHECKPOINT.fullmatch(name)
    return of_checkpoint if is_ours else False


def _files_named(pattern: str) -> Rule:
    """Return the rule of a folder whose own files have such names."""
    named = re.compile(pattern)
    return lambda name, facts: stat.S_ISREG(facts.st_mode) and named.fullmatch(name) is not None


of_checkpoint = _files_named(r"manifest\.json|trainer\.json|shard-\d{5,}\.safetensors")
of_trackers = _files_named(  # also of TensorBoard's events
    r"(tensorboard|wandb|mlflow|trackio)\.json|events\.out\.tfevents\.\d+\..+"
)
of_samples = _files_named(r"step-\d{8,}-\d+\.png")


def of_model(listed: Mapping[str, int] | None) -> Rule:
    """Return the rule of a saved model's folder, from the sizes of its files by their paths in it;
    None where the run has written no list."""

    def rule(name: str, facts: os.stat_result) -> Rule | bool:
        if stat.S_ISDIR(facts.st_mode):
            start = f"{name}/"
            inner = {path: size for path, size in (listed or {}).items() if path.startswith(start)}
            within = {path.removeprefix(start): size for path, size in inner.items()}
            return of_model(within) if within else False
        if not stat.S_ISREG(facts.st_mode):
            return False
        if listed is None:
            return _OF_MODEL.fullmatch(name) is not None
        return listed.get(name) == facts.st_size

    return rule


def of_unfinished_model(name: str, listed: Mapping[str, int] | None) -> Rule | bool:
    """Return the rule of a folder left by a process killed while it saved the model: the new one,
    or, moved aside, the one before, whose files are `listed`."""
    unfinished = _UNFINISHED_MODEL.fullmatch(name)
    if unfinished is None:
        return False
    if unfinished["old"] is None:
        return of_model(None)
    return lambda inner, _: of_model(listed) if inner == "model" else False


def clear_model(run: RunDir, warn: Callable[[str], None]) -> None:
    """Move foreign files out of the run's model folder, which is about to be replaced. Raises as
    `storage_error`."""
    model = run.model
    if os.path.lexists(model) and not is_plain_folder(model):
        _keep(model, run, warn)
    for name in others_in(model, of_model(model_files(run))):
        _keep(model / name, run, warn)


def _keep(path: Path, run: RunDir, warn: Callable[[str], None]) -> None:
    kind = kind_of(path)
    try:
        place = kept_beside(path, run.path / KEPT_MODEL)
    except OSError as error:
        raise storage_error(path, error) from error
    told = f"{path}{f' is {kind} and' if kind else ' is'} not of the run, and its model is saved"
    warn(f"{told} there: it is {place} now")


def remove_unfinished_models(run: RunDir, *, also_earlier: bool = False) -> None:
    """Remove half-saved models of killed processes; each may be as large as the model.

    `also_earlier`: the previous model too, which is kept until a new one is saved. A folder that
    others may read is somebody else's: saving makes its folders readable for its user alone.
    """
    listed = model_files(run)

    def rule(name: str, facts: os.stat_result) -> Rule | bool:
        if stat.S_IFMT(facts.st_mode) != stat.S_IFDIR or stat.S_IMODE(facts.st_mode) != 0o700:
            return False
        if not also_earlier and name.startswith(".model-old-"):
            return False
        return of_unfinished_model(name, listed)

    with suppress(OSError):
        folder = open_folder(run.path)
        try:
            visit(folder, rule, remove=True)
        finally:
            os.close(folder)
