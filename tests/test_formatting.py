"""Names that a file or a class may have."""

from vit_finetune.formatting import escape_markdown, one_line, shorten


def test_one_line_whose_end_is_kept() -> None:
    assert one_line("photos/b\udcff\n猫.png") == r"photos/b\xff\n猫.png"
    assert shorten("photos/train/cat/0001.png", 12) == "…at/0001.png" and shorten("cat", 12) == "cat"


def test_markdown_shows_names_as_they_are() -> None:
    assert escape_markdown("a|b_c <i> 猫\n") == r"a\|b\_c \<i\> 猫\\n"
