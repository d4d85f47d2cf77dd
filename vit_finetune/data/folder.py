"""Your own pictures: one folder a class."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from vit_finetune.data.base import STAGES, ImageDataModule
from vit_finetune.data.decode import EXTENSIONS, BrokenPicture, decode, read_size
from vit_finetune.data.pictures import UNKNOWN, MemoryPictures, PictureSet, stratified_holdout

SPLITS = ("train", "val", "test")
T = TypeVar("T")


class FilePictures(PictureSet):
    """Pictures that are decoded each time they are asked for.

    Args:
        paths: The files.
        labels: int64, shape ``(N,)``.
        size: Side in pixels of the square that every picture becomes; ``None`` if all have one size already.
    """

    def __init__(self, paths: Sequence[str], labels: Tensor, size: int | None = None) -> None:
        super().__init__(labels, paths)
        self.size = size

    def images_at(self, positions: Tensor) -> Tensor:
        """Decodes a batch, uint8 ``(B, 3, H, W)``."""
        return torch.stack([decode(self.names[position], self.size) for position in positions.tolist()])

    def subset(self, positions: Tensor) -> "FilePictures":
        """Returns the pictures at these positions as a set of their own."""
        names = [self.names[position] for position in positions.tolist()]
        return FilePictures(names, self.labels[positions], self.size)


class ImageFolder(ImageDataModule):
    """Pictures in folders named after their classes.

    Either ``root/train/<class>/*.jpg`` with ``val`` and ``test`` beside ``train``, or one tree ``root/<class>/*.jpg``
    that is split by a seed. A missing ``val`` is cut out of ``train``. Without ``test``, the command ``test`` scores
    the validation pictures and says so. ``predict`` takes the same pictures as ``test``, or, where there are no splits,
    every picture below ``root``. Hidden files and folders and files of other types are left out.

    Args:
        root: The folder.
        test_fraction: One tree only: share of each class that is held out for ``test``; 1 makes all pictures test
            pictures.
        size: Side in pixels to which pictures are brought when read (shorter side resized, centre cut). By default
            squares of one size no larger than the model's input stay as they are, and everything else takes the
            model's input size.
        cache_gb: Decode once and keep the pictures in memory if they take up to this many GB; larger sets are decoded
            anew each epoch, in ``num_workers`` processes.
        kwargs: Options of every data module, see :class:`ImageDataModule`.
    """

    def __init__(
        self,
        root: str = "data",
        test_fraction: float = 0.1,
        size: int | None = None,
        cache_gb: float = 2.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.root = Path(root)
        self.test_fraction = test_fraction
        self.size = size
        self.cache_gb = cache_gb

    def missing(self) -> str | None:
        """Says that the folder is not there."""
        return None if self.root.is_dir() else f"--data.root {self.root} is not a folder."

    def prepare_data(self) -> None:
        """Checks that the folder is there.

        Raises:
            MisconfigurationException: It is not.
        """
        if problem := self.missing():
            raise MisconfigurationException(problem)

    def load(self, stage: str) -> dict[str, PictureSet]:
        """Lists the files, checks them, and reads them into memory if they fit.

        Raises:
            MisconfigurationException: The folder, a class or the pictures of the stage are missing, a class is unknown
                to the model, or files are broken; one message for all files.
        """
        files = self._list(stage)
        return self._read({name: files[name] for name in STAGES[stage]})

    def _list(self, stage: str) -> dict[str, FilePictures]:
        """Finds the files of the stage without opening them."""
        trees = {split: self.root / split for split in SPLITS if (self.root / split).is_dir()}
        if stage == "predict" and not trees:
            paths = find_pictures(self.root)
            return {"predict": FilePictures(paths, torch.full((len(paths),), UNKNOWN))}
        classes = {split: list_classes(tree) for split, tree in (trees or {"all": self.root}).items()}
        self.class_names = self._name_classes(classes)
        files = {split: self._label(found) for split, found in classes.items()}
        if "all" in files:
            rest, test = stratified_holdout(files["all"].labels, self.test_fraction, self.split_seed)
            files = {"train": files["all"].subset(rest), "test": files["all"].subset(test)}
        if "val" not in files and "train" in files and stage != "test":
            files |= self.hold_out(files["train"])  # type: ignore[arg-type]
        if "test" not in files and "val" in files:
            if stage in ("test", "predict"):
                rank_zero_info(f"{self.root} has no folder test: these are the pictures of val.")
            files["test"] = files["val"]
        if "test" in files:
            files["predict"] = files["test"]
        for name in STAGES[stage]:
            if not len(files.get(name, ())):
                raise MisconfigurationException(f"--data.root {self.root} has no {name} pictures for {stage}.")
        return files

    def _name_classes(self, classes: dict[str, dict[str, list[str]]]) -> list[str]:
        """The model's classes if it has some already, else those of the training folder, sorted."""
        trained = classes.get("train") or classes.get("all")
        model = self.trainer.lightning_module if self.trainer else None
        known: list[str] | None = getattr(model, "class_names", None)
        names = known or sorted(trained or set().union(*classes.values()))
        for split, found in classes.items():
            unknown = sorted(set(found) - set(names))
            if unknown:
                raise MisconfigurationException(
                    f"{self.root}, {split}: no such class: {', '.join(unknown)}. The classes are {', '.join(names)}."
                )
        if trained is not None and known is None:
            empty = [name for name in names if not trained[name]]
            if empty:
                raise MisconfigurationException(
                    f"{self.root}: no pictures in the class folder {', '.join(empty)}; "
                    f"accepted types are {' '.join(sorted(EXTENSIONS))}."
                )
        return names

    def _label(self, classes: dict[str, list[str]]) -> FilePictures:
        assert self.class_names is not None
        labelled = [(path, self.class_names.index(name)) for name, paths in classes.items() for path in paths]
        return FilePictures([path for path, _ in labelled], torch.tensor([label for _, label in labelled]).long())

    def _read(self, files: dict[str, FilePictures]) -> dict[str, PictureSet]:
        """Decides on size and place, and decodes what goes into memory."""
        broken: list[str] = []
        for pictures in files.values():
            sizes = set(_map_files(read_size, pictures.names, broken))
            pictures.size = self.size or self._size_for(sizes)
        _refuse(broken)
        side = max(pictures.size or max(read_size(pictures.names[0])) for pictures in files.values())
        if sum(map(len, files.values())) * 3 * side**2 > self.cache_gb * 1e9:
            return dict(files)
        decoded = {name: _map_files(partial(decode, size=p.size), p.names, broken) for name, p in files.items()}
        _refuse(broken)
        return {
            name: MemoryPictures(torch.stack(decoded[name]), pictures.labels, pictures.names)
            for name, pictures in files.items()
        }

    def _size_for(self, sizes: set[tuple[int, int]]) -> int | None:
        model = self.trainer.lightning_module if self.trainer else None
        limit = max(getattr(model, "input_size", (224, 224)))
        if len(sizes) == 1:
            width, height = next(iter(sizes))
            if width == height <= limit:
                return None
        return limit


def find_pictures(folder: Path) -> list[str]:
    """Lists the picture files below a folder in a stable order, hidden ones left out."""
    paths = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths += [
            os.path.join(parent, name)
            for name in sorted(names)
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS
        ]
    return paths


def list_classes(tree: Path) -> dict[str, list[str]]:
    """Lists the class folders of a tree with their picture files, hidden folders left out."""
    folders = sorted(entry.name for entry in tree.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return {name: find_pictures(tree / name) for name in folders}


def _map_files(function: Callable[[str], T], paths: Iterable[str], broken: list[str]) -> list[T]:
    """Applies a function to files in parallel threads; what is broken is added to the list and left out."""

    def attempt(path: str) -> T | None:
        try:
            return function(path)
        except BrokenPicture as error:
            broken.append(str(error))
            return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [result for result in pool.map(attempt, paths) if result is not None]


def _refuse(broken: list[str], most: int = 20) -> None:
    if broken:
        more = f"\n  and {len(broken) - most} more" if len(broken) > most else ""
        listed = "".join(f"\n  {line}" for line in sorted(set(broken))[:most])
        raise MisconfigurationException(f"{len(broken)} pictures cannot be read; mend or remove them:{listed}{more}")
