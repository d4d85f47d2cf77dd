"""Text for people: file and class names, Markdown tables, measured values, free file names."""

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path


def one_line(name: str) -> str:
    r"""Escape line breaks, control characters and bytes that are not text, as ``\n`` or ``\xff``."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(name: str, length: int) -> str:
    """Shorten a name to fit on one line, keeping its end, which distinguishes the files of a folder.

    Args:
        name: A path or the name of a class.
        length: Maximum number of characters.
    """
    line = one_line(name)
    return line if len(line) <= length else f"…{line[len(line) - length + 1 :]}"


def list_lines(lines: Sequence[str]) -> str:
    """Return the first 20 lines, indented, and the number of the others, to be appended to a message."""
    listed = "".join(f"\n  {line}" for line in lines[:20])
    return listed + (f"\n  and {len(lines) - 20} more" if len(lines) > 20 else "")


def escape_markdown(name: str) -> str:
    """Escape Markdown markup, also for use in a table cell."""
    return re.sub(r"([\\`*_{}\[\]<>#|!~$&])", r"\\\1", one_line(name))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without a final line break; cells must not hold line breaks or unescaped pipes."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def median_range(values: Sequence[float], digits: int = 0) -> str:
    """Return ``median (min to max)``; the range shows how far single values on a shared machine can be trusted.

    Args:
        values: Measured in several rounds.
        digits: Number of decimal places.
    """
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def free_path(path: Path, suffixes: Sequence[str] = ("",)) -> Path:
    """Return the first of ``path``, ``path-1``, ``path-2``, ... that does not exist, so that nothing is overwritten.

    Args:
        path: The preferred path; a number is inserted before its suffix.
        suffixes: Appended to the name; none of the resulting files may exist.
    """
    free, number = path, 0
    while any(free.with_name(free.name + suffix).exists() for suffix in suffixes):
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free
