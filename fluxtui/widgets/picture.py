"""Saves the lines of a panel as a picture in their colours (SVG)."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.segment import Segment, Segments
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme

from fluxtui.themes import Palette
from fluxtui.widgets.spans import Line, fitted


def svg_of(lines: Sequence[Line], palette: Palette, width: int, title: str) -> str:
    """Return an SVG of `lines` in `width` cells, on the palette's background."""
    console = Console(
        width=width, height=len(lines), file=io.StringIO(), force_terminal=True,
        color_system="truecolor", record=True, legacy_windows=False, safe_box=False,
    )  # fmt: skip
    segments: list[Segment] = []
    for spans in lines:
        segments += [Segment(text, palette.style(role)) for text, role in fitted(spans, width)]
        segments.append(Segment.line())
    console.print(Segments(segments), end="")
    return console.export_svg(title=title, theme=_terminal(palette))


def _terminal(palette: Palette) -> TerminalTheme:
    """Return Rich's own theme for pictures, with the palette's ground where it has one."""
    if palette.ground is None:
        return SVG_EXPORT_THEME
    text = palette.style("text").color
    ground = tuple(palette.ground.get_truecolor())
    ink = tuple(text.get_truecolor()) if text else (128, 128, 128)
    names = [tuple(SVG_EXPORT_THEME.ansi_colors[i]) for i in range(16)]
    return TerminalTheme(ground, ink, names[:8], names[8:])  # type: ignore[arg-type]
