"""Base class of the data modules that read image files: splits, labels, sizes, broken files."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from vit_finetune.data.datamodule import STAGES, ImageDataModule
from vit_finetune.data.datasets import (
    ImageDataset,
    ImageFileDataset,
    ImageReader,
    InMemoryDataset,
    UnlabeledImageDataset,
)
from vit_finetune.data.decode import MAX_PIXELS, Resize, read_size
from vit_finetune.data.file_listing import try_files
from vit_finetune.data.samplers import stratified_split
from vit_finetune.data.splits import ACCEPTED_TYPES, ALL, Splits, class_names, labels_of
from vit_finetune.errors import ImageDecodeError, require
from vit_finetune.formatting import list_lines

DEFAULT_SIZE = (224, 224)  # input of a model that is not known
CROP_SCALE = 0.35  # default for photographs
MARGIN = 8 / 7  # stored training images are larger than the model's input by this factor: 256 for 224
T = TypeVar("T")


class ImageFiles(ImageDataModule):
    """Image files of any size; a subclass implements ``list_splits`` and ``list_unlabeled``.

    Args:
        test_fraction: Fraction of each class that forms the test split, if the data has no splits; 1 uses all images
            for testing.
        size: Height and width of the decoded images in pixels, one number for a square. By default, images of one size
            up to the model's input and with its aspect ratio stay as they are, and all others are brought to the
            model's input size.
        resize: Keep the aspect ratio and crop the center to that of the model's input (crop), or resize the whole image
            and keep all edges (stretch).
        crop_scale: Augmentation: random resized crop of at least this fraction of the area, in place of the random
            shift. Default: 0.35 for images that are resized, and 0, which turns it off, for all others.
        cache_gb: Keep decoded images in memory if they need up to this many GB. Larger datasets are decoded again in
            each epoch, by ``num_workers`` processes.
        skip_broken: Skip files that cannot be decoded and list them in the run folder, instead of raising an error.
            Every file is then decoded once before training starts.
        max_megapixels: Refuse larger images, which can exhaust the memory.
        kwargs: Options of every data module, see :class:`ImageDataModule`.
    """

    def __init__(
        self,
        test_fraction: float = 0.1,
        size: int | list[int] | None = None,
        resize: Resize = "crop",
        crop_scale: float | None = None,
        cache_gb: float = 2.0,
        skip_broken: bool = False,
        max_megapixels: float = MAX_PIXELS / 1e6,
        **kwargs: Any,
    ) -> None:
        super().__init__(crop_scale=crop_scale, **kwargs)
        require("--data.test_fraction", test_fraction, 0, 1)
        require("--data.cache_gb", cache_gb, 0)
        require("--data.max_megapixels", max_megapixels, 0)
        self.test_fraction = test_fraction
        self.size = _pair(size)
        self.cache_gb = cache_gb
        self.skip_broken = skip_broken
        self.declared_classes: list[str] | None = None
        self.reader = ImageReader(None, resize, max_pixels=round(max_megapixels * 1e6))

    @property
    def title(self) -> str:
        """Option and value that name the data in messages, such as ``--data.root photos``."""
        raise NotImplementedError

    def list_splits(self) -> Splits:
        """List the names of the labeled images by split and class, without opening the files.

        The splits are ``train``, ``val`` and ``test``, or only ``all``. A source that states the order of its classes
        sets ``declared_classes``; otherwise they are sorted.
        """
        raise NotImplementedError

    def list_unlabeled(self) -> list[str]:
        """List the names of the images to predict."""
        raise NotImplementedError

    @override
    def load_datasets(self, stage: str) -> dict[str, ImageDataset]:
        if stage == "predict":
            names = self.list_unlabeled()
            if not names:
                raise MisconfigurationException(f"{self.title} contains no images; {ACCEPTED_TYPES}.")
            reader, _ = self._eval_reader(names, {})  # broken files are reported in the table of predictions
            return {"predict": UnlabeledImageDataset(names, reader)}
        if problem := self.unavailable_reason():
            raise MisconfigurationException(problem)
        files = self._label(stage)
        broken: dict[str, str] = {}
        loaded = self._read({name: files[name] for name in STAGES[stage]}, broken)
        return self._without(broken, loaded, stage) if broken else loaded

    @override
    def count_images(self) -> dict[str, int]:
        return {name: len(files) for name, files in self._label("fit").items()}

    # Files and labels

    def _label(self, stage: str) -> dict[str, ImageFileDataset]:
        """Assign the images to splits and classes."""
        splits = self.list_splits()
        self.class_names = names = class_names(splits, self.known_classes or self.declared_classes, self.title)
        files = {split: ImageFileDataset(*labels_of(found, names)) for split, found in splits.items()}
        if ALL in files:
            rest, test = stratified_split(files[ALL].labels, self.test_fraction, self.split_seed)
            files = {"train": files[ALL].subset(rest), "test": files[ALL].subset(test)}
        if "train" in files and "val" in files:
            files["train"] = self.reduce_train(files["train"])
        elif "train" in files and (stage != "test" or "test" not in files):
            files |= self.split_train_val(files["train"])
        if "test" not in files and "val" in files:
            if stage == "test":
                rank_zero_info(f"{self.title} has no test split: testing on the validation images.")
            files["test"] = files["val"]
        for name in STAGES[stage]:
            if not len(files.get(name, ())):
                raise MisconfigurationException(f"{self.title} has no {name} images for {stage}.")
        return files

    # Pixels

    def _read(self, files: dict[str, ImageFileDataset], broken: dict[str, str]) -> dict[str, ImageDataset]:
        """Choose the image size, decode datasets that fit into memory, and add broken files to ``broken``."""
        for split, dataset in files.items():
            dataset.reader, aspects = self._eval_reader(dataset.names, broken)
            if split == "train" and self._crops(aspects):
                self._store_for_crops(dataset, aspects)
        sizes = [(len(dataset), dataset.reader.size or (0, 0)) for dataset in files.values()]
        if sum(count * 3 * height * width for count, (height, width) in sizes) <= self.cache_gb * 1e9:
            return {name: _into_memory(dataset, broken) for name, dataset in files.items()}
        if self.skip_broken:
            for dataset in files.values():
                for _ in _readable(lambda name: self.reader(name).shape, dataset.names, broken):
                    pass  # collects broken files
        return dict(files)

    def _eval_reader(self, names: list[str], broken: dict[str, str]) -> tuple[ImageReader, Tensor | None]:
        """Choose the size of the images, see ``size``.

        Returns:
            The reader for evaluation, and width over height of each file; ``None`` if the images stay as they are.
        """
        read = partial(read_size, max_pixels=self.reader.max_pixels)
        sizes = dict(_readable(lambda name: read(self.reader.source(name)), names, broken))
        limit = self.input_size or DEFAULT_SIZE
        if self.size is None and len(set(sizes.values())) == 1:
            width, height = next(iter(sizes.values()))
            if height <= limit[0] and width <= limit[1] and height * limit[1] == width * limit[0]:
                self.eval_crop = ("crop", 1.0)
                return replace(self.reader, size=(height, width), crop_pct=1.0), None
        aspects = torch.ones(len(names))
        for position, (width, height) in sizes.items():
            aspects[position] = width / height
        self.eval_crop = (self.reader.resize, self.crop_pct if self.reader.resize == "crop" else 1.0)
        return replace(self.reader, size=self.size or limit, crop_pct=self.eval_crop[1]), aspects

    def _crops(self, aspects: Tensor | None) -> bool:
        if self.hparams["crop_scale"] is None:
            self.crop_scale = 0.0 if aspects is None else CROP_SCALE
        return bool(self.crop_scale) and aspects is not None

    def _store_for_crops(self, dataset: ImageFileDataset, aspects: Tensor | None) -> None:
        """Keep whole training images, somewhat larger than they are needed; random crops undo the stretching."""
        self.crop_size = size = dataset.reader.size
        height, width = (round(side * MARGIN) for side in size or DEFAULT_SIZE)
        dataset.reader = replace(self.reader, size=(height, width), resize="stretch")
        dataset.aspects = aspects if self.reader.resize == "crop" else None

    def _without(self, broken: dict[str, str], loaded: dict[str, ImageDataset], stage: str) -> dict[str, ImageDataset]:
        """Remove broken files from the datasets and list them; without ``--data.skip_broken``, raise an error."""
        lines = [broken[path] for path in sorted(broken)]
        listed = list_lines(lines)
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


def _pair(size: int | list[int] | None) -> tuple[int, int] | None:
    """Return height and width.

    Raises:
        MisconfigurationException: The size is not positive, or not one or two numbers.
    """
    if size is None:
        return None
    sides = [size, size] if isinstance(size, int) else list(size)
    if len(sides) != 2 or min(sides) < 1:
        raise MisconfigurationException(f"--data.size is {size}; expected one number of pixels or [height, width].")
    return sides[0], sides[1]


def _readable(function: Callable[[str], T], names: list[str], broken: dict[str, str]) -> Iterator[tuple[int, T]]:
    """Yield position and result for every file that can be read; add the message of every other one to ``broken``."""
    for position, result in enumerate(try_files(function, names, "images checked")):
        if isinstance(result, ImageDecodeError):
            broken[names[position]] = str(result)
        else:
            yield position, result


def _into_memory(dataset: ImageFileDataset, broken: dict[str, str]) -> InMemoryDataset:
    images = torch.zeros(len(dataset), 3, *(dataset.reader.size or ()), dtype=torch.uint8)
    for position, image in _readable(dataset.reader, dataset.names, broken):
        images[position] = image
    return InMemoryDataset(images, dataset.labels, dataset.names, dataset.aspects)
