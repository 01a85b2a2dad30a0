"""Opens, checks and crops pictures with Pillow, to sizes that are FLUX.1 Kontext's own, scaled to
an area.

What a training cannot use as it is meant is refused with the cure: other formats, CMYK, 16 bits,
cut files. Turned photos are turned back, and what is transparent is shown on white.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fluxtrain.errors import BadInput
from fluxtrain.files.atomic import whole_file
from fluxtrain.files.opening import open_plain

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MOST_PIXELS = 8192  # of a side
LEAST_PIXELS = 16
_SCALE = f"and {MOST_PIXELS:,} a side are the most: scale it down"
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # in EXIF: width and height change places
_TOLD_BY = frozenset({"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"})  # of a PNG
_WHITE = (255, 255, 255)
MULTIPLE = 16  # pixels of a token: the VAE halves three times, and 2 x 2 latents are packed
_AREA_SIDE = 1024
# (width, height) near one megapixel that FLUX.1 Kontext was trained at
_SIZES = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184),
    (944, 1104), (1024, 1024),
)  # fmt: skip

Bucket = tuple[int, int]  # width and height, pixels


class BadPicture(ValueError):
    """Raised with the name of a picture, and what is wrong with it."""


def buckets_of(side: int) -> tuple[Bucket, ...]:
    """Return the sizes whose area is about `side` x `side` pixels, from narrow to wide."""
    half = [(_scaled(width, side), _scaled(height, side)) for width, height in _SIZES]
    return tuple(dict.fromkeys([*half, *((height, width) for width, height in reversed(half))]))


def bucket_for(width: int, height: int, buckets: tuple[Bucket, ...]) -> Bucket:
    """Return the size whose shape is nearest: of it the least is cut off."""
    return min(buckets, key=lambda size: abs(log(width * size[1] / (height * size[0]))))


def tokens_of(bucket: Bucket) -> int:
    """Count the tokens of one image."""
    return (bucket[0] // MULTIPLE) * (bucket[1] // MULTIPLE)


def _scaled(pixels: int, side: int) -> int:
    return max(MULTIPLE, round(pixels * side / _AREA_SIDE / MULTIPLE) * MULTIPLE)


def size_of(path: Path) -> tuple[int, int]:
    """Return width and height in pixels as a person sees the picture, from its header alone.

    Raises BadPicture for what is no picture or cannot be trained on.
    """
    with _opened(path) as picture:
        width, height = picture.size
        # of a PNG without EXIF Pillow would decode all pixels, to look behind them
        reads = picture.format != "PNG" or not _TOLD_BY.isdisjoint(picture.info)
        turned = reads and picture.getexif().get(_ORIENTATION) in _TURNED
        return (height, width) if turned else picture.size


def decode(path: Path) -> None:
    """Read every pixel. Raises BadPicture for a file that is cut or damaged."""
    with _opened(path) as picture:
        picture.load()


def cropped(path: Path, bucket: Bucket) -> npt.NDArray[np.uint8]:
    """Return the middle of a picture, scaled to cover `bucket`: (height, width, 3).

    Raises BadPicture.
    """
    with _opened(path) as picture:
        return np.array(_covering(_on_white(picture), bucket))


def mask_weights(path: Path, bucket: Bucket) -> npt.NDArray[np.float32]:
    """Return the weight of each token from a mask in shades of grey: (tokens,), 1 for white.

    Raises BadPicture for a mask that is black all over.
    """
    from PIL import Image

    with _opened(path) as picture:
        whole = _covering(_on_white(picture).convert("L"), bucket)
    tokens = (bucket[0] // MULTIPLE, bucket[1] // MULTIPLE)
    weights: npt.NDArray[np.float32] = np.asarray(
        whole.resize(tokens, Image.Resampling.BOX), dtype=np.float32
    ).reshape(-1)
    if not weights.any():
        raise BadPicture(f"{path.name} is black all over, so nothing would be learned")
    return weights / np.float32(255)


def save_png(picture: Any, path: Path) -> None:
    """Write a picture, with its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        picture.save(file, format="PNG")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a picture and check its header; what Pillow makes of its pixels is BadPicture, too."""
    image, errors = pillow()
    try:
        with BufferedReader(open_plain(path, follow=True)) as file, image.open(file) as picture:
            if wrong := _wrong_header(picture):
                raise BadPicture(f"{path.name} {wrong}")
            yield picture
            return
    except BadPicture:
        raise
    except FileNotFoundError:
        wrong = "does not exist"
    except image.DecompressionBombError:
        wrong = f"has more than 179 million pixels, {_SCALE}"
    except errors:
        wrong = f"is no picture that can be read: save it as {FORMATS[0]}"
    except (OSError, SyntaxError, ValueError) as error:
        what = " ".join(str(getattr(error, "strerror", None) or error).split())[:100]
        wrong = f"is cut or damaged ({what}): copy or save it again"
    raise BadPicture(f"{path.name} {wrong}")


def _wrong_header(picture: Any) -> str:
    width, height = picture.size
    wrong = {
        f"is a {picture.format}: save it as PNG, JPEG or WEBP": picture.format not in FORMATS,
        "is CMYK, whose colours depend on a printer: save it as RGB": picture.mode == "CMYK",
        f"has more than 8 bits a channel ({picture.mode}): save it with 8":
            picture.mode.startswith(("I", "F")),
        f"has {width:,} x {height:,} pixels, {_SCALE}": max(width, height) > MOST_PIXELS,
        f"has {width} x {height} pixels, and {LEAST_PIXELS} a side are the least":
            min(width, height) < LEAST_PIXELS,
        "is animated: save one frame of it": getattr(picture, "n_frames", 1) > 1,
    }  # fmt: skip
    return next((words for words, applies in wrong.items() if applies), "")


def _on_white(picture: Any) -> Any:
    """Return the picture as a person sees it: turned by its EXIF, without transparency."""
    from PIL import Image, ImageOps

    turned = ImageOps.exif_transpose(picture)
    if not (turned.mode.endswith(("A", "a")) or "transparency" in turned.info):
        return turned.convert("RGB")
    above = turned.convert("RGBA")
    ground = Image.new("RGBA", above.size, (*_WHITE, 255))
    return Image.alpha_composite(ground, above).convert("RGB")


def _covering(picture: Any, bucket: Bucket) -> Any:
    from PIL import Image, ImageOps

    return ImageOps.fit(picture, bucket, Image.Resampling.LANCZOS)


def pillow() -> tuple[Any, type[Exception]]:
    """Return Pillow and the error of what is no picture. Raises BadInput where it is missing."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise BadInput("training on images needs Pillow: pip install 'fluxtrain[image]'") from error
    return Image, UnidentifiedImageError
