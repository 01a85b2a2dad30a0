"""Themes: complete, readable, and a bad one never stops the app."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.color import Color
from rich.style import Style

from fluxtrain.errors import BadInput
from fluxtui.themes import (
    COLORS,
    DEFAULT_THEME,
    ROLES,
    Palette,
    load_themes,
    read_theme,
    theme_folders,
)

THEMES, PROBLEMS = load_themes()


def test_the_themes_that_come_along_are_all_readable() -> None:
    assert PROBLEMS == []
    assert DEFAULT_THEME in THEMES and len(THEMES) >= 4
    assert any(not theme.palette.dark for theme in THEMES.values())
    assert any(theme.theme.ansi for theme in THEMES.values())


@pytest.mark.parametrize("name", THEMES)
def test_a_theme_has_a_style_for_every_role(name: str) -> None:
    palette = THEMES[name].palette
    assert set(palette.roles) >= set(ROLES)
    for role in ROLES:
        for kind in ("", "on:", "tile:", "soft:"):
            assert palette.style(f"{kind}{role}") is palette.style(f"{kind}{role}")


def luminance(color: Color) -> float:
    def linear(part: float) -> float:
        return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(part / 255) for part in color.get_truecolor())
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(style: Style) -> float:
    assert style.color is not None and style.bgcolor is not None
    bright, dark = sorted((luminance(style.color), luminance(style.bgcolor)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


TRUE_COLOURS = [name for name, theme in THEMES.items() if not theme.theme.ansi]
READ = ("text", "strong", "dim", "title", "key", "good", "warn", "bad", "info", "host", "device")


@pytest.mark.parametrize("name", TRUE_COLOURS)
@pytest.mark.parametrize("role", READ)
def test_what_is_read_stands_out_from_its_ground(name: str, role: str) -> None:
    assert contrast(THEMES[name].palette.style(role)) >= 4.5 - 0.3 * (role == "dim")


@pytest.mark.parametrize("name", TRUE_COLOURS)
@pytest.mark.parametrize("role", ["weights", "activations", "forward", "backward", "optimizer"])
def test_labels_inside_bars_are_readable(name: str, role: str) -> None:
    assert contrast(THEMES[name].palette.style(f"on:{role}")) >= 3.5


def test_sixteen_colours_are_left_to_the_terminal() -> None:
    theme = THEMES["sixteen"]
    assert theme.palette.ground is None
    for role, style in theme.palette.roles.items():
        for color in (style.color, style.bgcolor):
            assert color is None or color.is_default or color.number is not None, role


def text_with(changes: dict[str, str | None]) -> str:
    lines = (Path(THEMES[DEFAULT_THEME].path)).read_text().splitlines()
    kept = []
    for row in lines:
        key = row.split("=")[0].strip()
        if key in changes:
            if changes[key] is not None:
                kept.append(f"{key} = {changes[key]}")
        else:
            kept.append(row)
    return "\n".join(kept)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not toml = = =", "cannot be read"),
        ("name = 'x'", "[colors] and [roles]"),
        ("variables = 3\n" + text_with({}), "[variables]"),
        (text_with({"axis": None}), "lacks axis in [roles]"),
        (text_with({"primary": None}), "lacks primary in [colors]"),
        (text_with({"axis": "'#nocolour'"}), "role axis"),
        (text_with({"primary": "'#nocolour'"}), "color primary"),
    ],
)
def test_a_bad_file_is_reported_and_the_others_load(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    (tmp_path / "good.toml").write_text(Path(THEMES[DEFAULT_THEME].path).read_text())
    loaded, problems = load_themes([tmp_path])
    assert list(loaded) == [DEFAULT_THEME]
    assert len(problems) == 1 and "bad.toml" in problems[0] and said in problems[0]


def test_a_file_that_is_no_text_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match=r"binary\.toml"):
        read_theme(tmp_path / "binary.toml")


def test_an_earlier_folder_wins(tmp_path: Path) -> None:
    text = Path(THEMES[DEFAULT_THEME].path).read_text()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.toml").write_text(text.replace("Flux dark", name))
    loaded, _ = load_themes([tmp_path / "first", tmp_path / "second"])
    assert loaded[DEFAULT_THEME].title == "first"
    assert all(folder.is_dir() for folder in theme_folders())


def test_an_unknown_role_looks_like_text() -> None:
    palette = Palette({"text": Style.parse("red")})
    assert palette.style("no such role") == palette.style("text")
    assert len(COLORS) == len(set(COLORS)) and len(ROLES) == len(set(ROLES))
