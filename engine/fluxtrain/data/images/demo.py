"""Draws the pairs of the image demo: scenes of shapes, each with one of four changes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fluxtrain.data.images.pictures import pillow

SIDE = 64  # pixels
PAIRS = 120
_COLOURS = ("navy", "teal", "olive", "maroon", "orange", "purple", "gray", "green")


def draw_pairs(folder: Path, count: int = PAIRS) -> None:
    """Write `count` pairs below `folder`, with `pairs.jsonl`; the same ones each time."""
    pillow()
    drawn, changes = random.Random(0), _changes()
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        prompt, change = changes[number % len(changes)]
        before = _scene(drawn)
        names = f"{number:03}-before.png", f"{number:03}-after.png"
        before.save(folder / names[0])
        change(before.copy()).save(folder / names[1])
        lines.append(json.dumps({"image": names[1], "reference": names[0], "prompt": prompt}))
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _scene(drawn: random.Random) -> Any:
    from PIL import Image, ImageDraw

    scene = Image.new("RGB", (SIDE, SIDE), drawn.choice(("white", "lightgray", "beige")))
    pen = ImageDraw.Draw(scene)
    for _ in range(3):
        left, top = drawn.randrange(SIDE - 24), drawn.randrange(SIDE - 24)
        size = drawn.randrange(12, 32)
        shape = drawn.choice((pen.rectangle, pen.ellipse))
        shape((left, top, left + size, top + size), fill=drawn.choice(_COLOURS))
    return scene


def _changes() -> list[tuple[str, Callable[[Any], Any]]]:
    from PIL import ImageDraw, ImageOps

    def circled(scene: Any) -> Any:
        ImageDraw.Draw(scene).ellipse((12, 12, SIDE - 12, SIDE - 12), outline="black", width=4)
        return scene

    return [
        ("invert the colors", ImageOps.invert),
        ("draw a circle", circled),
        ("make it red", lambda one: ImageOps.colorize(ImageOps.grayscale(one), "black", "red")),
        ("mirror the image", ImageOps.mirror),
    ]
