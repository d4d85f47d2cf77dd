"""The temperature: fit, bounds, storage in the checkpoint, use in predictions."""

import csv
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import CPU, only
from vit_finetune import ViTClassifier, main
from vit_finetune.evaluation.calibration import fit_temperature


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_recovers_the_temperature_that_the_labels_were_drawn_with(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20_000, 5, generator=generator)
    labels = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).flatten()
    assert fit_temperature(logits, labels) == pytest.approx(temperature, rel=0.03)


def test_least_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (200,), generator=generator)
    logits = 2 * torch.randn(200, 3, generator=generator) + 3 * F.one_hot(labels)
    found = fit_temperature(logits, labels)
    losses = {t: float(F.cross_entropy(logits / t, labels)) for t in (found, found * 1.1, found / 1.1)}
    assert min(losses, key=losses.__getitem__) == found


def test_separable_images_stop_at_the_bound() -> None:
    labels = torch.arange(3)
    assert fit_temperature(10 * F.one_hot(labels).float(), labels) == pytest.approx(0.25)
    assert fit_temperature(10 * F.one_hot((labels + 1) % 3).float(), labels) == pytest.approx(4)


def test_checkpoint_keeps_it_and_predictions_use_it(folder_args: list[str], tmp_path: Path) -> None:
    main(["fit", *folder_args])
    last = only(tmp_path, "last.ckpt")
    stored = torch.load(last, weights_only=True)["vit_finetune"]["temperature"]
    model = ViTClassifier.load_from_checkpoint(last, map_location="cpu").eval()
    assert model.temperature == stored != 1.0 and not math.isnan(stored)
    main(["predict", f"--ckpt_path={last}", *CPU])
    data = torch.zeros(1, 3, 40, 40, dtype=torch.uint8)
    with torch.no_grad():
        logits = model(data)
    assert torch.equal(model.probabilities(logits), (logits / stored).softmax(-1))
    with open(only(tmp_path, "predictions.csv"), newline="") as file:
        assert len(list(csv.DictReader(file))) == 9
