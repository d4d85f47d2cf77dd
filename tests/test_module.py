"""Metrics, losses and logs with exact values."""

import math
import re
import textwrap
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy

import vit_finetune.module
from tests.conftest import CPU, TINY, TINY_KWARGS, make_tree, only, scalars, weights
from vit_finetune import Shapes, ViTClassifier, main
from vit_finetune.evaluation.metrics import StageMetrics


def model(**options: object) -> ViTClassifier:
    module = ViTClassifier(
        "vit_tiny_patch16_224", 32, pretrained=False, timm_kwargs=TINY_KWARGS, class_names=list("abc"), **options
    )
    module.configure_model()
    return module


def batch(logits: torch.Tensor, labels: list[int], padding: int = 0) -> dict[str, torch.Tensor]:
    index = [*range(len(labels) - padding), *[-1] * padding]
    return {"image": logits, "label": torch.tensor(labels), "index": torch.tensor(index)}


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> ViTClassifier:
    """A module whose network returns its input, so that tests choose the logits."""
    module = model(label_smoothing=0.1)
    monkeypatch.setattr(ViTClassifier, "forward", lambda self, images: images)
    return module


def test_uneven_last_batch_counts_images_not_batches(echo: ViTClassifier) -> None:
    right = torch.eye(3)[[0, 1, 2, 0]] * 50
    echo.validation_step(batch(right, [0, 1, 2, 0]), 0)
    echo.validation_step(batch(right[:1], [1]), 1)  # the single last image is wrong
    metrics = echo.val_metrics
    assert metrics.accuracy["acc"].compute() == pytest.approx(0.8)
    assert metrics.loss.compute() == pytest.approx(50 / 5)


def test_padding_samples_are_not_counted(echo: ViTClassifier) -> None:
    logits = torch.eye(3)[[0, 1, 2]] * 50
    echo.test_step(batch(logits, [0, 1, -1], padding=1), 0)
    echo.test_step(batch(logits, [-1, -1, -1], padding=3), 1)
    assert echo.test_metrics.accuracy["acc"].compute() == 1.0


def test_label_smoothing_is_for_training_only(echo: ViTClassifier) -> None:
    perfect = torch.eye(3) * 50
    echo.validation_step(batch(perfect, [0, 1, 2]), 0)
    assert echo.val_metrics.loss.compute() == pytest.approx(0, abs=1e-6)
    smoothed = F.cross_entropy(perfect, torch.arange(3), label_smoothing=0.1)
    assert smoothed > 1


def test_top5_where_there_are_more_than_five_classes() -> None:
    assert set(StageMetrics(5).accuracy.keys()) == {"acc"}
    assert set(StageMetrics(5, macro=True).accuracy.keys()) == {"acc", "acc_macro"}
    metrics = StageMetrics(6)
    logits = torch.arange(6.0).repeat(6, 1)
    metrics.add(torch.zeros(6), logits, torch.arange(6))
    assert metrics.accuracy["acc"].compute() == pytest.approx(1 / 6)
    assert metrics.accuracy["acc_top5"].compute() == pytest.approx(5 / 6)


def test_logged_epoch_metrics_equal_a_hand_count(tmp_path: Path) -> None:
    """A learning rate of zero keeps the weights, so that the epoch's means can be counted again afterwards."""
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 3}, side=32)
    frozen = [
        "--model.lr=0",
        "--model.min_lr=0",
        "--data.shift=0",
        "--data.crop_scale=0",
        "--data.flip=false",
        "--trainer.val_check_interval=2",
    ]
    main(["fit", *TINY, "--data=ImageFolder", f"--data.root={tree}", *frozen, "--trainer.log_every_n_steps=2"])
    run = tmp_path / "runs"
    module = ViTClassifier.load_from_checkpoint(next(run.rglob("last.ckpt"))).eval()
    from vit_finetune import ImageFolder

    data = ImageFolder(str(tree))
    data.setup("fit")
    tags = scalars(run)
    for split in ("train", "val"):
        images = data.datasets[split]
        with torch.no_grad():
            logits = module(images.images)
        assert tags[f"{split}/loss"][-1][1] == pytest.approx(float(F.cross_entropy(logits, images.labels)), abs=1e-5)
        accuracy = (logits.argmax(1) == images.labels).float().mean()
        assert tags[f"{split}/acc"][-1][1] == pytest.approx(float(accuracy), abs=1e-6)
    assert [step for step, _ in tags["val/acc"]] == [1, 3]
    assert [step for step, _ in tags["train/loss_step"]] == [1, 3, 4]


# Options, and how far the first loss, computed with the initial weights, may be from that of a plain run.
VARIANTS: list[tuple[list[str], float]] = [
    (["--model.grad_checkpointing=true"], 0.0),
    (["--trainer.gradient_clip_val=1"], 0.0),
    (["--trainer.accumulate_grad_batches=2"], 0.0),
    *(([f"--model.optimizer={name}"], 0.0) for name in ("sgd", "lion", "lamb", "muon", "adan", "nadamw")),
    (["--trainer.precision=64-true"], 1e-6),
    (["--trainer.gradient_clip_val=1", "--trainer.precision=bf16-mixed"], 0.02),
    (["--trainer.precision=bf16-true"], 0.05),
]


