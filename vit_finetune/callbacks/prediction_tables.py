"""The files of :class:`PredictionWriter`: they grow batch by batch, and those of several processes are merged."""

import csv
import glob
import heapq
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TextIO

SUFFIXES = (".csv", ".jsonl")
ENCODE = json.JSONEncoder(ensure_ascii=False).encode


class PredictionTables:
    """Two new files, ``stem.csv`` and ``stem.jsonl``, with one row per image; probabilities have six decimal places.

    Args:
        stem: Path without suffix; missing folders are created.
        classes: Names of all classes.
        top_k: Number of classes per row.
        with_position: Start each row of the CSV with the image's position in the dataset, for :func:`merge_into`.

    Raises:
        OSError: A file cannot be created, or already exists.
    """

    def __init__(self, stem: Path, classes: Sequence[str], top_k: int, with_position: bool = False) -> None:
        self.files = table_files(stem)
        self.rows = self.unreadable = 0
        self._with_position = with_position
        self._classes = classes
        self._json_classes = [f'{{"class": {ENCODE(name)}, "probability": ' for name in classes]
        self._numbers = " ".join(["%.6f"] * top_k)
        self._blank = [""] * (2 * top_k)
        table, lines = self.files
        table.parent.mkdir(parents=True, exist_ok=True)
        self._streams = table.open("x", newline="", encoding="utf-8"), lines.open("x", encoding="utf-8")
        self._waiting = io.StringIO(newline=""), io.StringIO()
        self._csv = csv.writer(self._waiting[0])
        more = [f"{name}_{number}" for number in range(2, top_k + 1) for name in ("class", "probability")]
        header = ["path", "class", "probability", *more, "error"]
        self._csv.writerow(["position", *header] if with_position else header)
        self.flush()

    def add(
        self, position: int, path: str, labels: list[int], probabilities: list[float], error: str | None = None
    ) -> None:
        """Add an image; :meth:`flush` makes it visible.

        Args:
            position: In the dataset.
            path: Of the file, as text.
            labels: The most probable classes, ``top_k`` of them in order.
            probabilities: One for each of ``labels``.
            error: The reason why the file cannot be read; such a row has no classes.
        """
        # A JSON encoder would take longer than all the rest of a row.
        if error is None:
            numbers = (self._numbers % tuple(probabilities)).replace("nan", "NaN").split()  # as JSON writes it
            cells = self._blank.copy()
            cells[::2], cells[1::2] = [self._classes[label] for label in labels], numbers
            top = [f"{self._json_classes[label]}{number}}}" for label, number in zip(labels, numbers, strict=True)]
            first, reason = top[0][1:-1], "null"
        else:
            cells, top = self._blank, []
            first, reason = '"class": null, "probability": null', ENCODE(error)
        line = f'{{"path": {ENCODE(path)}, {first}, "top": [{", ".join(top)}], "error": {reason}}}\n'
        start = [str(position), path] if self._with_position else [path]
        self.copy([*start, *cells, error or ""], line)

    def copy(self, cells: list[str], line: str) -> None:
        """Add an image as a row of the CSV and a line of JSON."""
        self._csv.writerow(cells)
        self._waiting[1].write(line)
        self.rows += 1
        self.unreadable += bool(cells[-1])

    def flush(self) -> None:
        """Hand all rows to the operating system, where they survive the end of this process."""
        for path, stream, waiting in zip(self.files, self._streams, self._waiting, strict=True):
            _append(path, stream, waiting.getvalue())
            waiting.seek(0)
            waiting.truncate()

    def close(self) -> None:
        """Close the files."""
        for stream in self._streams:
            with suppress(OSError):  # the same as in a flush that failed before
                stream.close()


def _append(path: Path, stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:  # such as a full disk; the system does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from error


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
        if tables.rows % 1000 == 0:
            tables.flush()
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
