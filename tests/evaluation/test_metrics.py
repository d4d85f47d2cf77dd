"""Mean accuracy of the classes: equal to the test report, in any batches, and as the metric of the best checkpoint."""

from pathlib import Path

import pytest
import torch
from torchmetrics.functional.classification import multiclass_recall

from tests.conftest import only, scalars
from vit_finetune import main
from vit_finetune.evaluation.metrics import MacroAccuracy
from vit_finetune.evaluation.report import Report


@pytest.mark.parametrize("seed", range(5))
def test_macro_accuracy_equals_the_report_with_a_missing_class(seed: int) -> None:
    """Class 3 has no images but is predicted, which the macro average of torchmetrics counts as 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(101, 7, generator=generator)
    labels = torch.tensor([0, 1, 2, 4, 5, 6])[torch.randint(0, 6, (101,), generator=generator) ** 2 // 5]
    metric = MacroAccuracy(7)
    for start, stop in ((0, 40), (40, 100), (100, 101)):
        metric.update(logits[start:stop], labels[start:stop])
    report = Report.from_logits(logits, labels, list("abcdefg"))
    assert report.classes[3].support == 0 and (logits.argmax(1) == 3).any()
    assert float(metric.compute()) == pytest.approx(report.acc_macro, abs=1e-7)
    with_zero = multiclass_recall(logits, labels, 7, average="macro")
    assert float(with_zero) < report.acc_macro
    metric.reset()
    assert metric.compute().isnan()


def test_processes_add_up_images_not_means() -> None:
    """One image in the first process, three in the second."""
    logits, labels = torch.eye(3)[[0, 1, 1, 2]], torch.tensor([0, 0, 1, 2])
    first, second = MacroAccuracy(3), MacroAccuracy(3)
    first.update(logits[:1], labels[:1])
    second.update(logits[1:], labels[1:])
    first.merge_state(second)
    assert float(first.compute()) == pytest.approx(5 / 6)


def test_best_checkpoint_and_early_stopping_monitor_it(folder_args: list[str], tmp_path: Path) -> None:
    (tmp_path / "images" / "val" / "a" / "00.png").unlink()  # classes of different size
    options = ["--best_checkpoint.monitor=val/acc_macro", "--trainer.callbacks+=EarlyStopping"]
    options += ["--trainer.callbacks.monitor=val/acc_macro", "--trainer.callbacks.mode=max"]
    main(["fit", *folder_args, *options, "--trainer.max_epochs=2", "--model.lr=0.01"])
    tags = scalars(tmp_path / "runs")
    assert tags["best/val/acc_macro"] == [(0, max(value for _, value in tags["val/acc_macro"]))]
    assert "train/acc_macro" not in tags
    only(tmp_path / "runs", "best-*.ckpt")
