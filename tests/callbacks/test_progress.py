"""Progress lines in a file, bars on a terminal."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from tests.conftest import CPU, TINY_KWARGS, TINY_MODEL, make_tree, only
from vit_finetune import ViTClassifier, main
from vit_finetune.callbacks.progress import RichProgress
from vit_finetune.data.datasets import InMemoryDataset, collate_shared


def test_lines_name_the_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vit_finetune.callbacks.progress.LINE_EVERY", 0.0)
    tree = make_tree(tmp_path / "images", {"train": 2, "val": 1, "test": 3})
    (tree / "test" / "broken.png").write_bytes(b"")
    data = ["--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=4", "--trainer.max_epochs=1"]
    main(["fit", *TINY_MODEL, *CPU, *data])
    capsys.readouterr()
    main(["predict", f"--ckpt_path={only(tmp_path, 'last.ckpt')}", *CPU, "--data.batch_size=4"])
    lines = capsys.readouterr().out.splitlines()
    speed = r"  [1-9]\d* images/s"
    batches = [line for line in lines if line.startswith("predict batch")]
    assert len(batches) == 3
    for number, line in enumerate(batches, 1):
        assert re.fullmatch(rf"predict batch {number}/3{speed}", line)
    assert re.fullmatch(rf"predictions  10 images, 1 of them unreadable{speed}  \S+\.csv  \S+\.jsonl", lines[-1])


class Descriptions(Callback):
    """The text beside the bar after each batch."""

    def __init__(self, bar: RichProgress) -> None:
        self.bar, self.seen = bar, list[str]()

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        assert self.bar.progress is not None
        self.seen.append(self.bar.progress.tasks[-1].description)


def test_bar_names_the_speed() -> None:
    model = ViTClassifier(
        "vit_tiny_patch16_224", img_size=32, pretrained=False, timm_kwargs=TINY_KWARGS, class_names=["a", "b"]
    )
    dataset = InMemoryDataset(torch.zeros(6, 3, 32, 32, dtype=torch.uint8), torch.zeros(6).long(), list("012345"))
    bar = RichProgress()
    descriptions = Descriptions(bar)
    callbacks: list[Callback] = [descriptions, bar]  # Lightning moves no callback but checkpoints
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=callbacks)
    trainer.predict(model, DataLoader(dataset, batch_size=2, collate_fn=collate_shared), return_predictions=False)
    assert "images/s" not in descriptions.seen[0]
    assert all(re.fullmatch(r"\S*Predicting  [1-9]\d* images/s", text) for text in descriptions.seen[1:])


@pytest.mark.parametrize(
    ("options", "validated"),
    [
        (["--trainer.check_val_every_n_epoch=2"], [False, True, False]),
        (["--trainer.check_val_every_n_epoch=null", "--trainer.val_check_interval=8"], [False, True, False]),
        ([], [True, True, True]),
    ],
)
def test_line_of_an_epoch_shows_what_was_measured_in_it(
    options: list[str], validated: list[bool], folder_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fit", *folder_args, "--trainer.max_epochs=3", *options])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ") and " done" in line]
    assert all("train/acc" in line for line in lines)
    assert ["val/acc" in line for line in lines] == ["val/loss" in line for line in lines] == validated


def test_bar_names_the_epoch_of_an_older_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    bar: Any = RichProgress()
    monkeypatch.setattr("lightning.pytorch.callbacks.RichProgressBar.get_metrics", lambda *_: {"val/acc": 0.5})
    monkeypatch.setattr("lightning.pytorch.callbacks.RichProgressBar.on_validation_end", lambda *_: None)
    trainer: Any = SimpleNamespace(current_epoch=1, sanity_checking=False)
    bar.on_validation_end(trainer, LightningModule())
    assert bar.get_metrics(trainer, LightningModule()) == {"val/acc": "0.500"}
    trainer.current_epoch = 2
    assert bar.get_metrics(trainer, LightningModule()) == {"val/acc": "0.500 (epoch 1)"}
