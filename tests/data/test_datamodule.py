"""Splits, CIFAR files, synthetic images."""

import socket
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchvision import datasets

from tests.conftest import CPU, TINY_MODEL, only
from vit_finetune import CIFAR10, CIFAR100, Contours, Shapes, main
from vit_finetune.data.contours import Formulas
from vit_finetune.data.contours import draw as draw_contours
from vit_finetune.data.datasets import InMemoryDataset
from vit_finetune.data.shapes import NAMES


def test_validation_comes_from_train_and_is_not_augmented(cifar: Path) -> None:
    data = CIFAR10(str(cifar), val_fraction=0.2)
    data.prepare_data()
    data.setup("fit")
    train, val = data.datasets["train"], data.datasets["val"]
    assert len(train) == 80 and len(val) == 20
    assert set(train.names).isdisjoint(val.names) and len({*train.names, *val.names}) == 100
    assert val.labels.bincount().tolist() == [2] * 10
    first, again = next(iter(data.val_dataloader())), next(iter(data.val_dataloader()))
    assert torch.equal(first["image"], again["image"])
    data.setup("test")
    assert all(name.startswith("test/") for name in data.datasets["test"].names) and len(data.datasets["test"]) == 20


def test_split_has_its_own_seed_and_a_fingerprint(cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prints = {}
    for global_seed, split_seed in ((0, 0), (1, 0), (0, 1)):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(global_seed))
        data = CIFAR10(str(cifar), split_seed=split_seed)
        data.setup("fit")
        prints[global_seed, split_seed] = data.split_fingerprint
    assert prints[0, 0] == prints[1, 0] != prints[0, 1]


def test_cifar_pixels_and_labels(cifar: Path) -> None:
    data = CIFAR10(str(cifar))
    data.setup("test")
    published = datasets.CIFAR10(str(cifar), train=False)
    batch = next(iter(data.test_dataloader()))
    assert torch.equal(batch["image"][5].permute(1, 2, 0), torch.from_numpy(published.data[5]))
    assert batch["label"].tolist() == published.targets


