"""File and class names, tables, measured values and free paths."""

from pathlib import Path

from vit_finetune.formatting import escape_markdown, free_path, markdown_table, median_range, one_line, shorten


def test_one_line_and_shorten() -> None:
    assert one_line("photos/b\udcff\n猫.png") == r"photos/b\xff\n猫.png"
    assert shorten("photos/train/cat/0001.png", 12) == "…at/0001.png" and shorten("cat", 12) == "cat"


def test_markdown_shows_names_as_they_are() -> None:
    assert escape_markdown("a|b_c <i> 猫\n") == r"a\|b\_c \<i\> 猫\\n"
    table = markdown_table(("class", "images"), [(escape_markdown("a|b"), "3"), ("c", "4")])
    assert table.split("\n") == ["| class | images |", "| --- | --- |", r"| a\|b | 3 |", "| c | 4 |"]


def test_median_range() -> None:
    assert median_range([3.0, 1.0, 2.24], 1) == "2.2 (1.0 to 3.0)" and median_range([5]) == "5 (5 to 5)"


def test_free_path(tmp_path: Path) -> None:
    for name in ("table.csv", "table-1.csv", "both.jsonl"):
        (tmp_path / name).touch()
    assert free_path(tmp_path / "table.csv") == tmp_path / "table-2.csv"
    assert free_path(tmp_path / "new.csv") == tmp_path / "new.csv"
    assert free_path(tmp_path / "both", (".csv", ".jsonl")) == tmp_path / "both-1"
