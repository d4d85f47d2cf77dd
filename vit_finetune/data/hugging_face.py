"""Datasets of the Hugging Face hub, and local folders in their formats."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from vit_finetune.data import hub
from vit_finetune.data.decode import EncodedImage, Source
from vit_finetune.data.image_files import ImageFiles
from vit_finetune.data.splits import ALL, SPLITS, Splits, sort_classes, spellings, split_of
from vit_finetune.errors import ImageDecodeError

if TYPE_CHECKING:
    from datasets import Dataset, Features

LABEL_TYPES = ("int", "uint", "string", "large_string", "bool")


@dataclass(frozen=True)
class RowReader:
    """Function from the name of an image, such as ``train/000012``, to its encoded content or the path of its file.

    Attributes:
        rows: The dataset of each split; memory-mapped, so that rows are read from the disk when they are needed.
        column: The images, as dictionaries of ``bytes`` and ``path``.
    """

    rows: "dict[str, Dataset]"
    column: str

    def __call__(self, name: str) -> Source:
        """Return the image of a row.

        Raises:
            ImageDecodeError: The row has no image.
        """
        split, _, position = name.rpartition("/")
        image = self.rows[split][int(position)][self.column] or {}
        if image.get("bytes") is not None:
            return EncodedImage(name, image["bytes"])
        if image.get("path"):
            return str(image["path"])
        raise ImageDecodeError(f"{name!r}: the row has no image")


class HuggingFace(ImageFiles):
    """A dataset of the Hugging Face hub, or a local folder that the datasets library can read.

    The columns of images and labels are found by their types, Image and ClassLabel; a column label of strings or
    integers works, too. The splits are named as usual, such as train, validation and test. Without a validation split,
    validation images are split from train. Without a test split, or if it has no labels, the command test uses the
    validation images and logs that. A dataset that is not split is split at random. Images are named after split and
    row, such as train/000012.

    Images stay encoded in a file on the disk, and are read from there when they are needed. ``predict`` needs no
    labels: it reads the test split; if there is none, the validation split or else all.

    Args:
        path: Name on the hub, such as ethz/food101, or a folder: of Parquet files, of images, or as written by
            Dataset.save_to_disk.
        name: Configuration of the dataset, if it has several.
        image_column: Column of the images, if there are several, or if they are bytes or paths of another type.
        label_column: Column of the labels, if there are several, or if it has another name and type.
        kwargs: Options of every data module of image files, see :class:`ImageFiles`.
    """

    def __init__(
        self,
        path: str = "data",
        name: str | None = None,
        image_column: str | None = None,
        label_column: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path, self.config_name = path, name
        self.image_column, self.label_column = image_column, label_column
        self._rows: dict[str, Dataset] | None = None

    @property
    @override
    def title(self) -> str:
        return f"--data.path {self.path}"

    @override
    def unavailable_reason(self) -> str | None:
        return None if self._rows else hub.unavailable_reason(self.path, self.config_name)

    @override
    def prepare_data(self) -> None:
        """Download the dataset, if it is not in the cache."""
        if problem := self.unavailable_reason():
            raise MisconfigurationException(problem)
        self._open()

    @override
    def list_splits(self) -> Splits:
        rows = self._open()
        features = next(iter(rows.values())).features
        column = _find_column(self.title, features, "label", self.label_column)
        self.declared_classes = getattr(features[column], "names", None)
        splits: Splits = {}
        for split, source in self._sources().items():
            labels = _read_labels(rows[source], column, self.declared_classes)
            unlabeled = labels.count(None)
            if unlabeled == len(labels) and split in ("val", "test"):
                rank_zero_info(f"{self.title}: the split {source} has no labels; only predict uses it.")
                continue
            if unlabeled:
                raise MisconfigurationException(
                    f"{self.title}: {unlabeled} of {len(labels)} rows of the split {source} have no label (null or -1 "
                    f"in the column {column}). Remove them, or set --data.label_column; only predict needs no labels."
                )
            classes: dict[str, list[str]] = {}
            for name, label in zip(_names(rows[source], source), labels, strict=True):
                classes.setdefault(str(label), []).append(name)
            order = self.declared_classes or sort_classes(classes)
            splits[split] = {label: classes[label] for label in order if label in classes}
        return splits

    @override
    def list_unlabeled(self) -> list[str]:
        rows, sources = self._open(), self._sources()
        chosen = [sources[split] for split in ("test", "val") if split in sources][:1] or list(sources.values())
        return [name for source in chosen for name in _names(rows[source], source)]

    def _open(self) -> "dict[str, Dataset]":
        """Open the dataset, after a download if necessary, and return its splits by the names that they have in it."""
        if self._rows is None:
            loaded = hub.load(self.path, self.config_name)
            splits = loaded if isinstance(loaded, dict) else {str(loaded.split or ALL): loaded}
            rows = {name: split.with_format(None) for name, split in splits.items() if len(split)}
            if not rows:
                raise MisconfigurationException(f"{self.title} has no rows.")
            column = _find_column(self.title, next(iter(rows.values())).features, "image", self.image_column)
            images = {name: _keep_encoded(self.title, split, column) for name, split in rows.items()}
            self.reader = replace(self.reader, source=RowReader(images, column))
            self._rows = rows
        return self._rows

    def _sources(self) -> dict[str, str]:
        """Return the split of the dataset for ``train``, ``val`` and ``test``, or for ``all``."""
        rows = self._open()
        sources: dict[str, str] = {}
        others = []
        for name in rows:
            split = split_of(name)
            if split is None:
                others.append(name)
            elif split in sources:
                raise MisconfigurationException(
                    f"{self.title}: {sources[split]} and {name} both name the {split} split."
                )
            else:
                sources[split] = name
        if not sources and len(others) > 1:
            raise MisconfigurationException(
                f"{self.title}: none of the splits {', '.join(others)} has a name that is known ({spellings()})."
            )
        if sources and others:
            rank_zero_warn(f"{self.title}: the splits {', '.join(others)} are not read ({spellings()}).")
        return {split: sources[split] for split in SPLITS if split in sources} or {ALL: others[0]}


def _find_column(title: str, features: "Features", role: str, given: str | None) -> str:
    """Return the column of the images or labels.

    Args:
        title: Option that names the data, for messages.
        features: Types of the columns.
        role: ``image`` or ``label``.
        given: The column that the user has chosen.

    Raises:
        MisconfigurationException: There are none or several, or the chosen one does not exist or has another type.
    """
    from datasets import ClassLabel, Image

    wanted = Image if role == "image" else ClassLabel
    found: list[str] = [name for name, feature in features.items() if isinstance(feature, wanted)]
    usable = list(features)  # of images: bytes and paths can be converted
    if role == "label":
        usable = [name for name, feature in features.items() if _dtype(feature).startswith(LABEL_TYPES)]
        found = found or [name for name in usable if name == role]
    if given is None and len(found) == 1:
        return found[0]
    if given in usable:
        return str(given)
    if given is None:
        problem = f"{len(found) or 'no'} columns have the type {wanted.__name__}; choose one with --data.{role}_column"
    else:
        problem = f"--data.{role}_column {given} is not a column of {role}s"
    types = ", ".join(f"{name} ({_type_name(feature)})" for name, feature in features.items())
    raise MisconfigurationException(f"{title}: {problem}. The columns are {types}.")


def _dtype(feature: object) -> str:
    return str(getattr(feature, "dtype", ""))


def _type_name(feature: object) -> str:
    kind = type(feature).__name__
    return _dtype(feature) if kind == "Value" else kind


def _keep_encoded(title: str, rows: "Dataset", column: str) -> "Dataset":
    """Return the images as dictionaries of ``bytes`` and ``path``, without decoding."""
    from datasets import Image

    try:
        return rows.select_columns([column]).cast_column(column, Image(decode=False))
    except (TypeError, ValueError, NotImplementedError) as error:  # those of pyarrow are derived from them
        raise MisconfigurationException(f"{title}: the column {column} does not hold images: {error}") from error


def _names(rows: "Dataset", split: str) -> list[str]:
    return [f"{split}/{position:06d}" for position in range(len(rows))]


def _read_labels(rows: "Dataset", column: str, names: list[str] | None) -> list[str | None]:
    """Return the label of each row as text, ``None`` where it is unknown."""
    if column not in rows.column_names:
        return [None] * len(rows)
    values = rows[column][:]
    if names:
        return [None if value is None or value < 0 else names[value] for value in values]
    return [None if value is None or value == -1 else str(value).strip() or None for value in values]
