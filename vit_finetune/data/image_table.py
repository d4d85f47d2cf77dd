"""Your own images, listed in a CSV or Parquet table."""

import csv
import math
import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from vit_finetune.data.file_listing import try_files
from vit_finetune.data.image_files import ImageFiles
from vit_finetune.data.splits import ALL, SPLITS, Splits, sort_classes, split_of
from vit_finetune.formatting import list_lines, shorten

PARQUET = b"PAR1"  # the first bytes of every Parquet file
LONGEST = 100  # characters of a value in a message
INSTALL = "pip install 'vit_finetune[hf]'"


class Table(NamedTuple):
    """Content of a table, as text."""

    columns: list[str]
    """All columns that the table has."""
    read: list[str]
    """The columns of ``rows``."""
    rows: list[tuple[str, list[str]]]
    """For each row its place, such as ``line 3``, and its fields."""


class Row(NamedTuple):
    """A row of the table."""

    place: str
    path: str
    label: str
    """Empty if the labels are not read."""
    split: str
    """``train``, ``val``, ``test`` or ``all``."""
    problem: str | None
    """Why it cannot be used."""


class ImageTable(ImageFiles):
    """Images with their labels in a table, a CSV or Parquet file.

    The columns are image, the path of the file; label, the name or number of the class; and, if you have splits, split,
    such as train, val or test. Without val rows, validation images are split from train. Without test rows, the command
    test uses the validation images and logs that. Without the column split, the rows are split at random.

    The whole table is checked before the first image is opened. ``predict`` needs no labels: it reads the test rows; if
    there are none, the val rows or else all.

    Args:
        table: CSV file in UTF-8, separated by commas, semicolons or tabs, or Parquet file.
        image_column: Column of the paths, absolute or relative to the table's folder.
        label_column: Column of the classes.
        split_column: Column of the splits; not needed if it has the default name.
        kwargs: Options of every data module of image files, see :class:`ImageFiles`.
    """

    def __init__(
        self,
        table: str = "labels.csv",
        image_column: str = "image",
        label_column: str = "label",
        split_column: str = "split",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table = Path(table)
        self.image_column, self.label_column, self.split_column = image_column, label_column, split_column

    @property
    @override
    def title(self) -> str:
        return f"--data.table {self.table}"

    @override
    def unavailable_reason(self) -> str | None:
        if not self.table.is_file():
            return f"{self.title} {'is not a file' if self.table.exists() else 'does not exist'}."
        if _is_parquet(self.table) and find_spec("pyarrow") is None:
            return f"{self.title} is a Parquet file, which needs the package pyarrow: {INSTALL}."
        return None

    @override
    def prepare_data(self) -> None:
        if problem := self.unavailable_reason():
            raise MisconfigurationException(problem)

    @override
    def list_splits(self) -> Splits:
        splits: Splits = {}
        for row in self.rows(labeled=True):
            splits.setdefault(row.split, {}).setdefault(row.label, []).append(row.path)
        return {
            split: {label: splits[split][label] for label in sort_classes(splits[split])}
            for split in (*SPLITS, ALL)
            if split in splits
        }

    @override
    def list_unlabeled(self) -> list[str]:
        rows = self.rows(labeled=False)
        splits = {row.split for row in rows}
        chosen = next(({split} for split in ("test", "val") if split in splits), splits)
        return [row.path for row in rows if row.split in chosen]

    def rows(self, labeled: bool) -> list[Row]:
        """Read and check the table.

        Args:
            labeled: Read the labels.

        Raises:
            MisconfigurationException: A column is missing, or some rows cannot be used; all of them are named.
        """
        needed = [self.image_column, self.label_column] if labeled else [self.image_column]
        needed += [self.split_column] if self.split_column != "split" else []
        read = _read_parquet if _is_parquet(self.table) else _read_csv
        table = read(self.table, [*needed, self.split_column])
        if missing := [name for name in needed if name not in table.columns]:
            raise MisconfigurationException(
                f"{self.title} has no column {', '.join(missing)}. Its columns are {', '.join(table.columns)}; choose "
                "among them with --data.image_column, --data.label_column and --data.split_column."
            )
        if not table.rows:
            raise MisconfigurationException(f"{self.title} has no rows.")
        rows = [self._row(place, fields, table.read, labeled) for place, fields in table.rows]
        if problems := list(self._problems(rows)):
            known = self.known_classes
            if labeled and known:  # alone, they are reported with the split, or by check-data
                problems += [f"{row.place}: unknown class {row.label}" for row in rows if row.label not in ("", *known)]
            raise MisconfigurationException(f"{self.title}: {len(problems)} rows cannot be used:{list_lines(problems)}")
        return rows

    def _row(self, place: str, fields: list[str], columns: list[str], labeled: bool) -> Row:
        named = dict(zip(columns, fields, strict=False))
        image, label = named.get(self.image_column, ""), named.get(self.label_column, "") if labeled else ""
        split = split_of(named[self.split_column]) if self.split_column in named else ALL
        problem = None
        if len(fields) < len(columns) or any(fields[len(columns) :]):
            problem = f"{len(fields)} fields for {len(columns)} columns"
        elif not image:
            problem = f"the {self.image_column} is empty"
        elif labeled and not label:
            problem = f"the {self.label_column} is empty"
        elif split is None:
            problem = f"unknown split {shorten(named[self.split_column], LONGEST)!r}; expected train, val or test"
        return Row(place, str(self.table.parent / image), label, split or "", problem)

    def _problems(self, rows: list[Row]) -> Iterator[str]:
        """Find rows that cannot be used; ``--data.skip_broken`` skips missing files like those that are broken."""
        paths = [row.path for row in rows]
        found = repeat(True) if self.skip_broken else try_files(os.path.isfile, paths, "files found")
        first: dict[str, Row] = {}
        for row, exists in zip(rows, found, strict=False):
            same = first.setdefault(row.path, row)
            if row.problem:
                yield f"{row.place}: {row.problem}"
            elif not exists:
                yield f"{row.place}: {shorten(row.path, LONGEST)} is not a file"
            elif same.label != row.label and not same.problem:
                path = shorten(row.path, LONGEST)
                yield f"{row.place}: {path} has the label {row.label}, but {same.label} on {same.place}"


def _is_parquet(file: Path) -> bool:
    with open(file, "rb") as stream:
        return stream.read(len(PARQUET)) == PARQUET


def _read_csv(file: Path, wanted: list[str]) -> Table:
    """Read a CSV file; the delimiter is the most frequent one in the header that yields the first wanted column."""
    # Like file names, bytes that are not UTF-8 are kept.
    with open(file, newline="", encoding="utf-8-sig", errors="surrogateescape") as stream:
        header = stream.readline()
        if "\0" in header or not header.strip():
            what = "is neither a CSV file in UTF-8 nor a Parquet file" if header.strip() else "is empty"
            raise MisconfigurationException(f"--data.table {file} {what}.")
        frequent = sorted(",;\t", key=header.count, reverse=True)
        delimiter = next((mark for mark in frequent if wanted[0] in _fields(header, mark)), frequent[0])
        stream.seek(0)
        reader = csv.reader(stream, delimiter=delimiter, skipinitialspace=True)
        try:
            lines = [(f"line {reader.line_num}", [field.strip() for field in fields]) for fields in reader]
        except csv.Error as error:
            raise MisconfigurationException(f"--data.table {file}, line {reader.line_num}: {error}.") from error
    columns = lines[0][1]
    return Table(columns, columns, [(place, fields) for place, fields in lines[1:] if any(fields)])


def _fields(line: str, delimiter: str) -> list[str]:
    return [field.strip() for field in next(csv.reader([line], delimiter=delimiter, skipinitialspace=True))]


def _read_parquet(file: Path, wanted: list[str]) -> Table:
    """Read the wanted columns of a Parquet file."""
    import pyarrow.parquet
    from pyarrow import types

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        schema = parquet.schema_arrow
        names = [name for name in schema.names if name in wanted]
        for name in names:
            kind = schema.field(name).type
            if types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind):
                raise MisconfigurationException(
                    f"--data.table {file}: the column {name} holds {kind}, not text or numbers. If the images are "
                    f"stored in the Parquet file itself: --data HuggingFace --data.path {file.parent}."
                )
        data = parquet.read(columns=names)
    except (OSError, ValueError, NotImplementedError) as error:  # those of pyarrow are derived from them
        raise MisconfigurationException(f"--data.table {file} cannot be read: {error}") from error
    columns = [[_text(value) for value in data.column(name).to_pylist()] for name in names]
    return Table(
        schema.names, names, [(f"row {i}", list(fields)) for i, fields in enumerate(zip(*columns, strict=True))]
    )


def _text(value: object) -> str:
    """Return a value as in a CSV file; integers that pandas has stored as floats because some are missing, as such."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.15g}"
    return "" if value is None else str(value).strip()
