"""Batches, samplers, the resumable loader, and random numbers that are a function of seed, step and rank."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from tests.conftest import equal
from vit_finetune import Shapes
from vit_finetune.data.datasets import Batch, InMemoryDataset
from vit_finetune.data.samplers import DistributedEvalSampler, stratified_split


def dataset(count: int) -> InMemoryDataset:
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 3, 2, 2)
    return InMemoryDataset(images, torch.arange(count) % 3, [f"{i}.png" for i in range(count)])


def test_batch_is_one_index_operation() -> None:
    batch = dataset(10).__getitems__([7, 2])
    assert batch["image"].shape == (2, 3, 2, 2) and batch["image"].dtype == torch.uint8
    assert batch["image"][:, 0, 0, 0].tolist() == [7, 2]
    assert batch["label"].tolist() == [1, 2] and batch["index"].tolist() == [7, 2]


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_eval_sampler_yields_each_image_once(replicas: int) -> None:
    data = dataset(5)
    shards = [list(DistributedEvalSampler(data, num_replicas=replicas, rank=rank)) for rank in range(replicas)]
    assert len({len(shard) for shard in shards}) == 1
    batches = [data.__getitems__(shard) for shard in shards]
    assert sorted(i for batch in batches for i in batch["index"].tolist() if i >= 0) == [0, 1, 2, 3, 4]
    padding = [label for batch in batches for i, label in zip(batch["index"], batch["label"], strict=True) if i < 0]
    assert all(label == -1 for label in padding)


def test_stratified_split() -> None:
    labels = torch.tensor([0] * 40 + [1] * 20 + [2] * 10)
    train, val = stratified_split(labels, 0.1, seed=3)
    assert torch.equal(torch.cat([train, val]).sort().values, torch.arange(70))
    assert labels[val].bincount().tolist() == [4, 2, 1]
    assert torch.equal(val, stratified_split(labels, 0.1, seed=3)[1])
    assert not torch.equal(val, stratified_split(labels, 0.1, seed=4)[1])


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(0.0, [0, 0, 0, 0]), (0.1, [0, 1, 1, 2]), (0.5, [0, 1, 2, 10]), (0.9, [0, 1, 2, 18]), (1.0, [1, 2, 3, 20])],
)
def test_small_classes_are_in_both_parts(fraction: float, expected: list[int]) -> None:
    labels = torch.tensor([0] * 1 + [1] * 2 + [2] * 3 + [3] * 20)
    first, second = stratified_split(labels, fraction, seed=0)
    assert labels[second].bincount(minlength=4).tolist() == expected
    assert torch.equal(torch.cat([first, second]).sort().values, torch.arange(26))


def test_splits_of_larger_classes_are_those_of_earlier_versions() -> None:
    """A small class draws as many random numbers as before, so that the classes after it keep their images."""
    labels = torch.tensor([0] * 3 + [1] * 20)
    _, val = stratified_split(labels, 0.1, seed=0)
    assert val[1:].tolist() == [4, 16]  # recorded before small classes were treated differently


def test_order_depends_on_seed_and_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0)):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        data = Shapes(train_size=100, test_size=10)
        data.setup("fit")
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        order = torch.cat([batch["index"] for batch in loader])
        assert torch.equal(order.sort().values, torch.arange(90))
        assert torch.equal(orders.setdefault((seed, epoch), order), order)
    assert len({tuple(order.tolist()) for order in orders.values()}) == 3


class OwnAugmentation(Shapes):
    """A data module that overrides ``augment`` and does not seed."""

    @override
    def augment(self, batch: Batch) -> Batch:
        batch["image"] = batch["image"] // 2
        return batch


class Linear(LightningModule):
    """A linear model on pixels with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(3072, 10))

    @override
    def training_step(self, batch: Batch) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch["image"] / 255), batch["label"])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("data", [Shapes, OwnAugmentation])
def test_run_resumed_within_an_epoch_is_equal_with_any_augmentation(data: type[Shapes], tmp_path: Path) -> None:
    """Dropout draws the same numbers, and the loader continues at the same image."""

    def fit(checkpoint: Path | None) -> dict[str, torch.Tensor]:
        model = Linear()
        torch.manual_seed(123 if checkpoint else 321)  # the state of the generators before does not matter
        saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(accelerator="cpu", max_epochs=2, callbacks=saver, use_distributed_sampler=False, **quiet)
        trainer.fit(model, datamodule=data(100, 10, batch_size=15), ckpt_path=checkpoint)
        assert trainer.global_step == 12
        return model.state_dict()

    uninterrupted = fit(None)
    assert equal(fit(tmp_path / "step=4.ckpt"), uninterrupted)


def test_random_numbers_of_a_step_depend_on_seed_step_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    data, draws = Shapes(), {}
    for position in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (0, 1, 0)):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(position[0]))
        data.seed_step(torch.device("cpu"), *position[1:])
        draw = torch.rand(5)
        assert torch.equal(draws.setdefault(position, draw), draw)
    assert len({tuple(draw.tolist()) for draw in draws.values()}) == 4
    data.seed_step(torch.device("cpu"), 1)
    assert torch.equal(torch.rand(5), draws[0, 1, 0])  # rank 0 is the default


@pytest.mark.parametrize(
    "state", [{"images_done": 30, "batch_size": 15, "replicas": 1}, {"images_done": 30}, {"pictures_done": 30}]
)
def test_loader_reads_the_state_of_any_version(state: dict[str, int]) -> None:
    data = Shapes(100, 10, batch_size=15)
    data.trainer = Trainer(logger=False, accelerator="cpu")
    data.setup("fit")
    loader = data.train_dataloader()
    everything = torch.cat([batch["index"] for batch in loader])
    loader.load_state_dict(state)
    assert torch.equal(torch.cat([batch["index"] for batch in loader]), everything[30:])
    assert torch.equal(torch.cat([batch["index"] for batch in loader]), everything)
    expected = {"images_done": 0, "batch_size": 15, "accumulate_grad_batches": 1, "replicas": 1}
    assert loader.state_dict() == expected
