"""Keeps the packing of rows beside cached tokens, so that a further run need not pack again."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import numpy as np

from fluxtrain.data.fit import Fit
from fluxtrain.data.packing import Packing
from fluxtrain.files.atomic import replace_file
from fluxtrain.files.opening import open_plain


def kept_packing(folder: Path, settings: object) -> Packing | None:
    """Return the packing for the settings; None where none is kept, or it is damaged."""
    try:
        with open_plain(_file(folder, settings)) as file:
            data = file.readall()
        if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
            return None
        with np.load(io.BytesIO(data[4:]), allow_pickle=False) as found:
            told = json.loads(str(found["told"]))
            if told["settings"] != repr(settings):  # under the name of another's
                return None
            return Packing(
                starts=found["starts"],
                lengths=found["lengths"],
                first_piece=found["first_piece"],
                predicted_count=told["predicted_count"],
                fit=Fit(**told["fit"]),
            )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def keep_packing(folder: Path, settings: object, packing: Packing) -> None:
    """Write a packing for the next run."""
    made = io.BytesIO()
    told = {
        "settings": repr(settings), "predicted_count": packing.predicted_count,
        "fit": asdict(packing.fit),
    }  # fmt: skip
    np.savez(
        made,
        starts=packing.starts,
        lengths=packing.lengths,
        first_piece=packing.first_piece,
        told=np.array(json.dumps(told)),
    )
    data = made.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(_file(folder, settings), zlib.crc32(data).to_bytes(4, "little") + data)


def _file(folder: Path, settings: object) -> Path:
    return folder / blake2b(repr(settings).encode(), digest_size=12).hexdigest()
