"""Base class of the data modules: splits, loaders, random seeds, augmentation on the device."""

import hashlib
import os
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from typing_extensions import override

from vit_finetune.checkpoint import make_plain
from vit_finetune.data.datasets import Batch, ImageDataset, InMemoryDataset, collate_shared
from vit_finetune.data.decode import Resize
from vit_finetune.data.position import seed_generators, step_seed
from vit_finetune.data.random_crop import random_resized_crop
from vit_finetune.data.samplers import (
    DistributedEvalSampler,
    ResumableDataLoader,
    ResumableDistributedSampler,
    stratified_split,
)
from vit_finetune.data.transforms import mix, per_image_transform, random_shift_flip
from vit_finetune.errors import require

D = TypeVar("D", bound=ImageDataset)
STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class ImageDataModule(LightningDataModule):
    """Images of one dataset in batches, augmented on the device; a subclass implements ``load_datasets``.

    Three attributes say what the model is known to need, and may be set before ``setup``, as the command line does:
    ``input_size``, height and width of the input; ``known_classes``, the class names; and ``crop_pct``, the fraction of
    height and width that remains where an image is cropped for evaluation.

    Args:
        batch_size: Images per batch and device.
        num_workers: Number of DataLoader worker processes. The default is 0 for images in memory, which need none, and
            up to 8 for files.
        train_fraction: Fraction of the images of each class that fit uses, for quick comparisons and learning curves. A
            validation split is taken from these images; a separate one is used completely.
        val_fraction: Fraction of the training images of each class that forms the validation split.
        split_seed: Seed of the choice of training and validation images; independent of ``--seed_everything``.
        shift: Augmentation: maximum random shift in each direction, as a fraction of the image size; not used with
            crop_scale.
        flip: Augmentation: horizontal flip with probability 0.5.
        crop_scale: Augmentation: random resized crop of at least this fraction of the image's area, with an aspect
            ratio between 3/4 and 4/3; 0.35 is common for photographs. Default: 0, which turns it off.
        auto_augment: Augmentation: random color and geometric transforms for each image, trivial for TrivialAugment
            Wide or rand for RandAugment.
        erase: Augmentation: probability of random erasing, which fills a rectangle of the image with gray.
        mixup: Augmentation: alpha of mixup's Beta distribution; 0.2 is common, 0 turns it off.
        cutmix: Augmentation: alpha of CutMix's Beta distribution; 1.0 is common, 0 turns it off. If mixup is on, too,
            each batch uses one of the two at random. With mixup or CutMix, train accuracy is computed against the
            dominant label.
    """

    def __init__(
        self,
        batch_size: int = 64,
        num_workers: int | None = None,
        train_fraction: float = 1.0,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        shift: float = 0.125,
        flip: bool = True,
        crop_scale: float | None = None,
        auto_augment: Literal["trivial", "rand"] | None = None,
        erase: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # of the subclass, too
        make_plain(self.hparams)
        require("--data.batch_size", batch_size, 1)
        require("--data.num_workers", num_workers or 0, 0)
        require("--data.train_fraction", train_fraction, 1e-6, 1)
        require("--data.val_fraction", val_fraction, 0, 1)
        require("--data.shift", shift, 0, 0.99)
        require("--data.crop_scale", crop_scale or 0, 0, 1)
        require("--data.erase", erase, 0, 1)
        require("--data.mixup", mixup, 0)
        require("--data.cutmix", cutmix, 0)
        self.batch_size, self.num_workers = int(batch_size), num_workers
        self.train_fraction, self.val_fraction, self.split_seed = train_fraction, val_fraction, split_seed
        self.shift, self.flip = shift, flip
        self.crop_scale = crop_scale or 0.0
        self.crop_size: tuple[int, int] | None = None  # of the result; None for the size of the images
        self.per_image = per_image_transform(auto_augment, erase)
        self.mixup, self.cutmix = mixup, cutmix
        self.input_size: tuple[int, int] | None = None
        self.crop_pct = 1.0
        # How images were brought to the size of the validation images: crop or stretch, and the fraction that is kept.
        self.eval_crop: tuple[Resize, float] = ("crop", 1.0)
        self.known_classes: list[str] | None = None
        self.class_names: list[str] | None = None
        self.datasets: dict[str, ImageDataset] = {}

    def unavailable_reason(self) -> str | None:
        """Return one sentence on why the data cannot be read, ``None`` if it can; do not read or download anything."""
        return None

    def load_datasets(self, stage: str) -> dict[str, ImageDataset]:
        """Load the datasets of a stage and set ``class_names``; a subclass implements it.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``.

        Returns:
            ``train`` and ``val`` for fit, ``val`` for validate, ``test`` for test, ``predict`` for predict; other
            entries are ignored.
        """
        raise NotImplementedError

    def count_images(self) -> dict[str, int]:
        """Return the number of images in ``train`` and ``val``; a subclass may count without reading them."""
        return {name: len(dataset) for name, dataset in self.load_datasets("fit").items()}

    def reduce_train(self, images: D) -> D:
        """Return the fraction of the training images that is used, at least one image of each class."""
        kept, _ = stratified_split(images.labels, 1 - self.train_fraction, self.split_seed)
        return images.subset(kept)

    def split_train_val(self, pool: D) -> dict[str, D]:
        """Split the training images that are used into ``train`` and ``val``, the same way in every process and run.

        Raises:
            MisconfigurationException: One of the two would be empty.
        """
        pool = self.reduce_train(pool)
        train, val = stratified_split(pool.labels, self.val_fraction, self.split_seed)
        if not len(val) or not len(train):
            raise MisconfigurationException(
                f"--data.val_fraction {self.val_fraction} splits {len(pool)} images into {len(train)} for training and "
                f"{len(val)} for validation; expected at least one in each. Change the fraction or add images."
            )
        return {"train": pool.subset(train), "val": pool.subset(val)}

    @override
    def setup(self, stage: str) -> None:
        """Load the datasets of a stage; refuse to train on fewer than two classes."""
        loaded = self.load_datasets(TrainerFn(stage).value)  # str() of the Trainer's enum is not the plain name
        if stage == "fit" and (names := self.class_names) is not None and len(names) < 2:
            raise MisconfigurationException(
                f"The dataset has one class ({', '.join(names)}); expected at least two to train a classifier. Add a "
                "class, for example of other images."
            )
        self.datasets.update({name: loaded[name] for name in STAGES[stage]})

    @property
    def split_fingerprint(self) -> str:
        """Hash of the names of the training images; equal for equal splits."""
        names = "\n".join(sorted(self.datasets["train"].names)) if "train" in self.datasets else ""
        return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()[:16]

    @property
    def class_counts(self) -> dict[str, list[int]]:
        """Number of images per class, in the order of ``class_names``, in each dataset loaded so far."""
        classes = len(self.class_names or ())
        return {
            name: dataset.labels[dataset.labels >= 0].bincount(minlength=classes).tolist()
            for name, dataset in self.datasets.items()
        }

    # Loaders

    @override
    def train_dataloader(self) -> ResumableDataLoader:
        dataset = self.datasets["train"]
        sampler = ResumableDistributedSampler(dataset, *self._shard(), shuffle=True, seed=step_seed())
        loader = ResumableDataLoader(dataset, sampler=sampler, **self._loader_options(dataset))
        if self.trainer is not None:
            loader.trainer = self.trainer
        return loader

    @override
    def val_dataloader(self) -> DataLoader[Batch]:
        return self._eval_dataloader("val")

    @override
    def test_dataloader(self) -> DataLoader[Batch]:
        return self._eval_dataloader("test")

    @override
    def predict_dataloader(self) -> DataLoader[Batch]:
        return self._eval_dataloader("predict")

    def _eval_dataloader(self, name: str) -> DataLoader[Batch]:
        dataset = self.datasets[name]
        sampler = DistributedEvalSampler(dataset, *self._shard())
        return DataLoader(dataset, sampler=sampler, **self._loader_options(dataset))

    def _loader_options(self, dataset: ImageDataset) -> dict[str, Any]:
        workers = self.num_workers
        if workers is None:
            workers = 0 if isinstance(dataset, InMemoryDataset) else min(8, os.cpu_count() or 1)
        return {
            "batch_size": self.batch_size,
            "collate_fn": collate_shared,
            "num_workers": workers,
            "persistent_workers": workers > 0,  # restarting two workers takes about 0.6 s per epoch
            "pin_memory": torch.cuda.is_available(),
        }

    def _shard(self) -> tuple[int, int]:
        """Return how many shards the data has and which one is this process's; a tensor-parallel group shares one."""
        kwargs = self.trainer.distributed_sampler_kwargs if self.trainer else None
        return (kwargs["num_replicas"], kwargs["rank"]) if kwargs else (1, 0)

    # On the device

    @override
    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if self.trainer is not None and self.trainer.training:
            _, rank = self._shard()
            step = self.trainer.fit_loop.total_batch_idx + 1
            self.seed_step(batch["image"].device, step, rank)
            return self.augment(batch)
        return batch

    def seed_step(self, device: torch.device, step: int, rank: int = 0) -> None:
        """Seed the default generators for one training step, see :func:`.position.seed_generators`."""
        seed_generators(device, step, rank)

    def augment(self, batch: Batch) -> Batch:
        """Augment a training batch on its device; override this for other augmentation, :meth:`seed_step` stays."""
        if self.crop_scale:
            batch["image"] = random_resized_crop(
                batch["image"], self.crop_scale, self.flip, self.crop_size, batch.get("aspect")
            )
        else:
            batch["image"] = random_shift_flip(batch["image"], self.shift, self.flip)
        if self.per_image is not None:
            batch["image"] = self.per_image(batch["image"])
        if self.mixup or self.cutmix:
            classes = len(self.class_names or ())
            mixed = mix(batch["image"], batch["label"], self.mixup, self.cutmix, classes)
            batch["image"], batch["target"] = mixed
            batch["label"] = batch["target"].argmax(1)
        return batch
