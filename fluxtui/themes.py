"""Colour themes: data files, each a Textual theme plus a colour for every role of the panels.

A theme file is TOML: `name`, `title`, `dark`, `ansi`, a table `[colors]` with Textual's colours
and a table `[roles]`. A value is a colour (`#rrggbb` or one of the 16 names), with `bold`, `dim`,
`italic` or `underline` before it where wanted.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.color import Color, ColorParseError
from rich.errors import StyleSyntaxError
from rich.segment import Segment
from rich.style import Style
from textual.color import Color as TextualColor
from textual.color import ColorParseError as TextualColorParseError
from textual.filter import LineFilter, Monochrome, NoColor
from textual.theme import Theme

from fluxtrain.errors import BadInput
from fluxtrain.events.printable import printable

_NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
DEFAULT_THEME = "flux-dark"
PLAIN_THEME = "sixteen"  # the fewest bytes a colour
COLOURLESS_THEME = "plain"
TEXT_STYLES = frozenset(
    ("none", "bold", "dim", "italic", "underline", "reverse", "strike", "blink", "not")
)
TILE_SHARE = 0.26
SOFT_SHARE = 0.62
ROLES = (
    "text", "strong", "dim", "faint", "track", "title", "accent", "key", "good", "warn", "bad",
    "info", "device", "host", "disk", "flight", "absent", "weights", "frozen", "packed",
    "unpacked", "gradients", "optimizer", "activations", "workspace", "cache", "free", "data",
    "forward", "backward", "update", "other", "stall", "train", "smooth", "evaluation", "axis",
    "selected",
)  # fmt: skip
COLORS = (
    "primary", "secondary", "accent", "foreground", "background", "surface", "panel",
    "success", "warning", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Palette:
    """A style for each role.

    `on:role` is text on a field of the role's colour, `tile:role` the same but quiet, and
    `soft:role` the role's colour drawn back towards the background.
    """

    roles: Mapping[str, Style]
    ground: Color | None = None  # the background, None for the terminal's own
    dark: bool = True
    grounds: Mapping[str, Color] = field(default_factory=dict)  # background, surface, panel
    _cache: dict[str, Style] = field(default_factory=dict, compare=False)

    def style(self, role: str) -> Style:
        """Return the style of a role; unknown roles look like plain text, and `#rrggbb on #rrggbb`
        as it says."""
        if role.startswith("#"):
            return Style.parse(role)
        style = self._cache.get(role)
        if style is None:
            style = Style(bgcolor=self.ground) + self._made(role)
            self._cache[role] = style
        return style

    def over(self, name: str) -> Palette:
        """Return the same roles on another of the theme's backgrounds."""
        ground = self.grounds.get(name)
        return self if ground is None else Palette(self.roles, ground, self.dark, self.grounds)

    def _made(self, role: str) -> Style:
        kind, _, name = role.rpartition(":")
        plain = self.roles.get(name, self.roles.get("text", Style.null()))
        color = plain.color
        if not kind:
            return plain
        if color is None or color.is_default:
            if kind == "soft":
                return plain
            return plain + Style(reverse=True)  # bold and dim still tell neighbours apart
        if kind == "on" or (kind == "tile" and self.ground is None):
            return Style(color=_readable_on(color), bgcolor=color)
        if self.ground is None:
            return plain
        if kind == "tile":
            return Style(color=color, bgcolor=_blended(color, self.ground, TILE_SHARE), bold=True)
        return Style(color=_blended(color, self.ground, SOFT_SHARE))


def _blended(color: Color, ground: Color, share: float) -> Color:
    """Blend `share` of the colour with the background."""
    pairs = zip(color.get_truecolor(), ground.get_truecolor(), strict=True)
    red, green, blue = (round(share * a + (1 - share) * b) for a, b in pairs)
    return Color.from_rgb(red, green, blue)


def _readable_on(fill: Color) -> Color:
    """Return black or white, the one with more contrast on `fill` (WCAG 2.1 relative luminance)."""
    if fill.number is not None and fill.triplet is None:
        return Color.parse("bright_white" if fill.number in (0, 1, 4, 5, 8) else "black")
    red, green, blue = (_linear(part / 255) for part in fill.get_truecolor())
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return Color.parse("#0b0e14" if luminance > 0.179 else "#ffffff")


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)


PLAIN = Palette({})


