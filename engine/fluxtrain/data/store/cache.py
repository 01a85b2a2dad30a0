"""The folder of cached tokens: an entry for each data set, tokenizer and way of reading.

An entry is built by one process, with the exclusive lock of `lock`; others wait for it. Readers
hold a shared lock of `used`, so an entry in use is never removed; it may be built anew beside them,
as they have its old files mapped. Entries that nobody used for a month are removed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fluxtrain.data.encoding.tokenizer import Tokenizer
from fluxtrain.data.store.shard_files import Damaged, write_whole
from fluxtrain.data.store.shards import StoredTokens
from fluxtrain.errors import NoSpace

RECIPE = 1  # raise it when the same data would become other tokens
ENDS = 1 << 16  # bytes of a file's beginning and end that its key looks at
UNUSED_S = 30 * 24 * 3600.0
_COMPLETE = "complete.json"


class Entry:
    """A data set in the cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: int | None = None  # the descriptor with the shared lock, until the process ends

    def opened(self, names: Sequence[str]) -> tuple[list[StoredTokens], list[str]] | None:
        """Return the tokens of the parts and what was told of them; None: not built, or damaged.

        The entry stays locked against removal from now on.
        """
        if self._held is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._held = os.open(self.folder / "used", os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(self._held, fcntl.LOCK_SH)
        try:
            told = list(json.loads((self.folder / _COMPLETE).read_bytes())["told"])
            found = [StoredTokens(self.folder / name) for name in names]
        except (Damaged, OSError, ValueError, KeyError):
            fcntl.flock(self._held, fcntl.LOCK_UN)
            return None
        os.utime(self.folder / _COMPLETE)
        return found, told

    def is_whole(self, names: Sequence[str]) -> bool:
        """Return whether another process built the entry meanwhile; called while it is held."""
        try:
            json.loads((self.folder / _COMPLETE).read_bytes())
            return all(StoredTokens(self.folder / name).count for name in names)
        except (Damaged, OSError, ValueError):
            return False

    def complete(self, told: list[str]) -> None:
        """Note that the entry is whole."""
        write_whole(self.folder / _COMPLETE, json.dumps({"told": told}).encode())

    @contextmanager
    def building(self, waits: Callable[[], None]) -> Iterator[None]:
        """Hold the entry alone; `waits` is called once where another process builds it.

        What a killed writer left is kept, but for files that are not whole. Raises NoSpace.
        """
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            for left in self.folder.rglob(".*"):
                left.unlink(missing_ok=True)
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, NoSpace):
                raise NoSpace(
                    f"no space left for the tokens of the data in {self.folder.parent}: make room, "
                    "or name another folder in data.token_cache"
                ) from error
            raise
        finally:
            os.close(descriptor)

    def discard(self, names: Sequence[str]) -> None:
        """Remove what was complete and is damaged; shards of a killed writer are kept."""
        if (self.folder / _COMPLETE).exists():
            (self.folder / _COMPLETE).unlink()
            for name in (*names, "rows"):
                shutil.rmtree(self.folder / name, ignore_errors=True)


def cache_folder(wished: str) -> Path:
    """Return the folder of the cache: `wished`, or for auto one in the user's cache."""
    if wished != "auto":
        return Path(wished).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "fluxtrain" / "tokens"


def forget_unused(folder: Path, now_s: float | None = None) -> None:
    """Remove entries that nobody used for a month and nobody holds."""
    limit = (time.time() if now_s is None else now_s) - UNUSED_S
    for entry in folder.glob("*/used"):
        complete = entry.with_name(_COMPLETE)
        newest = complete if complete.exists() else entry
        if newest.stat().st_mtime > limit:
            continue
        descriptor = os.open(entry, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.parent, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def key_of(files: Sequence[Path], settings: Any, tokenizer: Tokenizer) -> str:
    """Return the name of the entry for files, the way they are read, and a tokenizer."""
    made = blake2b(repr((RECIPE, settings)).encode(), digest_size=16)
    for path in files:
        found = path.stat()
        made.update(repr((str(path.resolve()), found.st_size, found.st_mtime_ns)).encode())
        with path.open("rb") as file:
            made.update(file.read(ENDS))
            file.seek(max(0, found.st_size - ENDS))
            made.update(file.read(ENDS))
    made.update(_tokenizer_key(tokenizer))
    return made.hexdigest()


def _tokenizer_key(tokenizer: Any) -> bytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    facts = (
        type(tokenizer).__name__, tokenizer.special_tokens_map, tokenizer.chat_template,
        sorted((number, str(token)) for number, token in tokenizer.added_tokens_decoder.items()),
    )  # fmt: skip
    return blake2b(repr((vocabulary, facts)).encode(), digest_size=16).digest()
