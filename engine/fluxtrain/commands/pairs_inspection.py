"""`fluxtrain inspect` of an image run: sizes, notes, license, and a contact sheet of its pairs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fluxtrain.config.schema import RunConfig
from fluxtrain.data.images.pairs import Pair
from fluxtrain.data.images.pictures import BadPicture, cropped, save_png
from fluxtrain.events.answers.answers import PairsInspectionAnswer
from fluxtrain.files.cache import cache_root
from fluxtrain.methods.image.method import read_data
from fluxtrain.methods.image.task import row_tokens
from fluxtrain.models.pipeline import open_pipeline
from fluxtrain.models.pipeline_files import stated_license

SHOWN = 8  # pairs
_SIDE = 192  # pixels of a picture on the sheet, at most


def inspect_pairs(config: RunConfig, whole: bool = False) -> PairsInspectionAnswer:
    """Check the pairs, and draw the first ones as they are cropped; `whole` decodes all of them.

    Raises BadInput as the run would.
    """
    pipeline = open_pipeline(config.model.path)
    found = read_data(config, lambda *_: not whole)
    sizes = Counter(f"{width}x{height}" for width, height in (p.bucket for p in found.all))
    shown = found.all[:SHOWN]
    key = hashlib.sha256(repr([(p.image.digest, p.bucket) for p in shown]).encode()).hexdigest()
    sheet = cache_root() / "images" / f"contact-sheet-{key[:16]}.png"
    try:
        save_png(_sheet(shown), sheet)
    except BadPicture:  # a cut file: all are looked at, so that bad pairs have their lines
        return inspect_pairs(config, whole=True)
    return PairsInspectionAnswer(
        path=str(config.data.path),
        layout=found.layout,
        pairs=len(found.trained),
        held_out=len(found.held_out),
        sizes=dict(sizes.most_common()),
        sequence_length=row_tokens(found.all, config.image.caption_tokens),
        notes=found.notes,
        license=license_of(pipeline.folder),
        prompts=tuple(pair.prompt for pair in shown),
        contact_sheet=str(sheet),
    )


def license_of(folder: Path) -> str:
    """Return the license that a model's folder states, with what it means for FLUX.1 [dev]."""
    named = stated_license(folder)
    if named and "non-commercial" in named:
        return f"{named}: no commercial use of the model, nor of what is trained from it"
    return named or "not stated in the folder; FLUX.1 Kontext [dev] is for non-commercial use"


def _sheet(pairs: Sequence[Pair]) -> Any:
    """Draw a line for each pair: its references, then the target, scaled."""
    from PIL import Image, ImageOps

    rows = [
        [cropped(p.path, pair.bucket) for p in (*pair.references, pair.image)] for pair in pairs
    ]
    columns = max(map(len, rows))
    sheet = Image.new("RGB", (columns * _SIDE, len(rows) * _SIDE), "gray")
    for row, pictures in enumerate(rows):
        for column, pixels in enumerate(pictures):
            picture = ImageOps.contain(Image.fromarray(pixels), (_SIDE, _SIDE))
            place = column + columns - len(pictures)  # targets stand in the last column
            sheet.paste(picture, (place * _SIDE, row * _SIDE))
    return sheet


def page(found: PairsInspectionAnswer) -> str:
    """Format the answer for people."""
    facts = [f"{name:8}{value}" for name, value in (("path", found.path), *found.rows())]
    prompts = [f"  {number}: {prompt}" for number, prompt in enumerate(found.prompts, 1)]
    return "\n".join([*facts, *found.notes, *prompts])