def wants_no_colour(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user asks for output without colours: https://no-color.org.

    Bold, dim, underlined and reversed text is no colour.
    """
    return bool(environment.get("NO_COLOR"))


GREYS = (Monochrome, NoColor)  # Textual's own answers to NO_COLOR


class Colourless(LineFilter):
    """Removes colours from everything drawn and leaves the other attributes."""

    def apply(self, segments: list[Segment], background: TextualColor) -> list[Segment]:
        """Remove the colours of the segments."""
        return [
            Segment(text, style and _without_colour(style), control)
            for text, style, control in segments
        ]


@lru_cache(maxsize=1024)
def _without_colour(style: Style) -> Style:
    return style.without_color


@dataclass(frozen=True)
class ThemeFile:
    """One theme as loaded."""

    title: str
    theme: Theme
    palette: Palette
    path: Path


def theme_folders(settings_file: Path | None = None) -> list[Path]:
    """Return the folders of themes: the user's beside the settings, the package's, the checkout's.

    The first theme of a name wins, so a user can replace any.
    """
    here = Path(__file__).resolve().parent
    own = [settings_file.parent / "themes"] if settings_file else []
    places = [*own, here / "themes", here.parent / "themes"]
    return [folder for folder in places if os.path.isdir(folder)]


def load_themes(
    folders: Iterable[Path] | None = None,
) -> tuple[dict[str, ThemeFile], list[str]]:
    """Load all readable themes by name; also return a line for each file that is no theme."""
    loaded: dict[str, ThemeFile] = {}
    problems: list[str] = []
    for folder in theme_folders() if folders is None else folders:
        for path in sorted(folder.glob("*.toml")):
            if not os.path.isfile(
                path
            ):  # False without permission too; reading a pipe would never end
                continue
            try:
                theme = read_theme(path)
            except BadInput as error:
                problems.append(str(error))
            else:
                loaded.setdefault(theme.theme.name, theme)
    return loaded, problems


def read_theme(path: Path) -> ThemeFile:
    """Read the theme in `path`; BadInput names the fault and its place."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput(f"theme {path.name} cannot be read: {error}") from error
    named = str(table.get("name", path.stem))
    if not _NAME.fullmatch(named):
        raise BadInput(f"theme {path.name}: a name is letters, digits, '-' and '_', not {named!r}")
    colors, roles = table.get("colors", ()), table.get("roles", ())
    variables = table.get("variables", {})
    if not all(isinstance(part, dict) for part in (colors, roles, variables)):
        raise BadInput(
            f"theme {path.name} needs the tables [colors] and [roles], and [variables] if any"
        )
    for wanted, given, name in ((COLORS, colors, "colors"), (ROLES, roles, "roles")):
        missing = [key for key in wanted if key not in given]
        if missing:
            raise BadInput(f"theme {path.name} lacks {', '.join(missing)} in [{name}]")
    ansi = bool(table.get("ansi", False))
    chosen = {key: _textual_color(path, key, colors[key], ansi) for key in COLORS}
    names = () if ansi else ("background", "surface", "panel")
    grounds = {name: _ground(path, name, chosen[name]) for name in names}
    palette = Palette(
        _styles(path, roles), grounds.get("background"), bool(table.get("dark", True)), grounds
    )
    theme = Theme(
        name=named,
        dark=palette.dark,
        ansi=ansi,
        variables=_variables(path, variables),
        primary=chosen["primary"],
        secondary=chosen["secondary"],
        accent=chosen["accent"],
        foreground=chosen["foreground"],
        background=chosen["background"],
        surface=chosen["surface"],
        panel=chosen["panel"],
        success=chosen["success"],
        warning=chosen["warning"],
        error=chosen["error"],
    )
    return ThemeFile(printable(str(table.get("title", named))), theme, palette, path)


def _styles(path: Path, roles: dict[str, Any]) -> dict[str, Style]:
    styles = {}
    for role, value in roles.items():
        try:
            styles[role] = Style.parse(str(value))
        except (StyleSyntaxError, ColorParseError) as error:
            raise BadInput(f"theme {path.name}, role {role}: {error}") from error
        if styles[role].link is not None:
            raise BadInput(f"theme {path.name}, role {role}: a link is no colour")
    return styles


def _ground(path: Path, key: str, value: str) -> Color:
    """Return a background colour; others are blended with it, so it needs red, green and blue."""
    try:
        return Color.parse(value)
    except ColorParseError as error:
        raise BadInput(f"theme {path.name}, color {key}: {error}") from error


def _variables(path: Path, given: dict[str, Any]) -> dict[str, str]:
    """Return colours and text styles by the names of Textual's variables. Anything else could
    break the style sheet."""
    for name, value in given.items():
        if not _NAME.fullmatch(name):
            raise BadInput(f"theme {path.name}: {name!r} is no variable")
        if not TEXT_STYLES.issuperset(str(value).split()):
            _textual_color(path, name, value, False)
    return {name: str(value) for name, value in given.items()}


def _textual_color(path: Path, key: str, value: object, ansi: bool) -> str:
    text = f"ansi_{value}" if ansi and not str(value).startswith("#") else str(value)
    try:
        TextualColor.parse(text)
    except TextualColorParseError as error:
        raise BadInput(f"theme {path.name}, color {key}: {error}") from error
    return text
