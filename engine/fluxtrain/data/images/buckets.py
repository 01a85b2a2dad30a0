"""The sizes that images are trained at: FLUX.1 Kontext's own, scaled to an area."""

from __future__ import annotations

from math import log

MULTIPLE = 16  # pixels of a token: the VAE halves three times, and 2 x 2 latents are packed
_AREA_SIDE = 1024
# (width, height) near one megapixel that FLUX.1 Kontext was trained at
_SIZES = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184),
    (944, 1104), (1024, 1024),
)  # fmt: skip

Bucket = tuple[int, int]  # width and height, pixels


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
