"""What every data module shares: splits, loaders, seeds, augmentation on the device."""

import hashlib
import os
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, get_worker_info

from vit_finetune.checkpoint import make_plain
from vit_finetune.data.datasets import Batch, ImageDataset, InMemoryDataset
from vit_finetune.data.samplers import (
    DistributedEvalSampler,
    ResumableDataLoader,
    ResumableDistributedSampler,
    stratified_split,
)
from vit_finetune.data.transforms import per_image_transform, random_shift_flip
from vit_finetune.errors import require

STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class ImageDataModule(LightningDataModule):
    """Base of the data modules: a subclass reads images in ``load``, this class does the rest.

    Args:
        batch_size: Images per batch and device.
        num_workers: Processes that read ahead. By default none for images held in memory, which need none, and up to
            eight for files.
        val_fraction: Share of the training images, class by class, that is held out for validation.
        split_seed: Decides which images are held out; independent of ``--seed_everything``.
        shift: Augmentation: largest random move in each direction, as a share of the image.
        flip: Augmentation: mirror every second training image.
        auto_augment: Augmentation: colors, contrast, rotation and so on, drawn for each image: trivial
            (TrivialAugment Wide) or rand (RandAugment).
        erase: Augmentation: probability that a rectangle of the image becomes gray.
        mixup: Augmentation: blend each image and its target with another one's, in shares from Beta(mixup, mixup);
            0.2 is usual, 0 is off.
        cutmix: Augmentation: paste a box of another image, in shares from Beta(cutmix, cutmix); 1.0 is usual, 0 is
            off. With mixup too, each batch draws one of the two. Training accuracy under mixing counts the class that
            has the larger share.
    """

    def __init__(
        self,
        batch_size: int = 64,
        num_workers: int | None = None,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        shift: float = 0.125,
        flip: bool = True,
        auto_augment: Literal["trivial", "rand"] | None = None,
        erase: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # of the subclass too
        make_plain(self.hparams)
        require("--data.batch_size", batch_size, 1)
        require("--data.num_workers", num_workers or 0, 0)
        require("--data.val_fraction", val_fraction, 0, 1)
        require("--data.shift", shift, 0, 0.99)
        require("--data.erase", erase, 0, 1)
        require("--data.mixup", mixup, 0)
        require("--data.cutmix", cutmix, 0)
        self.batch_size = int(batch_size)
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.shift, self.flip = shift, flip
        self.per_image = per_image_transform(auto_augment, erase) if auto_augment or erase else None
        self.mixup, self.cutmix = mixup, cutmix
        self.class_names: list[str] | None = None
        self.datasets: dict[str, ImageDataset] = {}

    def missing(self) -> str | None:
        """Says in a sentence what stands in the way of reading the data, ``None`` if nothing does; reads nothing."""
        return None

    def load(self, stage: str) -> dict[str, ImageDataset]:
        """Reads the images of a stage and sets ``class_names``; a subclass implements it.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``.

        Returns:
            ``train`` and ``val`` for fit, ``val`` for validate, ``test`` for test, ``predict`` for predict; more is
            allowed.
        """
        raise NotImplementedError

    def split_train_val(self, pool: ImageDataset) -> dict[str, ImageDataset]:
        """Cuts ``val`` out of the training images, the same ones in every process and every run."""
        kept, val = stratified_split(pool.labels, self.val_fraction, self.split_seed)
        if not len(val) or not len(kept):
            raise MisconfigurationException(
                f"--data.val_fraction {self.val_fraction} of {len(pool)} training images leaves {len(kept)} to train "
                f"on and {len(val)} to validate on; both are needed."
            )
        return {"train": pool.subset(kept), "val": pool.subset(val)}

    def setup(self, stage: str) -> None:
        """Reads what the stage needs; called by the Trainer in every process."""
        loaded = self.load(TrainerFn(stage).value)  # the Trainer's own values do not print as their names
        self.datasets.update({name: loaded[name] for name in STAGES[stage]})

    @property
    def split_fingerprint(self) -> str:
        """Hash of the names of the images trained on; equal for equal splits."""
        names = "\n".join(sorted(self.datasets["train"].names)) if "train" in self.datasets else ""
        return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()[:16]

    @property
    def class_counts(self) -> dict[str, list[int]]:
        """Images of each class, in the order of ``class_names``, in each set that was read."""
        classes = len(self.class_names or ())
        return {
            name: images.labels[images.labels >= 0].bincount(minlength=classes).tolist()
            for name, images in self.datasets.items()
        }

    # Loaders

    def train_dataloader(self) -> ResumableDataLoader:
        """Returns shuffled batches; the order is a function of the seed and the epoch."""
        images = self.datasets["train"]
        sampler = ResumableDistributedSampler(images, shuffle=True, seed=_seed(), **self._shard())
        loader = ResumableDataLoader(images, sampler=sampler, **self._loader_options(images))
        trainer = self.trainer
        if trainer is not None:
            loader.batches_done = lambda: _batches_done(trainer)
        return loader

    def val_dataloader(self) -> DataLoader[Batch]:
        """Returns the held-out images, each once."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Batch]:
        """Returns the test images, each once."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Batch]:
        """Returns the images to predict, each once."""
        return self._loader("predict")

    def _loader(self, name: str) -> DataLoader[Batch]:
        images = self.datasets[name]
        return DataLoader(
            images, sampler=DistributedEvalSampler(images, **self._shard()), **self._loader_options(images)
        )

    def _loader_options(self, images: ImageDataset) -> dict[str, Any]:
        workers = self.num_workers
        if workers is None:
            workers = 0 if isinstance(images, InMemoryDataset) else min(8, os.cpu_count() or 1)
        return {
            "batch_size": self.batch_size,
            "collate_fn": collate_shared,
            "num_workers": workers,
            "persistent_workers": workers > 0,  # starting two workers anew costs about 0.6 s an epoch
            "pin_memory": torch.cuda.is_available(),
        }

    def _shard(self) -> dict[str, Any]:
        """Which share of the images this process works on; the same for the ranks of one tensor-parallel group."""
        kwargs = self.trainer.distributed_sampler_kwargs if self.trainer else None
        return kwargs or {"num_replicas": 1, "rank": 0}

    # On the device

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Augments a training batch."""
        if self.trainer is not None and self.trainer.training:
            return self.augment(batch, self.trainer.fit_loop.total_batch_idx + 1, self._shard()["rank"])
        return batch

    def augment(self, batch: Batch, step: int, rank: int = 0) -> Batch:
        """Augments a training batch on its device.

        Before that it seeds the generators from (seed, batch number, process). Every random draw from here to the end
        of the training step, augmentation and dropout alike, is thereby a function of these three, in a resumed run
        and under another training loop too.

        Args:
            batch: On its device.
            step: Number of the batch since the run began.
            rank: Which process's batch it is.
        """
        _seed_device(batch["image"].device, _seed(step, rank))
        batch["image"] = random_shift_flip(batch["image"], self.shift, self.flip)
        if self.per_image is not None:
            batch["image"] = self.per_image(batch["image"])
        if self.mixup or self.cutmix:
            self._mix(batch)
        return batch

    def _mix(self, batch: Batch) -> None:
        from vit_finetune.data import transforms

        images, labels, classes = batch["image"], batch["label"], len(self.class_names or [])
        batch["image"], batch["target"] = transforms.mix(images, labels, self.mixup, self.cutmix, classes)
        batch["label"] = batch["target"].argmax(1)


def collate_shared(batch: Batch) -> Batch:
    """Stands in for collation: the set hands out whole batches.

    A worker moves them to shared memory here. Left to the queue between the processes, this would happen in a thread
    whose failure, for want of room in /dev/shm, nobody hears of: the run would wait for ever.
    """
    if get_worker_info() is not None:
        for value in batch.values():
            if isinstance(value, torch.Tensor):
                value.share_memory_()
    return batch


def _batches_done(trainer: Any) -> int:
    """Batches trained on in the epoch at hand; none of a finished one, since the next one begins at its beginning."""
    epochs = trainer.fit_loop.epoch_progress.current
    if epochs.processed == epochs.started:
        return 0
    done: int = trainer.fit_loop.epoch_loop.batch_progress.current.processed
    return done


def _seed(*position: int) -> int:
    """A seed for a place in the run, independent of those for all other places and global seeds.

    The global seed is that of ``--seed_everything``, which Lightning hands on to all processes in a variable.
    """
    entropy = (int(os.environ.get("PL_GLOBAL_SEED", "0")), *position)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def _seed_device(device: torch.device, seed: int) -> None:
    """Seeds the default generators of the CPU and of one device.

    ``torch.manual_seed`` does so for every kind of device there is; for those not in use it queues the call with its
    stack trace, which takes a millisecond a step and memory without end.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        getattr(torch, device.type).manual_seed(seed)
