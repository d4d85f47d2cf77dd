"""The order in which images are visited: samplers, a resumable loader, and stratified splits."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from vit_finetune.data.datasets import Batch


class ResumableDistributedSampler(DistributedSampler[Any]):
    """The order of an epoch, a function of seed and epoch, from its beginning or from where a checkpoint was written.

    Set ``skip`` to leave out that many images of this process at the beginning of the next epoch that is begun.
    """

    skip = 0

    def __iter__(self) -> Iterator[int]:
        """Yields this process's positions."""
        order, start = list(super().__iter__()), self.skip
        self.skip = 0
        return iter(order[start:])


class ResumableDataLoader(DataLoader[Batch]):
    """A loader that a run resumed in the middle of an epoch continues (Lightning's protocol for stateful loaders).

    ``waited`` is the time in seconds that training has spent waiting for batches so far.
    """

    batches_done: Callable[[], int]
    sampler: ResumableDistributedSampler
    batch_size: int
    waited = 0.0

    def __iter__(self) -> Any:
        """Begins an epoch, and starts its workers, at once."""
        return self._on_the_clock(super().__iter__())

    def _on_the_clock(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Returns the number of images this process has trained on in this epoch."""
        return {"images_done": self.batches_done() * self.batch_size}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Makes the next epoch go on after those images."""
        self.sampler.skip = state_dict["images_done"]


class DistributedEvalSampler(DistributedSampler[Any]):
    """Every image once and in order, over any number of processes.

    The stock sampler evens out the processes by repeating images, and a score then counts those twice. This one
    goes on past the end of the set instead; :class:`ImageDataset` marks what it returns there as fillers, which every
    process computes, as collective strategies need, and no metric counts.
    """

    def __iter__(self) -> Iterator[int]:
        """Yields this process's positions; those at ``len(dataset)`` and beyond are fillers."""
        return iter(range(self.rank, self.total_size, self.num_replicas))


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Cuts the same share of every class out of a set.

    Args:
        labels: int64, shape ``(N,)``.
        fraction: Share to hold out, from 0 to 1; each class gives the nearest whole number.
        seed: Alone decides which images are held out.

    Returns:
        Positions kept and positions held out, each ascending.
    """
    generator = torch.Generator().manual_seed(seed)
    val = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        val[members[order[: round(fraction * len(members))]]] = True
    return (~val).nonzero().flatten(), val.nonzero().flatten()
