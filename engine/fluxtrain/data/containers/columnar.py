"""Reads .parquet and .arrow files with pyarrow, a batch of rows at a time.

Such files give every row every key: what a row does not have is null there, also within tools and
their arguments. These nulls are dropped, or templates would print them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fluxtrain.data.containers.record import Record
from fluxtrain.data.containers.streams import INSTALL, Source, opened_raw
from fluxtrain.data.row import Origin
from fluxtrain.errors import BadInput, FluxTrainError
from fluxtrain.files.temporary import FULL, temporary_error

BATCH_ROWS = 16  # of long texts 256 would take gigabytes, and short ones are as fast
ARROW_FILE = b"ARROW1"

_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def columnar_rows(source: Source, kind: str) -> Iterator[Record]:
    """Yield the rows of a Parquet file, an Arrow file or an Arrow stream. Raises BadInput."""
    arrow = _pyarrow(source.name)
    number = 0
    try:
        with _seekable(source) as file:
            batches = _parquet(file) if kind == "parquet" else _arrow(file, arrow)
            for share, batch in batches:
                source.rows_share = min(1.0, share)
                for values in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield Record(Origin(source.name, number, "row"), without_nulls(values))
    except KeyError as error:
        raise BadInput(
            f"{source.name} has a map with the same key twice behind row {number}: write it again "
            "with one of the two"
        ) from error
    except FluxTrainError:
        raise
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{source.name} cannot be read as {kind} behind row {number}: "
            f"{str(error).splitlines()[0]}; write it again"
        ) from error


def without_nulls(value: Any) -> Any:
    """Return the value without keys that hold null, at every depth; lists keep their nulls."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def _pyarrow(name: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise BadInput(f"{name} needs the package pyarrow: {INSTALL}") from error
    return pyarrow


@contextmanager
def _seekable(source: Source) -> Iterator[Any]:
    """Yield a seekable file; a compressed one is unpacked to a temporary file."""
    if source.compression is None:
        with opened_raw(source.path) as file:
            yield file
        return
    what = f"{source.name}, unpacked,"
    try:
        unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    except OSError as error:
        raise temporary_error(error, what) from error
    with unpacked:
        try:
            shutil.copyfileobj(source.file, unpacked, 1 << 20)
            unpacked.seek(0)
        except OSError as error:
            if error.errno not in FULL:  # of the packed file
                raise
            raise temporary_error(error, what) from error
        yield unpacked


def _parquet(file: Any) -> Iterator[tuple[float, Any]]:
    """Yield batches, each with the share of rows that are read with it."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    whole, read = max(1, table.metadata.num_rows), 0
    for batch in table.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
        read += batch.num_rows
        yield read / whole, batch


def _arrow(file: Any, arrow: Any) -> Iterator[tuple[float, Any]]:
    from pyarrow import ipc

    is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
    file.seek(0, 2)
    whole = max(1, file.tell())
    file.seek(max(0, whole - len(_STREAM_END)))
    ended = file.read() == _STREAM_END
    file.seek(0)
    if not is_file and not ended:
        raise OSError("the end of the stream is missing, so the file is cut off")
    if is_file:
        opened = ipc.open_file(file)
        batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
    else:
        batches = iter(ipc.open_stream(file))
    before = 0.0
    for batch in batches:
        share = file.tell() / whole
        for first in range(0, batch.num_rows, BATCH_ROWS):
            done = min(1.0, (first + BATCH_ROWS) / batch.num_rows)
            yield before + (share - before) * done, batch.slice(first, BATCH_ROWS)
        before = share
