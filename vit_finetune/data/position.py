"""Position of a run in its data: seeds of its steps, and where a resumed run continues, also in other batches."""

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer


class GlobalBatch(NamedTuple):
    """Images of one optimizer step.

    Args:
        batch_size: Images per batch and device.
        accumulate_grad_batches: Batches per optimizer step.
        replicas: Devices that train on different images.
    """

    batch_size: int
    accumulate_grad_batches: int
    replicas: int

    @property
    def images(self) -> int:
        """Number of images, over all devices."""
        return self.batch_size * self.accumulate_grad_batches * self.replicas

    def __str__(self) -> str:
        devices = f"{self.replicas} device{'s' if self.replicas > 1 else ''}"
        accumulated = f"--trainer.accumulate_grad_batches {self.accumulate_grad_batches}"
        return f"--data.batch_size {self.batch_size} {accumulated} on {devices}"


def trained_with(state: Mapping[str, int], now: GlobalBatch) -> GlobalBatch:
    """Return the global batch of a loader's state; what an older checkpoint does not hold is that of this run."""
    return GlobalBatch(*(state.get(name, value) for name, value in now._asdict().items()))


def images_seen(state: Mapping[str, int], now: GlobalBatch) -> int:
    """Return the number of images that all devices have trained on in the epoch of a loader's state.

    Args:
        state: Of :class:`ResumableDataLoader`.
        now: Global batch of this run.
    """
    # Version 0.1.0 had another word before "_done".
    per_device = next((done for name, done in state.items() if name.endswith("_done")), 0)
    return per_device * trained_with(state, now).replicas


def refusal(state: Mapping[str, int], now: GlobalBatch) -> str | None:
    """Return the reason why a run cannot continue within its epoch with these batches, ``None`` if it can.

    It can if the images seen are whole optimizer steps: every other image of the epoch is then trained on once.
    """
    then, seen = trained_with(state, now), images_seen(state, now)
    if then == now or seen % now.images == 0:
        return None
    ways = [then]
    per_device, rest = divmod(then.images, now.replicas)
    if not rest:  # the same global batch on the devices of this run, in batches that are not larger than given
        size = max(size for size in range(1, min(now.batch_size, per_device) + 1) if per_device % size == 0)
        ways.append(GlobalBatch(size, per_device // size, now.replicas))
    return (
        f"The run was saved within an epoch, after {seen} of its images, with {then}. {now} makes {now.images} images "
        f"per optimizer step, and {seen} is not divisible by {now.images}. Resume with "
        f"{', or with '.join(map(str, dict.fromkeys(ways)))}. At the end of an epoch all of these can be changed."
    )


def step_seed(*position: int) -> int:
    """Return a seed for a position in training, independent of those of other positions and other global seeds.

    Lightning passes the global seed, ``--seed_everything``, to all processes in the environment variable read here.
    """
    entropy = (int(os.environ.get("PL_GLOBAL_SEED", "0")), *position)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def seed_generators(device: torch.device, step: int, rank: int = 0) -> None:
    """Seed the default generators for one training step, before its images are augmented.

    Every random draw from here to the end of the step, in augmentation and dropout alike, is then a function of
    (``--seed_everything``, step, rank). That makes a resumed run equal to an uninterrupted one, and training loops of
    other frameworks equal to the Trainer's.

    Args:
        device: Device of the batch.
        step: Number of the batch since the beginning of training.
        rank: Rank of the process among those that work on different images.
    """
    seed = step_seed(step, rank)
    # Not torch.manual_seed: for every kind of device that is not in use it queues a call with its stack trace, which
    # takes a millisecond per step and ever more memory.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        getattr(torch, device.type).manual_seed(seed)


def batches_done(trainer: Trainer) -> int:
    """Return the number of batches trained on in the current epoch; 0 after its end, when the next one is due."""
    loop = trainer.fit_loop
    epochs = loop.epoch_progress.current.state_dict()  # the attributes "processed" and "started" are not declared
    processed: int = loop.epoch_loop.batch_progress.current.state_dict()["processed"]
    return 0 if epochs["processed"] == epochs["started"] else processed


def skip_trained_batches(trainer: Trainer) -> None:
    """Count the images that a resumed run has trained on in its epoch as batches of this run's size.

    Lightning restores a number of batches. Validation and the end of the epoch follow from it.
    """
    skipped: int = getattr(trainer.train_dataloader, "batches_skipped", 0)
    if skipped:
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        batches.increment_by(min(skipped, int(trainer.num_training_batches)) - batches.state_dict()["processed"])


def steps_left(trainer: Trainer) -> int:
    """Return the number of optimizer steps until ``max_epochs`` or ``max_steps`` ends the run."""
    left = []
    if trainer.max_steps != -1:
        left.append(trainer.max_steps - trainer.global_step)
    if trainer.max_epochs not in (None, -1) and math.isfinite(trainer.num_training_batches):
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        done = batches_done(trainer) // trainer.accumulate_grad_batches
        left.append(per_epoch * (max(trainer.max_epochs, 1) - trainer.current_epoch) - done)
    return min(left)
