"""Names of files and classes for people to read; a file may be called anything."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path


def one_line(name: str) -> str:
    r"""Writes line breaks, other control characters, and bytes that are no text as escapes: ``\n``, ``\xff``."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(name: str, most: int) -> str:
    """Makes a name fit on one line; of a long one the end is kept, which tells the files of a folder apart.

    Args:
        name: A path or the name of a class.
        most: Number of characters to keep.
    """
    line = one_line(name)
    return line if len(line) <= most else f"…{line[len(line) - most + 1 :]}"


def in_markdown(name: str) -> str:
    """Escapes what Markdown would take for markup, also in the cell of a table."""
    return re.sub(r"([\\`*_{}\[\]<>#|!~$&])", r"\\\1", one_line(name))


def unused(path: Path) -> Path:
    """Adds ``-1``, ``-2`` and so on to a name until nothing has it, so that nothing is written over."""
    free, number = path, 0
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Returns ``median (least to largest)``, the median first so that columns line up.

    Args:
        values: Measured in several rounds.
        digits: Digits behind the point.
    """
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
