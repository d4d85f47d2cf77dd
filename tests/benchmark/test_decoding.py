"""The comparison of decoders runs on any folder of images, and explains a folder without any."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import noise_image
from vit_finetune.benchmark import decoding


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(decoding, "LARGE", (400, 300))
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(7):
        noise_image(number % 3, generator, side=50 + number).save(folder / "more" / f"{number}.jpg")
    noise_image(0, generator).convert("RGBA").save(folder / "transparent.png")
    return folder


def test_compares_three_decoders(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "broken.jpg").write_bytes(b"no image")
    Image.new("CMYK", (30, 20)).save(photos / "cmyk.tif")  # torchvision has no decoder of TIFF
    decoding.main([str(photos), "--size", "16", "--rounds", "2"])
    shown = capsys.readouterr().out
    assert "Skipped 1 files that cannot be read by: torchvision, Pillow images" in shown
    assert "Skipped 1 files that cannot be read by: torchvision, tensors" in shown
    assert f"8 images of {photos}" in shown and "5 of them enlarged to 400 x 300, JPEG quality 92" in shown
    rows = re.findall(r"^\| (.*?) \| \d+\.\d \(\d+\.\d to \d+\.\d\) \| (\d+\.\d\d) \|$", shown, re.MULTILINE)
    names = ["torchvision, Pillow images", "torchvision, tensors", "this project"]
    assert [name for name, _ in rows] == names * 2
    assert rows[0][1] == rows[3][1] == "1.00"
    assert len(re.findall(r"^Difference .* mean \d+\.\d\d, largest \d+$", shown, re.MULTILINE)) == 2


def test_images_that_are_decoded_in_full_have_no_difference(photos: Path) -> None:
    assert decoding.difference(str(photos / "transparent.png"), 16) == (0, 0)
    mean, largest = decoding.difference(str(photos / "more" / "6.jpg"), 16)  # 56 pixels, read at a scale of 1/2
    assert 0 < mean < largest < 60


def test_spread() -> None:
    assert decoding.spread(list("abc"), 3) == list("abc")
    assert decoding.spread(list("abcdefgh"), 3) == ["a", "c", "f"]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["missing"], "missing is not a folder that contains images."),
        (["empty"], "empty is not a folder that contains images."),
        (["broken"], "broken contains no images that all of the decoders can read."),
        (["broken", "--size", "0"], "--size is 0; expected at least 1."),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], reason: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "x.jpg").write_bytes(b"no image")
    with pytest.raises(SystemExit) as stop:
        decoding.main(args)
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"error: {reason}"