@pytest.mark.parametrize(("options", "tolerance"), VARIANTS, ids=str)
def test_variants_train(folder_args: list[str], tmp_path: Path, options: list[str], tolerance: float) -> None:
    """Each starts from the loss of a plain run, and moves the weights to other finite values."""
    torch.save(model().net.state_dict(), tmp_path / "initial.pth")  # in 64 bits the generator would draw other weights
    losses = {}
    common = [*folder_args, "--model.weights=initial.pth", "--trainer.log_every_n_steps=1"]
    for name, extra in (("plain", []), ("variant", options)):
        main(["fit", *common, *extra, f"--experiment={name}"])
        losses[name] = [value for _, value in scalars(tmp_path / "runs" / name)["train/loss_step"]]
    assert losses["variant"][0] == pytest.approx(losses["plain"][0], abs=tolerance)
    trained = weights(only(tmp_path / "runs" / "variant", "last.ckpt"))
    assert all(value.isfinite().all() for value in trained.values())
    assert len({float(value.double().sum()) for value in trained.values()}) > 1 and len(set(losses["variant"])) > 1


def docstring_examples() -> dict[str, str]:
    """The classes in the docstring of module.py, by name."""
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", vit_finetune.module.__doc__ or "")
    code = [textwrap.dedent(block) for block in blocks]
    return {re.search(r"class (\w+)", block)[1]: block for block in code}  # type: ignore[index]


@pytest.mark.parametrize("name", ["WithEntropy", "WithPolyLoss", "WithResNet"])
def test_docstring_examples_run(name: str, tmp_path: Path) -> None:
    """A metric of one's own, another loss, another network: the lines of the docstring, executed."""
    examples = docstring_examples()
    assert set(examples) == {"WithEntropy", "WithPolyLoss", "WithResNet"}
    scope: dict[str, Any] = {"torch": torch, "F": F, "timm": timm, "ViTClassifier": ViTClassifier}
    exec(examples[name], scope)
    options = {"pretrained": False, "img_size": 32, "timm_kwargs": TINY_KWARGS}
    module = scope[name]("vit_tiny_patch16_224", **options)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, use_distributed_sampler=False
    )
    trainer.fit(module, datamodule=Shapes(train_size=40, batch_size=8, val_fraction=0.25))
    if name == "WithEntropy":
        assert 0 < trainer.callback_metrics["val/entropy"] <= math.log(10) + 1e-5
    elif name == "WithPolyLoss":
        logits, target = torch.zeros(4, 10), torch.arange(4)
        assert module.training_loss(logits, target) == pytest.approx(math.log(10) + 0.9)
    else:
        assert type(module.net).__name__ == "ResNet" and module(torch.zeros(2, 3, 32, 32).byte()).shape == (2, 10)


def test_early_stopping_keeps_the_right_files(folder_args: list[str], tmp_path: Path) -> None:
    """With a learning rate of zero nothing improves: best is the first epoch, last is the newest."""
    options = ["--trainer.max_epochs=9", "--model.lr=0", "--model.min_lr=0", "--trainer.callbacks+=EarlyStopping"]
    options += ["--trainer.callbacks.monitor=val/acc", "--trainer.callbacks.mode=max", "--trainer.callbacks.patience=2"]
    main(["fit", *folder_args, *options])
    last, best = (torch.load(only(tmp_path, name), weights_only=True) for name in ("last.ckpt", "best-*.ckpt"))
    assert (best["epoch"], last["epoch"]) == (0, 2)


def test_norm_clipping_under_fsdp_is_left_to_fsdp(echo: ViTClassifier) -> None:
    """With the real strategy class; what it wraps needs CUDA and is stood in for."""
    clipped: list[float] = []
    strategy = FSDPStrategy.__new__(FSDPStrategy)
    strategy._model = Namespace(clip_grad_norm_=clipped.append)  # type: ignore[assignment]
    echo._trainer = Namespace(strategy=strategy)  # type: ignore[assignment]
    echo.configure_gradient_clipping(None, 0.5, "norm")
    assert clipped == [0.5]


def test_no_end_is_refused(folder_args: list[str], fails: object) -> None:
    assert "The schedule needs an end" in fails("fit", *folder_args, "--trainer.max_epochs=-1")  # type: ignore[operator]


def test_scalar_reads() -> None:
    """At most 0.1 scalar reads a step in steady state: on a GPU each one waits for the device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    counts = {}
    for limit in (20, 120):
        with Reads() as reads:
            main(
                ["fit", *TINY[:4], *CPU, "--data=Shapes", "--data.train_size=600", "--data.batch_size=4"]
                # Without validation, whose fit of the temperature reads as often as it takes to converge.
                + ["--trainer.max_epochs=1", f"--trainer.limit_train_batches={limit}", "--trainer.limit_val_batches=0"]
            )
        counts[limit] = reads.count
    assert counts[20] > 0
    assert (counts[120] - counts[20]) / 100 <= 0.1
