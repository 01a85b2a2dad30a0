"""`fluxtrain compare`: rows over seeds, changes against the base, and lines that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.commands.compare import compared, draw, read_lines, table
from fluxtrain.errors import BadInput


def _line(method: str, seed: int, ppl: float, rate: float, ranks: int = 2, **more: Any) -> Any:
    return {
        "compress_method": method, "compress_config": {}, "world_size": ranks, "seed": seed,
        "tokens_per_s": rate, "step_time_ms_p50": 10.0, "val_ppl": ppl, "comm_ratio": 0.4,
        "compression_ratio": 1.9 if method == "int8" else None, "timing_valid": True,
        "losses": [[1, 0.5, 3.0], [2, 1.0, 2.0]], "evaluations": [[2, 1.0, 2.1]], **more,
    }  # fmt: skip


def test_seeds_make_a_row_that_is_compared_with_bf16_on_as_many_ranks() -> None:
    lines = [
        *(_line("int8", seed, 10.0 + seed, 120.0) for seed in range(3)),
        *(_line("bf16", seed, 10.0, 100.0) for seed in range(3)),
        _line("none", 0, 9.0, 50.0),
        _line("bf16", 0, 10.0, 62.5, ranks=1),
    ]
    rows = {(row.method, row.ranks): row for row in compared(lines)}
    row = rows["int8", 2]
    assert (row.seeds, row.val_ppl, row.val_ppl_spread) == (3, 11.0, 1.0)
    assert row.ppl_change == pytest.approx(0.1)
    assert row.speed_change == pytest.approx(0.2)
    assert rows["bf16", 2].scaling == pytest.approx(0.8)
    assert rows["int8", 2].scaling is None  # was not run on one rank
    text = table(list(rows.values()))
    assert "+10.00%" in text
    assert "fewer than 3 seeds" in text
    assert "gloo" not in text


def test_options_of_a_method_make_another_row() -> None:
    lines = [_line("topk", 0, 9.0, 1.0), _line("topk", 0, 9.0, 1.0, compress_config={"ratio": 0.1})]
    assert [row.method for row in compared(lines)] == ["topk", 'topk {"ratio": 0.1}']


def test_folders_and_files_are_read_and_others_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(_line("int8", 0, 9.0, 1.0)) + "\n")
    assert read_lines([path]) == read_lines([tmp_path])
    for text, words in (
        ("", "has no line"), ("{\n", "line 1 is no JSON"), ("3\n", "lacks compress_method"),
        ('{"seed": 1}\n', "lacks compress_method, world_size, tokens_per_s"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(BadInput, match=words):
            read_lines([path])
    for none in (tmp_path / "none.jsonl", Path("/dev/zero")):
        with pytest.raises(BadInput, match="name a run folder"):
            read_lines([none])


def test_a_file_without_a_line_is_told_beside_others(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(_line("int8", 0, 9.0, 1.0)) + "\n")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(BadInput, match=r"empty\.jsonl has no line"):
        read_lines([tmp_path, tmp_path / "empty.jsonl"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("losses", 3), ("losses", [[1, 2]]), ("evaluations", [["a", 1, 2]]), ("world_size", "two"),
        ("world_size", 0), ("seed", [1]), ("tokens_per_s", "x"), ("compress_config", 1),
    ],
)  # fmt: skip
def test_values_of_another_kind_are_refused_with_their_key(
    tmp_path: Path, key: str, value: object
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({**_line("int8", 0, 9.0, 1.0), key: value}) + "\n")
    with pytest.raises(BadInput, match=rf"line 1 is not one that a run wrote .*\.{key}.*remove"):
        read_lines([path])


def test_plots_that_cannot_be_written_name_their_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (taken := tmp_path / "plots").touch()
    with pytest.raises(BadInput, match="plots cannot be written .*name another folder"):
        draw([_line("int8", 0, 9.0, 1.0)], taken)


def test_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [_line("int8", 0, 9.0, 1.0), _line("bf16", 0, 9.0, 1.0, compression_ratio=1.0)]
    for path in draw(lines, tmp_path / "plots"):
        assert b"<svg" in path.read_bytes()
