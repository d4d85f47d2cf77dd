"""Class weights: their values, the weighted loss against a hand count, refused values, the warning of fit."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from tests.conftest import TINY, TINY_KWARGS, equal, make_tree, only, scalars, weights
from vit_finetune import ImageFolder, ViTClassifier, main
from vit_finetune.model.class_weights import for_training

CPU_DEVICE = torch.device("cpu")
LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 0, 0, 1, 2, 1])


def weighted(weights: list[float] | None, **options: object) -> ViTClassifier:
    module = ViTClassifier("vit_tiny_patch16_224", 32, pretrained=False, timm_kwargs=TINY_KWARGS, **options)
    module.class_weights = None if weights is None else torch.tensor(weights)
    return module


@pytest.fixture
def imbalanced(tmp_path: Path) -> Path:
    """Ten training images of a, five of b, one of c; three of each for validation."""
    tree = make_tree(tmp_path / "imbalanced", {"train": 10, "val": 3}, side=32)
    for name, first in (("b", 5), ("c", 1)):
        for number in range(first, 10):
            (tree / "train" / name / f"{number:02d}.png").unlink()
    return tree


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    counts = [10, 5, 1]
    weights = for_training("balanced", "abc", counts, CPU_DEVICE)
    assert weights is not None and weights.dtype == torch.float32
    # compute_class_weight("balanced", classes=[0, 1, 2], y=[0] * 10 + [1] * 5 + [2])
    assert weights.tolist() == pytest.approx([0.53333333, 1.06666667, 5.33333333])
    assert float((weights * torch.tensor(counts)).sum()) == pytest.approx(16)  # the mean weight of an image is 1


def test_weighted_sum_is_divided_by_the_number_of_images() -> None:
    module = weighted([0.5, 1.0, 4.0])
    losses = F.cross_entropy(LOGITS, LABELS, reduction="none")
    expected = (torch.tensor([0.5, 0.5, 0.5, 1.0, 4.0, 1.0]) * losses).sum() / 6
    assert float(module.training_loss(LOGITS, LABELS)) == pytest.approx(float(expected))
    parts = [module.training_loss(LOGITS[i : i + 2], LABELS[i : i + 2]) for i in (0, 2, 4)]
    assert float(sum(parts)) / 3 == pytest.approx(float(expected))  # three processes, or three accumulated batches


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_targets_have_the_weights_of_their_classes(smoothing: float) -> None:
    weights = torch.tensor([0.5, 1.0, 4.0])
    module = weighted(weights.tolist(), label_smoothing=smoothing)
    mixed = 0.7 * F.one_hot(LABELS, 3) + 0.3 * F.one_hot(LABELS.roll(1), 3)
    smooth = mixed * (1 - smoothing) + smoothing / 3
    expected = -(weights * smooth * LOGITS.log_softmax(-1)).sum() / 6
    assert float(module.training_loss(LOGITS, mixed)) == pytest.approx(float(expected))
    hard, soft = (module.training_loss(LOGITS, target) for target in (LABELS, F.one_hot(LABELS, 3).float()))
    assert float(hard) == pytest.approx(float(soft))


def test_equal_weights_change_nothing() -> None:
    for smoothing in (0.0, 0.1):
        losses = [weighted(w, label_smoothing=smoothing).training_loss(LOGITS, LABELS) for w in (None, [1.0, 1.0, 1.0])]
        assert float(losses[0]) == pytest.approx(float(losses[1]))


def test_only_the_training_loss_is_weighted(imbalanced: Path, tmp_path: Path) -> None:
    """With a learning rate of zero the epoch can be counted again; the option stays a word in the checkpoint."""
    data = [
        "--data=ImageFolder",
        f"--data.root={imbalanced}",
        "--data.shift=0",
        "--data.crop_scale=0",
        "--data.flip=false",
    ]
    main(["fit", *TINY, *data, "--model.lr=0", "--model.min_lr=0", "--model.class_weights=balanced"])
    last = only(tmp_path / "runs", "last.ckpt")
    assert torch.load(last, weights_only=True)["hyper_parameters"]["class_weights"] == "balanced"
    module, folder = ViTClassifier.load(last), ImageFolder(str(imbalanced))
    folder.setup("fit")
    tags = scalars(tmp_path / "runs")
    weights = {"train": torch.tensor([16 / 30, 16 / 15, 16 / 3]), "val": torch.ones(3)}
    for split, weight in weights.items():
        images = folder.datasets[split]
        with torch.no_grad():
            logits = module(images.images)
        expected = (F.cross_entropy(logits, images.labels, reduction="none") * weight[images.labels]).mean()
        assert tags[f"{split}/loss"][-1][1] == pytest.approx(float(expected), abs=1e-5)
        accuracy = (logits.argmax(1) == images.labels).float().mean()
        assert tags[f"{split}/acc"][-1][1] == pytest.approx(float(accuracy), abs=1e-6)


def test_a_list_trains_with_mixing_smoothing_and_16_bits(folder_args: list[str], tmp_path: Path) -> None:
    options = ["--model.class_weights=[1, 2, 4]", "--model.label_smoothing=0.1", "--data.mixup=0.2", "--data.cutmix=1"]
    main(["fit", *folder_args, *options, "--trainer.precision=bf16-true", "--trainer.accumulate_grad_batches=2"])
    stored = torch.load(only(tmp_path, "last.ckpt"), weights_only=True)
    assert stored["hyper_parameters"]["class_weights"] == [1.0, 2.0, 4.0]
    assert all(value.isfinite().all() for value in stored["state_dict"].values())


def test_resumed_run_equals_an_uninterrupted_one(imbalanced: Path, tmp_path: Path) -> None:
    """Bit for bit, weights and metrics, with everything that changes loss, selection and evaluation."""
    options = [*TINY, "--data=ImageFolder", f"--data.root={imbalanced}", "--trainer.max_epochs=3", "--data.mixup=0.2"]
    options += ["--model.class_weights=balanced", "--model.tta=flip", "--best_checkpoint.monitor=val/acc_macro"]
    main(["fit", *options, "--experiment=whole"])
    stop = "--trainer.callbacks=tests.test_checkpoint.StopAfterTwo"
    main(["fit", *options, "--experiment=parts", stop])
    last = only(tmp_path / "runs" / "parts", "last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 8
    main(["fit", *options, f"--ckpt_path={last}"])
    assert equal(weights(only(tmp_path / "runs" / "whole", "last.ckpt")), weights(last))
    whole, parts = (scalars(tmp_path / "runs" / name) for name in ("whole", "parts"))
    for tag in ("train/loss", "train/loss_step", "val/loss", "val/acc_macro"):
        assert whole[tag] == parts[tag], tag


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[1, 2]", "class_weights [1.0, 2.0] has the length 2; expected one positive number for each of the 3 classes"),
        ("[1, 0, 2]", "class_weights [1.0, 0.0, 2.0]: 0.0 is not a positive number; expected one for each class"),
        ("[1, .nan, 2]", "nan is not a positive number"),
        ("[1, .inf, 2]", "inf is not a positive number"),
        ("equal", "--model.class_weights: expected one of: balanced, list[float], null; got 'equal'"),
    ],
)
def test_refused_values(value: str, message: str, folder_args: list[str], fails: Callable[..., str]) -> None:
    assert message in fails("fit", *folder_args, f"--model.class_weights={value}")


def test_balanced_needs_images_of_each_class(folder_args: list[str], tree: Path, fails: Callable[..., str]) -> None:
    shutil.rmtree(tree / "train" / "c")
    options = ["--model.class_weights=balanced", "--model.class_names=[a, b, c]"]
    message = fails("fit", *folder_args, *options)
    assert "--model.class_weights balanced: no training images of c; expected at least one of each class" in message
    main(["fit", *folder_args, "--model.class_weights=[1, 1, 2]", "--model.class_names=[a, b, c]"])


def test_balanced_needs_a_data_module() -> None:
    module = weighted(None, class_weights="balanced", class_names=["a"])
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
    with pytest.raises(MisconfigurationException, match="needs the class counts of an ImageDataModule"):
        trainer.fit(module, DataLoader([]))


@pytest.mark.parametrize(("counts", "warns"), [([100, 10, 50], True), ([99, 10, 50], False), ([100, 0, 50], False)])
def test_warning_from_ten_times_the_images(counts: list[int], warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert for_training(None, "abc", counts, CPU_DEVICE) is None
        for_training("balanced", "abc", [100, 10, 50], CPU_DEVICE)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == warns
    for text in texts:
        assert "from 10 training images of b to 100 of a" in text
        assert "--model.class_weights balanced" in text and "--best_checkpoint.monitor val/acc_macro" in text


def test_fit_warns_once(imbalanced: Path) -> None:
    command = ["fit", *TINY, "--data=ImageFolder", f"--data.root={imbalanced}"]
    for options, expected in (([], 1), (["--model.class_weights=balanced"], 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            main([*command, *options])
        assert sum("The classes are imbalanced" in str(warning.message) for warning in caught) == expected
