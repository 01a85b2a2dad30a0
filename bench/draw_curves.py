"""Draws loss curves of bench_gpu.py's JSON files into one SVG.

python bench/draw_curves.py docs/curves.svg streamed=a.json resident=b.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 320, 48, 16, 112, 36
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#57606a")
DASHES = ("", "4 3", "8 3", "2 2", "8 3 2 3", "1 4")


def curves(named: dict[str, list[float]]) -> str:
    """An SVG of losses in nats by step; dashes tell the curves apart without colour."""
    steps = max(len(losses) for losses in named.values())
    low = int(min(min(losses) for losses in named.values()))
    high = int(max(max(losses) for losses in named.values())) + 1

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, steps - 1)

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#57606a">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for loss in range(low, high + 1, max(1, (high - low) // 5)):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, steps + 1, max(1, steps // 6)):
        parts.append(
            f'<text x="{x(step):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{step}</text>'
        )
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">step; loss in nats a token</text>')
    for index, (name, losses) in enumerate(named.items()):
        points = " ".join(f"{x(i):.1f},{y(loss):.1f}" for i, loss in enumerate(losses))
        dash = f' stroke-dasharray="{DASHES[index]}"' if DASHES[index] else ""
        line = f'fill="none" stroke="{COLOURS[index]}" stroke-width="1.5"{dash}'
        parts.append(f'<polyline points="{points}" {line}/>')
        place = f'x="{WIDTH - RIGHT + 8}" y="{TOP + 14 + 18 * index}" fill="{COLOURS[index]}"'
        parts.append(f"<text {place}>{name}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Read the files that are named and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("sources", nargs="+", metavar="NAME=FILE")
    options = parser.parse_args()
    named = {}
    for source in options.sources:
        name, _, path = source.partition("=")
        named[name] = [float(loss) for loss in json.loads(Path(path).read_text())["losses"]]
    options.target.write_text(curves(named), encoding="utf-8")


if __name__ == "__main__":
    main()
