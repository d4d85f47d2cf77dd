"""The files of :class:`PredictionWriter`: they grow batch by batch, and those of several processes are merged."""

import csv
import glob
import heapq
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

SUFFIXES = (".csv", ".jsonl")
ENCODER = json.JSONEncoder(ensure_ascii=False)  # json.dumps would build one per row


class Row(NamedTuple):
    """Prediction for one image: classes in order of probability, or the reason why the file cannot be read."""

    position: int
    """In the dataset."""
    path: str
    top: list[tuple[str, float]]
    error: str | None


class PredictionTables:
    """Two new files, ``stem.csv`` and ``stem.jsonl``, with one row per image; probabilities have six decimal places.

    Args:
        stem: Path without suffix; missing folders are created.
        top_k: Number of classes per row.
        with_position: Start each row of the CSV with the image's position in the dataset, for :func:`merge_into`.

    Raises:
        OSError: A file cannot be created, or already exists.
    """

    def __init__(self, stem: Path, top_k: int, with_position: bool = False) -> None:
        self.files = table_files(stem)
        self.rows = self.unreadable = 0
        self._with_position = with_position
        self._blank = [""] * (2 * top_k)
        table, lines = self.files
        table.parent.mkdir(parents=True, exist_ok=True)
        self._streams = open(table, "x", newline="", encoding="utf-8"), open(lines, "x", encoding="utf-8")
        self._csv = csv.writer(self._streams[0])
        more = [f"{name}_{number}" for number in range(2, top_k + 1) for name in ("class", "probability")]
        header = ["path", "class", "probability", *more, "error"]
        self._csv.writerow(["position", *header] if with_position else header)
        self.flush()

    def add(self, row: Row) -> None:
        """Add an image; :meth:`flush` makes it visible."""
        numbers = [f"{probability:.6f}" for _, probability in row.top]
        names = [name for name, _ in row.top]
        cells = [cell for pair in zip(names, numbers, strict=True) for cell in pair] or self._blank
        top = [{"class": c, "probability": float(p)} for c, p in zip(names, numbers, strict=True)]
        best = top[0] if top else {"class": None, "probability": None}
        line = ENCODER.encode({"path": row.path, **best, "top": top, "error": row.error})
        position = [str(row.position)] if self._with_position else []
        self.copy([*position, row.path, *cells, row.error or ""], line + "\n")

    def copy(self, cells: list[str], line: str) -> None:
        """Add an image as a row of the CSV and a line of JSON."""
        self._csv.writerow(cells)
        self._streams[1].write(line)
        self.rows += 1
        self.unreadable += bool(cells[-1])

    def flush(self) -> None:
        """Hand all rows to the operating system, where they survive the end of this process."""
        for path, stream in zip(self.files, self._streams, strict=True):
            try:
                stream.flush()
            except OSError as error:  # such as a full disk; the system does not name the file
                raise OSError(error.errno, error.strerror, str(path)) from error

    def close(self) -> None:
        """Close the files."""
        for stream in self._streams:
            with suppress(OSError):  # of a flush that failed before
                stream.close()


def table_files(stem: Path) -> tuple[Path, Path]:
    """Return the paths of the CSV and of the JSON lines."""
    csv_suffix, jsonl_suffix = SUFFIXES
    return stem.with_name(stem.name + csv_suffix), stem.with_name(stem.name + jsonl_suffix)


def merge_into(tables: PredictionTables, parts: Sequence[Path]) -> None:
    """Merge the rows of several processes in the order of the dataset, in constant memory.

    Args:
        tables: Receives each image once, also if processes that compute the same images together have all written it.
        parts: Path without suffix of each process's files, which have positions.
    """
    rows = heapq.merge(*map(_read, parts), key=itemgetter(0))
    for _, same in groupby(rows, key=itemgetter(0)):
        _, cells, line = next(same)
        tables.copy(cells, line)
    tables.flush()


def _read(part: Path) -> Iterator[tuple[int, list[str], str]]:
    """Yield position, cells and JSON line of each row."""
    table, lines = table_files(part)
    with open(table, newline="", encoding="utf-8") as cells, open(lines, encoding="utf-8") as json_lines:
        rows = csv.reader(cells)
        next(rows)
        for row, line in zip(rows, json_lines, strict=True):
            yield int(row[0]), row[1:], line


def free_partial(stem: Path) -> tuple[Path, list[Path], int]:
    """Find a name for growing files beside those of interrupted runs, which must stay as they are.

    Args:
        stem: Path of the finished files without suffix.

    Returns:
        ``stem.partial``, ``stem-1.partial`` or the first later one that is free; the CSV files under the earlier
        names; and the number of images in them.
    """
    partial, number = stem.with_name(f"{stem.name}.partial"), 0
    interrupted: list[Path] = []
    while files := sorted(partial.parent.glob(f"{glob.escape(partial.name)}.*")):
        interrupted += files
        number += 1
        partial = stem.with_name(f"{stem.name}-{number}.partial")
    rows = sum(_count_lines(path) for path in interrupted if path.suffix == ".jsonl")
    return partial, [path for path in interrupted if path.suffix == ".csv"], rows


def _count_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(line.endswith(b"\n") for line in file)
