"""Test-time augmentation: the mean probability of an image and its mirror image, in evaluation only."""

import csv
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import CPU, TINY_KWARGS, only, scalars
from vit_finetune import ImageFolder, ViTClassifier, main
from vit_finetune.evaluation.calibration import fit_temperature


def mean_probability(model: ViTClassifier, images: Tensor) -> Tensor:
    with torch.no_grad():
        return (model(images).softmax(-1) + model(images.flip(-1)).softmax(-1)) / 2


def tiny(tta: str | None) -> ViTClassifier:
    options = {"pretrained": False, "timm_kwargs": TINY_KWARGS, "class_names": list("abc"), "tta": tta}
    return ViTClassifier("vit_tiny_patch16_224", 32, **options)  # type: ignore[arg-type]


def test_logits_are_the_logarithm_of_the_mean_probability() -> None:
    model, images = tiny("flip"), torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    model.configure_model()
    torch.nn.init.normal_(model.net.head.weight)
    logits = model.eval().evaluation_logits(images)
    torch.testing.assert_close(logits.exp(), mean_probability(model, images))
    torch.testing.assert_close(logits, model.evaluation_logits(images.flip(-1)))
    assert not torch.allclose(model(images), model(images.flip(-1)), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_logits_stay_finite(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ViTClassifier, "forward", lambda self, images: images[:, :, 0, 0])
    images = torch.tensor([[6e4, -6e4], [-6e4, 6e4], [0.0, 0.0]], dtype=dtype)[None, :, None, :]
    logits = tiny("flip").evaluation_logits(images)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[0], torch.tensor([0.5, 0.5, 0.0]).log().clamp(min=-6e4), atol=200, rtol=0)
    assert torch.equal(tiny(None).evaluation_logits(images), images[:, :, 0, 0].float())


def test_a_checkpoint_trained_without_it(folder_args: list[str], tree: Path, tmp_path: Path) -> None:
    """Report, TensorBoard and table of predictions hold the mean, divided by the temperature after averaging."""
    main(["fit", *folder_args, "--model.lr=0.01"])
    best = only(tmp_path / "runs", "best-*.ckpt")
    main(["test", "--ckpt_path=best", *CPU, "--model.tta=flip"])
    main(["predict", "--ckpt_path=best", *CPU, "--model.tta=flip"])
    model, data = ViTClassifier.load(best), ImageFolder(str(tree))
    data.input_size, data.crop_pct = model.input_size, model.crop_pct
    data.setup("test")
    images = data.datasets["test"]
    expected = mean_probability(model, images.images)
    report = json.loads(only(tmp_path / "runs", "report.json").read_text())
    loss = F.nll_loss(expected.log(), images.labels)
    assert report["uncalibrated"]["loss"] == pytest.approx(float(loss), abs=1e-5)
    assert scalars(tmp_path / "runs")["test/loss"][0][1] == pytest.approx(float(loss), abs=1e-5)
    calibrated = (expected.log() / model.temperature).softmax(-1)
    with open(only(tmp_path / "runs", "predictions.csv"), newline="") as file:
        rows = {row["path"]: float(row["probability"]) for row in csv.DictReader(file)}
    assert [rows[name] for name in images.names] == pytest.approx(calibrated.amax(1).tolist(), abs=1e-5)


def test_fit_validates_with_it_and_trains_without(folder_args: list[str], tree: Path, tmp_path: Path) -> None:
    """With a learning rate of zero the epoch can be counted again."""
    still = ["--model.lr=0", "--model.min_lr=0", "--data.shift=0", "--data.crop_scale=0", "--data.flip=false"]
    main(["fit", *folder_args, *still, "--model.tta=flip"])
    last = only(tmp_path / "runs", "last.ckpt")
    assert torch.load(last, weights_only=True)["hyper_parameters"]["tta"] == "flip"
    model, data = ViTClassifier.load(last), ImageFolder(str(tree), crop_scale=0)
    data.input_size, data.crop_pct = model.input_size, model.crop_pct
    data.setup("fit")
    train, val = data.datasets["train"], data.datasets["val"]
    tags = scalars(tmp_path / "runs")
    averaged = mean_probability(model, val.images).log()
    assert tags["val/loss"][-1][1] == pytest.approx(float(F.nll_loss(averaged, val.labels)), abs=1e-5)
    assert model.temperature == pytest.approx(fit_temperature(averaged, val.labels), abs=1e-3)
    with torch.no_grad():
        plain = F.cross_entropy(model(train.images), train.labels)
    assert tags["train/loss"][-1][1] == pytest.approx(float(plain), abs=1e-5)
