"""Reads a picture as half blocks: two pixels a cell of a terminal, the upper in its ink."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from fluxtrain.errors import BadInput
from fluxtrain.files.opening import open_plain

BLOCK = "\u2580"
MOST_PIXELS = 64_000_000  # of a picture that is drawn while somebody waits
Cell = tuple[str, str]  # colours as #rrggbb: of the upper and of the lower pixel


def half_blocks(path: Path, columns: int, rows: int) -> tuple[tuple[Cell, ...], ...]:
    """Return the cells of a PNG picture, line by line, scaled down to at most `columns` x `rows`.

    Raises BadInput, in a sentence, without Pillow and for a file that is no such picture.
    """
    try:
        return _cells(path, max(1, columns), max(1, rows), path.stat().st_mtime_ns)
    except ImportError:
        raise BadInput("drawing pictures needs Pillow: pip install 'fluxtrain[image]'") from None
    except OSError as error:
        raise BadInput(
            f"{path.name} cannot be read: {error.strerror or 'no PNG picture'}"
        ) from None
    except (SyntaxError, ValueError):
        raise BadInput(f"{path.name} cannot be read: it is too large or damaged") from None


@lru_cache(maxsize=32)
def _cells(path: Path, columns: int, rows: int, _changed_ns: int) -> tuple[tuple[Cell, ...], ...]:
    from PIL import Image

    try:
        with open_plain(path, follow=True) as file, Image.open(file, formats=("PNG",)) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise ValueError(path)
            picture = opened.convert("RGB")
    except Image.DecompressionBombError:
        raise ValueError(path) from None
    scale = min(1.0, columns / picture.width, 2 * rows / picture.height)
    width, lines = round(picture.width * scale), round(picture.height * scale / 2)
    picture = picture.resize((max(1, width), 2 * max(1, lines)), Image.Resampling.BOX)
    pixels = picture.tobytes()
    colours = [f"#{pixels[at : at + 3].hex()}" for at in range(0, len(pixels), 3)]
    return tuple(
        tuple(zip(colours[at : at + picture.width], colours[at + picture.width :], strict=False))
        for at in range(0, len(colours), 2 * picture.width)
    )
