"""Your own images, in one folder per class."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from typing_extensions import override

from vit_finetune.data.datamodule import STAGES, ImageDataModule
from vit_finetune.data.datasets import ImageDataset, ImageFileDataset, InMemoryDataset, UnlabeledImageDataset
from vit_finetune.data.decode import EXTENSIONS, decode, read_size
from vit_finetune.data.file_listing import find_images, list_classes, read_list, try_files
from vit_finetune.data.samplers import stratified_split
from vit_finetune.errors import ImageDecodeError, require

SPLITS = ("train", "val", "test")
SHOWN = 20  # broken files listed in a message
DEFAULT_SIZE = (224, 224)  # input of a model that is not known
ACCEPTED_TYPES = f"accepted types are {' '.join(sorted(EXTENSIONS))}"
T = TypeVar("T")


class ImageFolder(ImageDataModule):
    """Images in folders named after their classes.

    Two layouts: ``root/train/<class>/*.jpg`` with ``val`` and ``test`` next to ``train``, or a single tree
    ``root/<class>/*.jpg`` that is split at random. Without a ``val`` folder, validation images are split from
    ``train``. Without a ``test`` folder, the command ``test`` uses the validation images and logs that. Hidden files,
    system files and files of other types are ignored.

    ``predict`` needs no labels. It reads every image below ``root/test``; if that does not exist, below ``root/val``
    or else ``root``.

    Args:
        root: Folder of the images. For predict also a single image, or a text file with one path per line, absolute
            or relative to the text file's folder.
        test_fraction: Fraction of each class that forms the test split, for a single tree only; 1 uses all images for
            testing.
        size: Resize the shorter side of every image to this many pixels and crop the center square. By default,
            square images of one size up to the model's input size stay as they are, and all others are brought to the
            model's input size.
        cache_gb: Keep decoded images in memory if they need up to this many GB. Larger datasets are decoded again in
            each epoch, by ``num_workers`` processes.
        skip_broken: Skip files that cannot be decoded and list them in the run folder, instead of raising an error.
            Every file is then decoded once before training starts.
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

    @override
    def unavailable_reason(self) -> str | None:
        return None if self.root.is_dir() else f"--data.root {self.root} is not a folder."

    @override
    def prepare_data(self) -> None:
        if not self.root.exists():
            raise MisconfigurationException(f"--data.root {self.root} does not exist.")

    @override
    def load_datasets(self, stage: str) -> dict[str, ImageDataset]:
        if stage == "predict":
            return {"predict": self._unlabeled()}
        if problem := self.unavailable_reason():
            raise MisconfigurationException(problem)
        files = self._list(stage)
        broken: dict[str, str] = {}
        loaded = self._read({name: files[name] for name in STAGES[stage]}, broken)
        return self._without(broken, loaded, stage) if broken else loaded

    def _unlabeled(self) -> UnlabeledImageDataset:
        """List the images to predict; broken files are reported in the table of predictions."""
        if self.root.is_file():
            is_image = self.root.suffix.lower() in EXTENSIONS
            paths = [str(self.root)] if is_image else read_list(self.root)
        else:
            splits = [self.root / name for name in ("test", "val") if (self.root / name).is_dir()]
            paths = find_images([*splits, self.root][0])
        if not paths:
            raise MisconfigurationException(f"--data.root {self.root} contains no images; {ACCEPTED_TYPES}.")
        return UnlabeledImageDataset(paths, self._size_for(paths, {}))

    # Files and labels

    def _list(self, stage: str) -> dict[str, ImageFileDataset]:
        """List the files of a stage without opening them."""
        trees = {split: self.root / split for split in SPLITS if (self.root / split).is_dir()}
        classes = {split: list_classes(tree) for split, tree in (trees or {"all": self.root}).items()}
        self.class_names = names = self._names(classes)
        self._check_classes(classes, names)
        files = {split: _label(found, names) for split, found in classes.items()}
        if "all" in files:
            rest, test = stratified_split(files["all"].labels, self.test_fraction, self.split_seed)
            files = {"train": files["all"].subset(rest), "test": files["all"].subset(test)}
        if "val" not in files and "train" in files and (stage != "test" or "test" not in files):
            files |= self.split_train_val(files["train"])  # type: ignore[arg-type]  # subsets are of the same kind
        if "test" not in files and "val" in files:
            if stage == "test":
                rank_zero_info(f"{self.root} has no test folder: testing on the validation images.")
            files["test"] = files["val"]
        for name in STAGES[stage]:
            if not len(files.get(name, ())):
                raise MisconfigurationException(f"--data.root {self.root} has no {name} images for {stage}.")
        return files

    def _names(self, classes: Mapping[str, Mapping[str, list[str]]]) -> list[str]:
        """Return the model's classes if it has some already, otherwise those of the training folder, sorted."""
        found = set().union(*classes.values())
        if not found:
            raise MisconfigurationException(
                f"--data.root {self.root} has no class folders. Expected root/<class>/ or root/train/<class>/."
            )
        if self.known_classes is not None:
            return self.known_classes
        trained = classes.get("train") or classes.get("all")
        names = _sort(set(trained or found))
        if trained is not None and (empty := [name for name in names if not trained[name]]):
            raise MisconfigurationException(
                f"{self.root}: no images in the class folder {', '.join(empty)}; {ACCEPTED_TYPES}."
            )
        return names

    def _check_classes(self, classes: Mapping[str, Mapping[str, list[str]]], names: list[str]) -> None:
        """Refuse class folders that the model does not know, and log classes without images."""
        for split, folders in classes.items():
            if unknown := sorted(set(folders) - set(names)):
                raise MisconfigurationException(
                    f"{self.root}, {split}: unknown class: {', '.join(unknown)}. The classes are {', '.join(names)}."
                )
            if empty := [name for name in names if not folders.get(name)]:
                rank_zero_info(
                    f"{self.root}, {split}: no images of {', '.join(empty)}. The labels of other classes do not change."
                )

    # Pixels

    def _read(self, files: dict[str, ImageFileDataset], broken: dict[str, str]) -> dict[str, ImageDataset]:
        """Choose the image size, decode datasets that fit into memory, and add broken files to ``broken``."""
        for dataset in files.values():
            dataset.size = self._size_for(dataset.names, broken)
        if sum(len(dataset) * 3 * dataset.size**2 for dataset in files.values()) <= self.cache_gb * 1e9:
            return {name: _into_memory(dataset, broken) for name, dataset in files.items()}
        if self.skip_broken:
            for dataset in files.values():
                for _ in _readable(lambda path: decode(path).shape, dataset.names, broken):
                    pass  # collects broken files
        return dict(files)

    def _size_for(self, paths: list[str], broken: dict[str, str]) -> int:
        """Return the size of images for these files, see ``--data.size``."""
        sizes = {size for _, size in _readable(read_size, paths, broken)}
        if self.size:
            return self.size
        limit = max(self.input_size or DEFAULT_SIZE)
        width, height = sizes.pop() if len(sizes) == 1 else (0, 0)
        return width if 0 < width == height <= limit else limit

    def _without(self, broken: dict[str, str], loaded: dict[str, ImageDataset], stage: str) -> dict[str, ImageDataset]:
        """Remove broken files from the datasets and list them; without ``--data.skip_broken``, raise an error."""
        lines = [broken[path] for path in sorted(broken)]
        listed = "".join(f"\n  {line}" for line in lines[:SHOWN])
        listed += f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        if not self.skip_broken:
            raise MisconfigurationException(
                f"{len(lines)} images cannot be read. Repair or remove them, or skip them with "
                f"--data.skip_broken true:{listed}"
            )
        rank_zero_warn(f"Skipped {len(lines)} images that cannot be read:{listed}")
        # Without a logger, as in export, there is no run folder.
        folder = self.trainer.log_dir if self.trainer and self.trainer.loggers else None
        if folder:
            _write_lines(Path(folder) / f"skipped-{stage}.txt", lines)
        kept = {
            name: dataset.subset(torch.tensor([path not in broken for path in dataset.names]).nonzero().flatten())
            for name, dataset in loaded.items()
        }
        for name, dataset in kept.items():
            lost = set(loaded[name].labels.tolist()) - set(dataset.labels.tolist())
            if lost and (name == "train" or not len(dataset)):
                classes = ", ".join((self.class_names or [])[label] for label in sorted(lost))
                raise MisconfigurationException(f"{name}: none of the images of {classes} can be read.{listed}")
        return kept


@rank_zero_only
def _write_lines(file: Path, lines: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sort(names: set[str]) -> list[str]:
    """Sort class names: integers by value, anything else alphabetically."""
    return sorted(names, key=(lambda name: (int(name), name)) if all(map(str.isdecimal, names)) else None)


def _label(classes: Mapping[str, list[str]], names: list[str]) -> ImageFileDataset:
    labels = [label for name, paths in classes.items() for label in [names.index(name)] * len(paths)]
    return ImageFileDataset([path for paths in classes.values() for path in paths], torch.tensor(labels).long())


def _readable(function: Callable[[str], T], paths: list[str], broken: dict[str, str]) -> Iterator[tuple[int, T]]:
    """Yield position and result for every file that can be read; add the message of every other one to ``broken``."""
    for position, result in enumerate(try_files(function, paths, "images checked")):
        if isinstance(result, ImageDecodeError):
            broken[paths[position]] = str(result)
        else:
            yield position, result


def _into_memory(dataset: ImageFileDataset, broken: dict[str, str]) -> InMemoryDataset:
    images = torch.zeros(len(dataset), 3, dataset.size, dataset.size, dtype=torch.uint8)
    for position, image in _readable(partial(decode, size=dataset.size), dataset.names, broken):
        images[position] = image
    return InMemoryDataset(images, dataset.labels, dataset.names)
