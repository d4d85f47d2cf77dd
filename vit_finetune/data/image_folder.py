"""Your own images: one folder a class."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from vit_finetune.data.datamodule import STAGES, ImageDataModule
from vit_finetune.data.datasets import ImageDataset, ImageFileDataset, InMemoryDataset, UnlabeledImageDataset
from vit_finetune.data.decode import EXTENSIONS, decode, read_size
from vit_finetune.data.file_listing import find_images, list_classes, read_list, try_files
from vit_finetune.data.samplers import stratified_split
from vit_finetune.errors import ImageDecodeError, require

SPLITS = ("train", "val", "test")
SHOWN = 20  # broken files that a message names
T = TypeVar("T")


class ImageFolder(ImageDataModule):
    """Images in folders named after their classes.

    Either ``root/train/<class>/*.jpg`` with ``val`` and ``test`` beside ``train``, or one tree ``root/<class>/*.jpg``
    that is split by a seed. A missing ``val`` is cut out of ``train``. Without ``test``, the command ``test`` scores
    the validation images and says so. Hidden files and folders, what operating systems leave behind, and files of
    other types are left out.

    ``predict`` needs no labels: it takes every image below ``root/test``, or else ``root/val``, or else ``root``.

    Args:
        root: The folder; for predict also one image, or a text file with one path a line, absolute or relative to
            the text file's folder.
        test_fraction: One tree only: share of each class that is held out for ``test``; 1 makes all images test
            images.
        size: Side in pixels to which images are brought when read (shorter side resized, center cut). By default
            squares of one size no larger than the model's input stay as they are, and everything else takes the
            model's input size.
        cache_gb: Decode once and keep the images in memory if they take up to this many GB; larger sets are decoded
            anew each epoch, in ``num_workers`` processes.
        skip_broken: Leave out files that cannot be read and list them, in the run's folder too, instead of refusing to
            start. Every file is then decoded once before the start.
        kwargs: Options of every data module, see :class:`ImageDataModule`.
    """

    def __init__(
        self,
        root: str = "data",
        test_fraction: float = 0.1,
        size: int | None = None,
        cache_gb: float = 2.0,
        skip_broken: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require("--data.test_fraction", test_fraction, 0, 1)
        require("--data.size", 1 if size is None else size, 1)
        require("--data.cache_gb", cache_gb, 0)
        self.root = Path(root)
        self.test_fraction = test_fraction
        self.size = size
        self.cache_gb = cache_gb
        self.skip_broken = skip_broken

    def missing(self) -> str | None:
        """Says that the folder is not there."""
        return None if self.root.is_dir() else f"--data.root {self.root} is not a folder."

    def prepare_data(self) -> None:
        """Checks that there is something to read.

        Raises:
            MisconfigurationException: There is not.
        """
        if not self.root.exists():
            raise MisconfigurationException(f"--data.root {self.root} does not exist.")

    def load(self, stage: str) -> dict[str, ImageDataset]:
        """Lists the files, checks them, and reads them into memory if they fit.

        Raises:
            MisconfigurationException: The folder, a class or the images of the stage are missing, a class is unknown
                to the model, or files are broken; one message for all files.
        """
        if stage == "predict":
            return {"predict": self._unlabeled()}
        if problem := self.missing():
            raise MisconfigurationException(problem)
        files = self._list(stage)
        broken: dict[str, str] = {}
        loaded = self._read({name: files[name] for name in STAGES[stage]}, broken)
        return self._without(broken, loaded, stage) if broken else loaded

    def _unlabeled(self) -> UnlabeledImageDataset:
        """Finds the images to predict; which of them are broken is told in the table of predictions."""
        if self.root.is_file():
            is_image = self.root.suffix.lower() in EXTENSIONS
            paths = [str(self.root)] if is_image else read_list(self.root)
        else:
            splits = [self.root / name for name in ("test", "val") if (self.root / name).is_dir()]
            paths = find_images([*splits, self.root][0])
        if not paths:
            raise MisconfigurationException(f"--data.root {self.root} has no images; {_accepted_types()}")
        sizes = {size for _, size in _sound(read_size, paths, {})}
        return UnlabeledImageDataset(paths, self._size_for(sizes))

    def _list(self, stage: str) -> dict[str, ImageFileDataset]:
        """Finds the files of the stage without opening them."""
        trees = {split: self.root / split for split in SPLITS if (self.root / split).is_dir()}
        classes = {split: list_classes(tree) for split, tree in (trees or {"all": self.root}).items()}
        self.class_names = self._name_classes(classes)
        files = {split: self._label(found) for split, found in classes.items()}
        if "all" in files:
            rest, test = stratified_split(files["all"].labels, self.test_fraction, self.split_seed)
            files = {"train": files["all"].subset(rest), "test": files["all"].subset(test)}
        if "val" not in files and "train" in files and (stage != "test" or "test" not in files):
            files |= self.split_train_val(files["train"])  # type: ignore[arg-type]
        if "test" not in files and "val" in files:
            if stage == "test":
                rank_zero_info(f"{self.root} has no folder test: these are the images of val.")
            files["test"] = files["val"]
        for name in STAGES[stage]:
            if not len(files.get(name, ())):
                raise MisconfigurationException(f"--data.root {self.root} has no {name} images for {stage}.")
        return files

    def _name_classes(self, classes: Mapping[str, Mapping[str, list[str]]]) -> list[str]:
        """The model's classes if it has some already, else those of the training folder, in order."""
        trained = classes.get("train") or classes.get("all")
        model = self.trainer.lightning_module if self.trainer else None
        known: list[str] | None = getattr(model, "class_names", None)
        found = set().union(*classes.values())
        if not found:
            raise MisconfigurationException(
                f"--data.root {self.root} has no class folders. Images lie in root/<class>/ or root/train/<class>/."
            )
        names = known or _in_order(set(trained or found))
        if trained is not None and known is None:
            empty = [name for name in names if not trained[name]]
            if empty:
                raise MisconfigurationException(
                    f"{self.root}: no images in the class folder {', '.join(empty)}; {_accepted_types()}"
                )
        for split, folders in classes.items():
            unknown = sorted(set(folders) - set(names))
            if unknown:
                raise MisconfigurationException(
                    f"{self.root}, {split}: no such class: {', '.join(unknown)}. The classes are {', '.join(names)}."
                )
            lacking = [name for name in names if not folders.get(name)]
            if lacking:
                rank_zero_info(
                    f"{self.root}, {split}: no images of {', '.join(lacking)}. The other classes keep their labels."
                )
        return names

    def _label(self, classes: Mapping[str, list[str]]) -> ImageFileDataset:
        assert self.class_names is not None
        label = {name: position for position, name in enumerate(self.class_names)}
        labels = [label[name] for name, paths in classes.items() for _ in paths]
        return ImageFileDataset([path for paths in classes.values() for path in paths], torch.tensor(labels).long())

    def _read(self, files: dict[str, ImageFileDataset], broken: dict[str, str]) -> dict[str, ImageDataset]:
        """Decides on size and place, and decodes what goes into memory; notes what is broken by its path."""
        for images in files.values():
            images.size = self._size_for({size for _, size in _sound(read_size, images.names, broken)})
        if sum(len(images) * 3 * images.size**2 for images in files.values()) <= self.cache_gb * 1e9:
            return {name: _into_memory(images, broken) for name, images in files.items()}
        if self.skip_broken:
            for images in files.values():
                for _ in _sound(lambda path: decode(path).shape, images.names, broken):
                    pass  # only what is broken counts
        return dict(files)

    def _size_for(self, sizes: set[tuple[int, int]]) -> int:
        if self.size:
            return self.size
        model = self.trainer.lightning_module if self.trainer else None
        limit = max(getattr(model, "input_size", (224, 224)))
        width, height = next(iter(sizes)) if len(sizes) == 1 else (None, None)
        return width if width is not None and width == height and width <= limit else limit

    def _without(self, broken: dict[str, str], sets: dict[str, ImageDataset], stage: str) -> dict[str, ImageDataset]:
        """Refuses broken files, or leaves them out and lists them where that was asked for."""
        lines = [broken[path] for path in sorted(broken)]
        shown = "".join(f"\n  {line}" for line in lines[:SHOWN])
        shown += f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        if not self.skip_broken:
            raise MisconfigurationException(
                f"{len(lines)} images cannot be read; mend or remove them, or leave them out with "
                f"--data.skip_broken true:{shown}"
            )
        rank_zero_warn(f"{len(lines)} images cannot be read and are left out:{shown}")
        # A trainer without a logger, such as that of export, has no folder of its own.
        folder = self.trainer.log_dir if self.trainer and self.trainer.loggers else None
        if folder:
            _write_lines(Path(folder) / f"skipped-{stage}.txt", lines)
        kept = {
            name: images.subset(torch.tensor([path not in broken for path in images.names]).nonzero().flatten())
            for name, images in sets.items()
        }
        for name, images in kept.items():
            lost = set(sets[name].labels.tolist()) - set(images.labels.tolist())
            if lost and (name == "train" or not len(images)):
                classes = ", ".join((self.class_names or [])[label] for label in sorted(lost))
                raise MisconfigurationException(f"No image of these classes in {name} can be read: {classes}.{shown}")
        return kept


@rank_zero_only
def _write_lines(file: Path, lines: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _in_order(names: set[str]) -> list[str]:
    """Sorts class names: whole numbers by value, anything else as text."""
    return sorted(names, key=(lambda name: (int(name), name)) if all(map(str.isdecimal, names)) else None)


def _accepted_types() -> str:
    return f"accepted types are {' '.join(sorted(EXTENSIONS))}"


def _sound(function: Callable[[str], T], paths: list[str], broken: dict[str, str]) -> Iterator[tuple[int, T]]:
    """Yields position and result for every file that is not broken; notes the message of each that is."""
    for position, result in enumerate(try_files(function, paths, "images checked")):
        if isinstance(result, ImageDecodeError):
            broken[paths[position]] = str(result)
        else:
            yield position, result


def _into_memory(dataset: ImageFileDataset, broken: dict[str, str]) -> InMemoryDataset:
    images = torch.zeros(len(dataset), 3, dataset.size, dataset.size, dtype=torch.uint8)
    for position, image in _sound(partial(decode, size=dataset.size), dataset.names, broken):
        images[position] = image
    return InMemoryDataset(images, dataset.labels, dataset.names)
