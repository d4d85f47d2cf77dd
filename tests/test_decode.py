"""Picture modes to exact pixels."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vit_finetune.data.decode import BrokenPicture, decode, read_size


def test_16_bit_grey_is_scaled(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    pixels = decode(tmp_path / "ramp.png")
    assert pixels.shape == (3, 64, 64)
    assert len(pixels.unique()) == 256 and 127 <= pixels.double().mean() <= 128


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("L", 200, (200, 200, 200)),
        ("1", 1, (255, 255, 255)),
        ("RGB", (1, 2, 3), (1, 2, 3)),
        ("RGBA", (255, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (255, 0, 0, 255), (255, 0, 0)),
        ("LA", (0, 0), (255, 255, 255)),
        ("LA", (7, 255), (7, 7, 7)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
    ],
)
def test_modes(tmp_path: Path, mode: str, value: object, expected: tuple[int, ...]) -> None:
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    Image.new(mode, (4, 6), value).save(path)  # type: ignore[arg-type]
    pixels = decode(path)
    assert pixels.shape == (3, 6, 4)
    assert pixels[:, 0, 0].tolist() == list(expected)


def test_palette_with_transparency(tmp_path: Path) -> None:
    picture = Image.new("P", (4, 4), 1)
    picture.putpalette([0, 0, 0, 255, 0, 0])
    picture.save(tmp_path / "x.png", transparency=1)
    assert decode(tmp_path / "x.png")[:, 0, 0].tolist() == [255, 255, 255]


def test_camera_rotation_is_applied(tmp_path: Path) -> None:
    picture = Image.new("RGB", (6, 4))
    exif = picture.getexif()
    exif[0x0112] = 6  # rotate by 90 degrees to view
    picture.save(tmp_path / "x.jpg", exif=exif)
    assert decode(tmp_path / "x.jpg").shape == (3, 6, 4)


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "x.gif", save_all=True, append_images=frames[1:])
    assert decode(tmp_path / "x.gif")[:, 0, 0].tolist() == [255, 0, 0]


def test_resize_keeps_the_centre_square(tmp_path: Path) -> None:
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255
    Image.fromarray(wide).save(tmp_path / "x.png")
    assert decode(tmp_path / "x.png", 20).min() == 255
    assert read_size(tmp_path / "x.png") == (60, 20)


@pytest.mark.parametrize("content", [b"", b"<html>", b"\x89PNG\r\n\x1a\n"])
def test_broken_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(BrokenPicture, match=r"x\.png"):
        decode(tmp_path / "x.png")


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("1", (2000, 2000)).save(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000_000)
    with pytest.raises(BrokenPicture, match="decompression bomb"):
        read_size(tmp_path / "x.png")
