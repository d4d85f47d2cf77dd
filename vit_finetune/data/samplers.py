"""The order in which images are visited: samplers, a resumable loader, and stratified splits."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from vit_finetune.data import position
from vit_finetune.data.datasets import Batch


class ResumableDistributedSampler(DistributedSampler[int]):
    """Shuffled positions of one process, a function of seed and epoch, that can start in the middle of an epoch.

    Set ``skip`` to leave out this process's first ``skip`` positions of the next epoch.
    """

    skip = 0

    @override
    def __iter__(self) -> Iterator[int]:
        order, start = list(super().__iter__()), self.skip
        self.skip = 0
        return iter(order[start:])


class ResumableDataLoader(DataLoader[Batch]):
    """A training loader that continues in the middle of an epoch (Lightning's protocol for stateful loaders).

    Set ``trainer`` to the Trainer whose epoch is saved. ``waited`` is the time in seconds that training has waited for
    batches so far, ``batches_skipped`` the number of batches that the resumed epoch leaves out.
    """

    trainer: Trainer
    sampler: ResumableDistributedSampler
    batch_size: int
    batches_skipped = 0
    waited = 0.0

    @override
    def __iter__(self) -> Any:  # DataLoader declares a private class here
        # Not a generator function itself: the workers start here, not when the first batch is requested.
        return self._timed(super().__iter__())

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    @property
    def _global_batch(self) -> position.GlobalBatch:
        replicas = getattr(self.sampler, "num_replicas", 1)  # --trainer.overfit_batches replaces the sampler
        return position.GlobalBatch(self.batch_size, self.trainer.accumulate_grad_batches, replicas)

    def state_dict(self) -> dict[str, int]:
        """Return the number of images that this process has trained on in this epoch, and in what batches."""
        done = position.batches_done(self.trainer) * self.batch_size
        return {"images_done": done, **self._global_batch._asdict()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Make the next epoch start after those images.

        Raises:
            MisconfigurationException: They are not whole optimizer steps of this run's batches.
        """
        now = self._global_batch
        if reason := position.refusal(state_dict, now):
            raise MisconfigurationException(reason)
        self.sampler.skip = position.images_seen(state_dict, now) // now.replicas
        self.batches_skipped = self.sampler.skip // self.batch_size


class DistributedEvalSampler(DistributedSampler[int]):
    """Every image exactly once and in order, over any number of processes.

    PyTorch's sampler repeats images so that all processes have equally many, and metrics then count those twice. This
    one continues past the end of the dataset instead. :class:`ImageDataset` marks what it returns there as padding
    samples: every process computes them, as collective strategies require, but no metric counts them.
    """

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.total_size, self.num_replicas))


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split a dataset in two, with the same fraction of every class in the second part.

    Args:
        labels: int64, shape ``(N,)``.
        fraction: Fraction of each class that goes to the second part, from 0 to 1; the count is rounded. Between 0
            and 1, each class keeps at least one image in the first part and, if it has two or more, gets at least one
            in the second, so that no small class is missing from the metrics.
        seed: Seed of the split; nothing else affects it.

    Returns:
        Positions of the first part and of the second part, each ascending.
    """
    generator = torch.Generator().manual_seed(seed)
    second = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        count = round(fraction * len(members))
        if 0 < fraction < 1:
            count = min(max(count, 1), len(members) - 1)
        second[members[order[:count]]] = True
    return (~second).nonzero().flatten(), second.nonzero().flatten()