def test_read_only_root_and_no_network_when_complete(cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("touched the network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    before = sorted(cifar.rglob("*"))
    data = CIFAR10(str(cifar))
    assert data.unavailable_reason() is None
    data.prepare_data()
    assert sorted(cifar.rglob("*")) == before  # no lock file either


@pytest.mark.parametrize("download", [True, False])
@pytest.mark.parametrize("state", ["absent", "junk archive", "half"])
def test_missing_cifar_is_explained(cifar: Path, monkeypatch: pytest.MonkeyPatch, download: bool, state: str) -> None:
    root = cifar.parent / "empty"
    if state == "junk archive":
        root.mkdir()
        (root / "cifar-10-python.tar.gz").write_bytes(b"<html>" * 200)
    if state == "half":
        (cifar / "cifar-10-batches-py" / "data_batch_3").unlink()
        root = cifar
    # Nothing listens on this port.
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    data = CIFAR10(str(root), download=download)
    problem = data.unavailable_reason()
    assert problem is not None and str(root) in problem and "quickstart.yaml" in problem
    assert ("--data.download is false" if not download else "cannot be reached") in problem
    assert ("incomplete or damaged" in problem) == (state != "absent")
    with pytest.raises(MisconfigurationException, match="CIFAR-10 is missing"):
        data.prepare_data()


def test_damaged_file_is_not_trained_on(cifar: Path) -> None:
    """The right layout is not enough: files must have the official checksums."""
    file = cifar / "cifar-10-batches-py" / "data_batch_1"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert CIFAR10(str(cifar), download=False).unavailable_reason() is not None


def test_fit_on_cifar_files(cifar: Path, tmp_path: Path) -> None:
    main(["fit", *TINY_MODEL, *CPU, "--trainer.max_epochs=1", f"--data.root={cifar}", "--data.batch_size=16"])
    last = torch.load(only(tmp_path / "runs", "last.ckpt"), weights_only=True)
    assert last["global_step"] == 6  # 90 images
    assert last["vit_finetune"]["class_names"] == CIFAR10.names
    assert last["vit_finetune"]["class_counts"] == {"train": [9] * 10, "val": [1] * 10}


def test_shapes_are_a_function_of_the_seed() -> None:
    def draw(**options: int) -> InMemoryDataset:
        data = Shapes(train_size=200, test_size=50, **options)
        data.setup("fit")
        data.setup("test")
        return data.datasets["train"], data.datasets["test"]  # type: ignore[return-value]

    (train, test), (again, _), (other, _) = draw(), draw(), draw(seed=1)
    assert train.images.shape == (180, 3, 32, 32) and train.images.dtype == torch.uint8
    assert torch.equal(train.images, again.images) and not torch.equal(train.images, other.images)
    assert test.labels.bincount().tolist() == [5] * len(NAMES)
    assert not any(torch.equal(test.images[0], image) for image in train.images)


def test_contours_are_a_function_of_the_seed() -> None:
    def draw(**options: int) -> InMemoryDataset:
        data = Contours(outlines=6, materials=2, train_size=160, test_size=40, **options)
        data.setup("fit")
        data.setup("test")
        assert not any(torch.equal(data.datasets["test"].images[0], image) for image in data.datasets["train"].images)
        return data.datasets["test"]  # type: ignore[return-value]

    test, again, other = draw(), draw(), draw(seed=1)
    assert test.images.shape == (40, 3, 32, 32) and test.images.dtype == torch.uint8
    assert torch.equal(test.images, again.images) and not torch.equal(test.images, other.images)
    assert test.labels.bincount().tolist() == [5] * 8


def test_contours_show_their_formulas() -> None:
    """A figure is brighter than its background in even classes, darker in odd ones; a material has two colors."""
    formulas = Formulas.random(12, 2, torch.Generator().manual_seed(0))
    assert formulas.outline.frequency[:, 0].tolist() == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    filled = (formulas.hole == 0).nonzero().flatten()
    labels = torch.cat([filled.repeat(50), torch.tensor([12] * 50)])
    images = draw_contours(labels, formulas, 0.0, 0.0, torch.Generator().manual_seed(0)).float() / 255
    middle, corners = images[..., 12:20, 12:20].mean((1, 2, 3)), images[..., ::31, ::31].mean((1, 2, 3))
    brighter = (middle > corners)[labels < 12]
    assert (brighter == (labels[labels < 12] % 2 == 0)).float().mean() > 0.9
    dark, light = formulas.palette[0].flatten(1).sort(0).values
    color = images[labels == 12].mean((0, 2, 3))
    assert (color > dark - 0.1).all() and (color < light + 0.1).all()


def test_linear_model_fails_on_shapes() -> None:
    """The best linear classifier on pixels stays below 50 % test accuracy; see the quickstart for a ViT."""
    data = Shapes(train_size=3000, test_size=1000)
    data.setup("fit")
    data.setup("test")

    def features(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        part = data.datasets[split]
        pixels = part.images.flatten(1).double() / 127.5 - 1  # type: ignore[attr-defined]
        return torch.cat([pixels, torch.ones(len(pixels), 1)], 1), part.labels

    x, labels = features("train")
    target = torch.nn.functional.one_hot(labels, 10).double()
    solution = torch.linalg.solve(x.T @ x + 100.0 * torch.eye(x.shape[1]), x.T @ target)
    x, labels = features("test")
    accuracy = ((x @ solution).argmax(1) == labels).double().mean()
    assert accuracy < 0.5


def test_cifar100_has_its_own_class_names(cifar100: Path) -> None:
    data = CIFAR100(str(cifar100), val_fraction=0.5)
    data.setup("fit")
    assert data.class_names == [f"class{i}" for i in range(100)]
    assert len(data.datasets["train"]) == len(data.datasets["val"]) == 500
    data.setup("test")
    assert data.datasets["test"].images.shape == (20, 3, 32, 32)  # type: ignore[attr-defined]
    assert "CIFAR-100 is missing" in (CIFAR100("nowhere", download=False).unavailable_reason() or "")
    assert "cifar-100-python.tar.gz" in (CIFAR100("nowhere", download=False).unavailable_reason() or "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "--data.batch_size is 0; expected at least 1"),
        ({"num_workers": -1}, "--data.num_workers is -1"),
        ({"val_fraction": 1.5}, "--data.val_fraction is 1.5; expected a value between 0 and 1"),
        ({"train_fraction": 0}, "--data.train_fraction is 0"),
        ({"shift": 1}, "--data.shift is 1"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        Shapes(**options)  # type: ignore[arg-type]


def test_fraction_of_the_training_images() -> None:
    """The same fraction of each class, then split; the test images stay, and only split_seed changes the choice."""
    whole, half, again, other = (
        Shapes(train_size=200, test_size=20, train_fraction=fraction, split_seed=seed)
        for fraction, seed in ((1.0, 0), (0.5, 0), (0.5, 0), (0.5, 1))
    )
    for data in (whole, half, again, other):
        data.setup("fit")
        data.setup("test")
    assert [len(half.datasets[name]) for name in ("train", "val", "test")] == [90, 10, 20]
    per_class = [sum(counts) for counts in zip(whole.class_counts["train"], whole.class_counts["val"], strict=True)]
    halves = [sum(counts) for counts in zip(half.class_counts["train"], half.class_counts["val"], strict=True)]
    assert halves == [count // 2 for count in per_class]
    assert again.datasets["train"].names == half.datasets["train"].names != other.datasets["train"].names
    assert half.count_images() == {"train": 90, "val": 10}
    assert half.datasets["train"].names == sorted(half.datasets["train"].names)


def test_empty_split_is_refused() -> None:
    message = "--data.val_fraction 0.0 splits 20 images into 20 for training and 0 for validation"
    with pytest.raises(MisconfigurationException, match=message):
        Shapes(train_size=20, val_fraction=0.0).setup("fit")
