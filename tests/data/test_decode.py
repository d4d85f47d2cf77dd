"""Image files of all kinds: each gives exactly the right pixels, or the right message with its path."""

import io
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps
from timm.data import create_transform
from torchvision.transforms import v2

from vit_finetune.data import decode as decoding
from vit_finetune.data.decode import EncodedImage, decode, read_size
from vit_finetune.errors import ImageDecodeError

GENERATOR = np.random.default_rng(0)
NOISE = GENERATOR.integers(0, 256, (5, 7, 3), dtype=np.uint8)
GRAY = NOISE[..., 0]
WIDE = np.array([[0, 257, 32896, 65535]], np.uint16)  # 257 times 0, 1, 128 and 255
NARROW = np.array([[0, 1, 128, 255]], np.uint8)
RED, BLUE = Image.new("RGB", (3, 2), (255, 0, 0)), Image.new("RGB", (3, 2), (0, 0, 255))


def encoded(pixels: Any, kind: str, **options: Any) -> bytes:
    """Return the contents of an image file."""
    file = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(file, kind, **options)
    return file.getvalue()


def tiff(tags: dict[int, int | Sequence[int]], parts: Sequence[bytes], offsets: int, counts: int) -> bytes:
    """Build a little-endian TIFF file with these tags, for variants that Pillow reads but does not write.

    Args:
        tags: Tag to its value or values.
        parts: Strips or tiles.
        offsets: The tag of the parts' offsets.
        counts: The tag of their lengths.
    """
    starts = [8 + sum(map(len, parts[:number])) for number in range(len(parts))]
    tags = {**tags, offsets: starts, counts: [len(part) for part in parts]}
    data = b"".join(parts)
    entries = b""
    for tag, value in sorted(tags.items()):
        values = [value] if isinstance(value, int) else list(value)
        packed = struct.pack(f"<{len(values)}I", *values)
        if len(values) > 1:  # more than four bytes are stored outside the entry
            packed, data = struct.pack("<I", 8 + len(data)), data + packed
        entries += struct.pack("<HHI", tag, 4, len(values)) + packed
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def gray_tiff(width: int, height: int, bits: int, data: bytes, photometric: int = 1) -> bytes:
    """Build a TIFF file with one strip of gray pixels."""
    tags: dict[int, int | Sequence[int]] = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 277: 1}
    return tiff({**tags, 278: height}, [data], 273, 279)


def tiled_tiff() -> tuple[bytes, np.ndarray]:
    """Build a gray TIFF file of 32 by 16 pixels in two tiles, and return its pixels, too."""
    pixels = GENERATOR.integers(0, 256, (16, 32), dtype=np.uint8)
    tags: dict[int, int | Sequence[int]] = {256: 32, 257: 16, 258: 8, 259: 1, 262: 1, 277: 1, 322: 16, 323: 16}
    return tiff(tags, [pixels[:, :16].tobytes(), pixels[:, 16:].tobytes()], 324, 325), pixels


def palette() -> Image.Image:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([1, 2, 3, 200, 100, 50, 9, 8, 7])
    return image


def rotated(orientation: int) -> bytes:
    """Return an image with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(NOISE, "PNG", exif=exif)


def damaged_exif() -> bytes:
    """Return a JPEG file with an EXIF header that points nowhere."""
    return encoded(RED, "JPEG", quality=100, exif=b"Exif\0\0II*\0\xff\xff\xff\xff")


RGBA = np.array([[[255, 0, 0, 0], [255, 0, 0, 255], [0, 0, 0, 51]]], np.uint8)
OVER_WHITE = [[[255, 255, 255], [255, 0, 0], [204, 204, 204]]]
PALETTE = [[[1, 2, 3], [200, 100, 50], [9, 8, 7]]]
ZOO: dict[str, tuple[bytes, Any]] = {
    "gray.png": (encoded(GRAY, "PNG"), GRAY),
    "gray_16_bit.png": (encoded(WIDE, "PNG"), NARROW),
    "one_bit.png": (encoded(Image.fromarray(GRAY > 99), "PNG"), (GRAY > 99) * 255),
    "palette.png": (encoded(palette(), "PNG"), PALETTE),
    "palette_one_transparent.png": (encoded(palette(), "PNG", transparency=1), [[[1, 2, 3], [255] * 3, [9, 8, 7]]]),
    "palette_alpha.png": (
        encoded(palette(), "PNG", transparency=b"\x00\xff\x00"),
        [[[255] * 3, *PALETTE[0][1:2], [255] * 3]],
    ),
    "rgb.png": (encoded(NOISE, "PNG"), NOISE),
    "rgb_one_transparent.png": (encoded(RED, "PNG", transparency=(255, 0, 0)), np.full((2, 3, 3), 255)),
    "rgba.png": (encoded(RGBA, "PNG"), OVER_WHITE),
    "gray_alpha.png": (encoded(RGBA[..., 2:], "PNG"), [[[255] * 3, [0] * 3, [204] * 3]]),
    "gray_one_transparent.png": (encoded(NARROW, "PNG", transparency=0), [[255, 1, 128, 255]]),
    "animated.png": (encoded(RED, "PNG", save_all=True, append_images=[BLUE]), np.array(RED)),
    "animated.apng": (encoded(RED, "PNG", save_all=True, append_images=[BLUE]), np.array(RED)),
    "still.gif": (encoded(palette(), "GIF"), PALETTE),
    "animated.gif": (encoded(RED, "GIF", save_all=True, append_images=[BLUE]), np.array(RED)),
    "transparent.gif": (encoded(palette(), "GIF", transparency=2), [[*PALETTE[0][:2], [255] * 3]]),
    "lossless.webp": (encoded(NOISE, "WEBP", lossless=True), NOISE),
    "alpha.webp": (encoded(RGBA, "WEBP", lossless=True, exact=True), OVER_WHITE),
    "animated.webp": (encoded(RED, "WEBP", save_all=True, append_images=[BLUE], lossless=True), np.array(RED)),
    "gray.jpg": (encoded(Image.new("L", (9, 9), 77), "JPEG"), np.full((9, 9), 77)),
    "baseline.JPEG": (encoded(Image.new("RGB", (9, 9), (77,) * 3), "JPEG"), np.full((9, 9), 77)),
    "progressive.jfif": (encoded(Image.new("L", (9, 9), 77), "JPEG", progressive=True), np.full((9, 9), 77)),
    "adobe_cmyk.jpg": (
        encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100),
        np.full((8, 8, 3), (255, 0, 0)),
    ),
    "two_images.jpg": (
        encoded(RED.convert("L"), "MPO", save_all=True, append_images=[BLUE.convert("L")]),
        np.full((2, 3), 76),
    ),
    "damaged_exif.jpg": (damaged_exif(), np.full((2, 3, 3), (254, 0, 0))),
    "rotated_1.png": (rotated(1), NOISE),
    "rotated_2.png": (rotated(2), NOISE[:, ::-1]),
    "rotated_3.png": (rotated(3), NOISE[::-1, ::-1]),
    "rotated_4.png": (rotated(4), NOISE[::-1]),
    "rotated_5.png": (rotated(5), NOISE.swapaxes(0, 1)),
    "rotated_6.png": (rotated(6), np.rot90(NOISE, -1)),
    "rotated_7.png": (rotated(7), np.rot90(NOISE, 2).swapaxes(0, 1)),
    "rotated_8.png": (rotated(8), np.rot90(NOISE)),
    "rotated_9_is_unknown.png": (rotated(9), NOISE),
    "rotated.tif": (encoded(NOISE, "TIFF", tiffinfo={274: 6}), np.rot90(NOISE, -1)),
    "rgb_lzw.tif": (encoded(NOISE, "TIFF", compression="tiff_lzw"), NOISE),
    "rgba.tiff": (encoded(RGBA, "TIFF"), OVER_WHITE),
    "cmyk.tif": (encoded(Image.new("CMYK", (2, 2), (0, 255, 255, 0)), "TIFF"), np.full((2, 2, 3), (255, 0, 0))),
    "gray_16_bit.tif": (encoded(WIDE, "TIFF"), NARROW),
    "gray_16_bit_big_endian.tif": (encoded(WIDE.astype(">u2"), "TIFF"), NARROW),
    "gray_16_bit_white_is_0.tif": (gray_tiff(4, 1, 16, WIDE.tobytes(), photometric=0), 255 - NARROW),
    "gray_12_bit.tif": (gray_tiff(2, 1, 12, b"\xff\xf0\x00"), [[255, 0]]),
    "gray_32_bit.tif": (encoded(np.array([[-1000, 0, 1000]], np.int32), "TIFF"), [[0, 128, 255]]),
    "float_0_to_1.tif": (encoded(np.array([[0.2, 0.4, np.nan]], np.float32), "TIFF"), [[51, 102, 0]]),
    "float.tif": (encoded(np.array([[-1, 0, 1, np.inf]], np.float32), "TIFF"), [[0, 128, 255, 128]]),
    "float_of_one_value.tif": (encoded(np.full((2, 2), 7, np.float32), "TIFF"), np.zeros((2, 2))),
    "pages.tif": (encoded(RED, "TIFF", save_all=True, append_images=[BLUE]), np.array(RED)),
    "tiled.tif": tiled_tiff(),
    "rgb.bmp": (encoded(NOISE, "BMP"), NOISE),
    "one_bit.bmp": (encoded(Image.fromarray(GRAY > 99), "BMP"), (GRAY > 99) * 255),
    "palette.bmp": (encoded(palette(), "BMP"), PALETTE),
    "rgb.ppm": (encoded(NOISE, "PPM"), NOISE),
    "gray.pgm": (encoded(GRAY, "PPM"), GRAY),
    "gray_16_bit.pgm": (b"P5 4 1 65535\n" + WIDE.astype(">u2").tobytes(), NARROW),
    "gray_10_bit.pgm": (b"P5 2 1 1023\n" + np.array([0, 1023], ">u2").tobytes(), [[0, 255]]),
    "plain_text.pgm": (b"P2\n# made by hand\n2 1\n255\n7 9\n", [[7, 9]]),
    "one_bit.pbm": (encoded(Image.fromarray(GRAY > 99), "PPM"), (GRAY > 99) * 255),
    "png_by_another_name.jpg": (encoded(NOISE, "PNG"), NOISE),
    "one_pixel.png": (encoded(NOISE[:1, :1], "PNG"), NOISE[:1, :1]),
    "long.png": (encoded(Image.new("RGB", (5000, 3), (1, 2, 3)), "PNG"), np.full((3, 5000, 3), (1, 2, 3))),
    'bytes_\udcff_quote"_comma,_new\nline.png': (encoded(NOISE, "PNG"), NOISE),
}
LOSSY = {"adobe_cmyk.jpg": 1, "damaged_exif.jpg": 1}  # largest difference


@pytest.mark.parametrize("name", ZOO)
def test_zoo(tmp_path: Path, name: str) -> None:
    content, expected = ZOO[name]
    (tmp_path / name).write_bytes(content)
    pixels = decode(tmp_path / name)
    wanted = np.asarray(expected, np.int64)
    wanted = np.stack([wanted] * 3, 2) if wanted.ndim == 2 else wanted
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, *wanted.shape[:2])
    np.testing.assert_allclose(pixels.permute(1, 2, 0).numpy(), wanted, rtol=0, atol=LOSSY.get(name, 0))
    assert decode(tmp_path / name, (8, 8)).shape == (3, 8, 8)
    assert read_size(tmp_path / name) == (pixels.shape[2], pixels.shape[1])


def header(width: int, height: int) -> bytes:
    """Return the first bytes of a PNG file of that size."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\x09IDAT"
    )


NOT_AN_IMAGE = "damaged, or not an image of type BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP"
BROKEN = {
    "empty.png": (b"", "the file is empty"),
    "page.jpg": (b"<!DOCTYPE html><html><body>404</body></html>", NOT_AN_IMAGE),
    "text.gif": (b"not an image", NOT_AN_IMAGE),
    "zeros.bmp": (bytes(1000), NOT_AN_IMAGE),
    "document.png": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", NOT_AN_IMAGE),
    "postscript.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", NOT_AN_IMAGE),
    "signature_only.png": (b"\x89PNG\r\n\x1a\n", NOT_AN_IMAGE),
    "header_only.png": (header(9, 9), "image file is truncated"),
    "bomb.png": (header(30_000, 30_000), "more than twice the 89.5 megapixels that --data.max_megapixels allows"),
    "smaller_bomb.png": (
        header(10_000, 9_500),
        "95.0 megapixels (10000 x 9500), more than --data.max_megapixels 89.5 allows",
    ),
    "float_rgb.tif": (
        tiff({256: 1, 257: 1, 258: [32] * 3, 259: 1, 262: 2, 277: 3, 339: [3] * 3}, [bytes(12)], 273, 279),
        NOT_AN_IMAGE,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_raise_the_reason_with_their_path(tmp_path: Path, name: str) -> None:
    content, reason = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImageDecodeError) as error:
        decode(tmp_path / name)
    assert str(error.value).startswith(f"'{tmp_path / name}': ") and reason in str(error.value)


@pytest.mark.parametrize("name", [name for name in ZOO if name != "pages.tif"])  # its first page is complete
def test_truncated_files_are_named(tmp_path: Path, name: str) -> None:
    content = ZOO[name][0]
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ImageDecodeError) as error:
        decode(tmp_path / name)
    assert str(error.value).startswith(repr(str(tmp_path / name)))


def test_images_that_are_not_files() -> None:
    image = EncodedImage("train.parquet row 7", rotated(6))
    assert torch.equal(decode(image), torch.from_numpy(np.rot90(NOISE, -1).transpose(2, 0, 1).copy()))
    assert read_size(image) == (5, 7)
    for content, reason in ((b"", "the image is empty"), (rotated(6)[:-30], ""), (b"no image", NOT_AN_IMAGE)):
        with pytest.raises(ImageDecodeError, match=f"^'train.parquet row 7': .*{reason}"):
            decode(EncodedImage("train.parquet row 7", content))


def test_limit_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # restores it
    huge = EncodedImage("huge", header(30_000, 30_000))
    assert read_size(huge, max_pixels=900_000_000) == (30_000, 30_000)
    with pytest.raises(ImageDecodeError, match=r"'huge': 900\.0 megapixels .* --data\.max_megapixels 899\.0 allows"):
        read_size(huge, max_pixels=899_000_000)
    small = EncodedImage("small", encoded(NOISE, "PNG"))
    assert decode(small, max_pixels=35).shape == (3, 5, 7)
    with pytest.raises(ImageDecodeError, match=r"\(7 x 5\), more than --data\.max_megapixels 3\.4e-05 allows"):
        decode(small, max_pixels=34)


def test_read_size_does_not_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: loaded.append(image.format))
    exif = Image.Exif()
    exif[0x0112] = 8
    for kind in ("JPEG", "PNG", "TIFF", "WEBP"):
        content = encoded(Image.new("RGB", (300, 200)), kind)
        assert read_size(EncodedImage("x", content)) == (300, 200)
        content = encoded(Image.new("RGB", (300, 200)), kind, exif=exif)
        assert read_size(EncodedImage("x", content)) == (200, 300)
    assert loaded == []


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "dangling"])
def test_paths_that_are_not_files_are_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.png"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # opening it would block
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere.png")
    reason = "No such file" if kind in ("missing", "dangling") else "not a regular file"
    with pytest.raises(ImageDecodeError, match=rf"x\.png': .*{reason}"):
        read_size(path)


# Size


def positions(width: int, height: int) -> tuple[Image.Image, int]:
    """An image of at most 256 pixels whose red is the column and whose green is the row, times the returned factor."""
    factor = 255 // (max(width, height) - 1)
    rows, columns = np.mgrid[:height, :width] * factor
    return Image.fromarray(np.stack([columns, rows, rows * 0], 2).astype(np.uint8)), factor


def photograph(width: int, height: int) -> Image.Image:
    """A smooth image without symmetry."""
    small = np.random.default_rng(1).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


BOXES: list[tuple[tuple[int, int], tuple[int, int], dict[str, Any], tuple[float, float, float, float]]] = [
    ((200, 150), (50, 50), {}, (25, 0, 175, 150)),
    ((150, 200), (50, 50), {}, (0, 25, 150, 175)),
    ((200, 150), (50, 50), {"crop_pct": 0.8}, (40, 15, 160, 135)),
    ((200, 150), (40, 80), {}, (0, 25, 200, 125)),
    ((200, 150), (80, 40), {"crop_pct": 0.5}, (81.25, 37.5, 118.75, 112.5)),
    ((200, 150), (40, 80), {"resize": "stretch"}, (0, 0, 200, 150)),
    ((200, 150), (40, 80), {"resize": "stretch", "crop_pct": 0.5}, (0, 0, 200, 150)),
    ((201, 150), (150, 150), {}, (25.5, 0, 175.5, 150)),
    ((33, 32), (224, 224), {}, (0.5, 0, 32.5, 32)),
    ((40, 32), (224, 224), {"crop_pct": 0.9}, (5.6, 1.6, 34.4, 30.4)),
    ((7, 250), (9, 9), {}, (0, 121.5, 7, 128.5)),
]


@pytest.mark.parametrize(("shape", "size", "options", "box"), BOXES)
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_box_is_centered(
    shape: tuple[int, int],
    size: tuple[int, int],
    options: dict[str, Any],
    box: tuple[float, float, float, float],
    kind: str,
) -> None:
    """Positions in the result are at most half a pixel of the result off, and not at all in its center."""
    image, factor = positions(*shape)
    pixels = decode(EncodedImage("x", encoded(image, kind, **BEST[kind])), size, **options).double() / factor
    assert pixels.shape == (3, *size)
    noise = {"PNG": 0.6, "JPEG": 2}[kind] / factor
    ends = ((pixels[0].mean(0), box[0], box[2], size[1]), (pixels[1].mean(1), box[1], box[3], size[0]))
    for found, low, high, count in ends:
        step = (high - low) / count
        wrong = found - (low + (torch.arange(count) + 0.5) * step - 0.5)
        edge = int(2 / step) + 1  # the outermost pixels of the image are repeated, which changes the values near them
        assert wrong[edge:-edge].abs().max() <= noise + 0.5 * step
        assert abs(wrong.mean().item()) <= noise


BEST: dict[str, dict[str, Any]] = {"PNG": {}, "JPEG": {"quality": 100, "subsampling": 0}}


def test_equal_to_torchvision() -> None:
    """Where the box consists of whole pixels; ``v2.functional`` takes top, left, height and width."""
    image = photograph(300, 200)
    source, pixels = EncodedImage("x", encoded(image, "PNG")), v2.functional.pil_to_tensor(image)
    bicubic = v2.InterpolationMode.BICUBIC
    for size, options, box in (
        ((100, 100), {}, (0, 50, 200, 200)),
        ((11, 11), {}, (0, 50, 200, 200)),  # 49.999... in floating point
        ((64, 64), {"crop_pct": 0.5}, (50, 100, 100, 100)),
        ((60, 120), {}, (25, 0, 150, 300)),
        ((400, 400), {}, (0, 50, 200, 200)),
        ((77, 99), {"resize": "stretch"}, (0, 0, 200, 300)),
    ):
        expected = v2.functional.resized_crop(pixels, *box, list(size), bicubic, antialias=True)
        assert (decode(source, size, **options).int() - expected.int()).abs().max() <= 1
    assert torch.equal(decode(source, (200, 300)), pixels)


@pytest.mark.parametrize("crop_pct", [1.0, 0.9, 0.875])
def test_crop_pct_is_that_of_timm(crop_pct: float) -> None:
    image = photograph(500, 375)
    timm = create_transform((3, 224, 224), interpolation="bicubic", crop_pct=crop_pct, mean=(0, 0, 0), std=(1, 1, 1))
    pixels = decode(EncodedImage("x", encoded(image, "PNG")), (224, 224), crop_pct=crop_pct)
    assert (pixels - timm(image) * 255).abs().mean() < 1  # timm rounds the size before the crop, and its position


# The DCT scale of JPEG files


def full(content: bytes) -> EncodedImage:
    """The same pixels in a file that has no scales."""
    return EncodedImage("full", encoded(decode(EncodedImage("x", content)).permute(1, 2, 0).numpy(), "PPM"))


@pytest.mark.parametrize(
    ("orientation", "size", "options", "decoded"),
    [
        (1, (60, 60), {}, (101, 76)),
        (1, (76, 76), {}, (202, 151)),
        (1, (75, 75), {"crop_pct": 0.9}, (202, 151)),
        (1, (151, 151), {}, (403, 301)),
        (1, (301, 301), {}, (403, 301)),
        (1, (302, 302), {}, (806, 602)),
        (1, (800, 800), {}, (806, 602)),
        (1, (100, 50), {}, (202, 151)),
        (1, (75, 100), {"resize": "stretch"}, (101, 76)),
        (1, (75, 202), {"resize": "stretch"}, (403, 301)),
        (1, None, {}, (806, 602)),
        (6, (200, 100), {}, (202, 151)),  # from 602 x 806 pixels
        (6, (100, 200), {}, (403, 301)),
    ],
)
def test_scale_is_the_smallest_that_covers_the_result(
    monkeypatch: pytest.MonkeyPatch,
    orientation: int,
    size: tuple[int, int] | None,
    options: dict[str, Any],
    decoded: tuple[int, int],
) -> None:
    sizes = []
    exif = Image.Exif()
    exif[0x0112] = orientation
    to_rgb = decoding.to_rgb
    monkeypatch.setattr(decoding, "to_rgb", lambda image: sizes.append(image.size) or to_rgb(image))
    decode(EncodedImage("x", encoded(photograph(806, 602), "JPEG", exif=exif)), size, **options)
    assert sizes == [decoded]


JPEGS: dict[str, tuple[str, dict[str, Any]]] = {
    "4:2:0": ("RGB", {"subsampling": 2}),
    "4:2:2": ("RGB", {"subsampling": 1}),
    "4:4:4": ("RGB", {"subsampling": 0}),
    "progressive": ("RGB", {"progressive": True}),
    "restarts": ("RGB", {"restart_marker_rows": 1}),
    "gray": ("L", {}),
    "CMYK": ("CMYK", {}),
    "RGB": ("RGB", {"keep_rgb": True}),
}


@pytest.mark.parametrize("size", [(60, 60), (60, 120), (1, 1)])
@pytest.mark.parametrize("shape", [(968, 720), (721, 967)])
@pytest.mark.parametrize("kind", JPEGS)
def test_scaled_jpeg_files_agree_with_a_full_decode(kind: str, shape: tuple[int, int], size: tuple[int, int]) -> None:
    mode, options = JPEGS[kind]
    content = encoded(photograph(*shape).convert(mode), "JPEG", quality=90, **options)
    for choice in ({}, {"crop_pct": 0.7}, {"resize": "stretch"}):
        scaled = decode(EncodedImage("x", content), size, **choice)
        difference = (scaled.int() - decode(full(content), size, **choice).int()).abs().double()
        assert difference.mean() <= 2 and difference.max() <= 20  # 4:2:2 at 1/8; 10 for the others
    with pytest.raises(ImageDecodeError, match=r"'x': .*truncated"):
        decode(EncodedImage("x", content[: len(content) * 3 // 4]), size)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(60, 60), (60, 120), (300, 200), None])
def test_rotated_jpeg_files(orientation: int, size: tuple[int, int] | None) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(photograph(963, 718), "JPEG", exif=exif)
    image = EncodedImage("x", content)
    with Image.open(io.BytesIO(content)) as opened:
        upright = np.array(ImageOps.exif_transpose(opened))
    assert read_size(image) == (upright.shape[1], upright.shape[0])
    for options in ({}, {"resize": "stretch"}):
        expected = decode(EncodedImage("upright", encoded(upright, "PPM")), size, **options)
        difference = (decode(image, size, **options).int() - expected.int()).abs().double()
        assert difference.mean() <= (2 if size else 0) and difference.max() <= 10


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 500), (500, 1), (17, 9)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("options", [{}, {"crop_pct": 0.5}, {"resize": "stretch"}])
def test_tiny_and_narrow_images(shape: tuple[int, int], kind: str, options: dict[str, Any]) -> None:
    content = encoded(Image.new("RGB", shape, (9, 99, 199)), kind, **BEST[kind])
    for size in ((1, 1), (8, 8), (3, 40), (40, 3)):
        pixels = decode(EncodedImage("x", content), size, **options)
        expected = torch.tensor([9, 99, 199]).view(3, 1, 1).expand(3, *size)
        assert pixels.shape == (3, *size) and (pixels - expected).abs().max() <= 2
        assert pixels.is_contiguous()


def test_error_from_a_worker_is_one_line() -> None:
    """PyTorch raises a new error with the worker's traceback as its message."""
    error = ImageDecodeError(
        f"Caught ImageDecodeError in worker.\nTraceback:\n  x\n{__name__}.ImageDecodeError: 'a.png': empty\n"
    )
    assert str(error) == "'a.png': empty"


MODES = {"PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"], "JPEG": ["L", "RGB", "CMYK"], "GIF": ["1", "L", "P"]}
MODES |= {"BMP": ["1", "L", "P", "RGB"], "PPM": ["1", "L", "RGB", "I;16"], "WEBP": ["L", "RGB", "RGBA"]}
MODES |= {"TIFF": ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "LAB"]}


@st.composite
def images(draw: st.DrawFn) -> tuple[bytes, tuple[int, int]]:
    """Draw the contents of an undamaged file, and its width and height."""
    kind = draw(st.sampled_from(sorted(MODES)))
    mode = draw(st.sampled_from(MODES[kind]))
    sides = st.one_of(st.integers(1, 40), st.sampled_from([3, 5000]))
    width, height = draw(st.tuples(sides, sides).filter(lambda size: size[0] * size[1] <= 15_000))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    if mode in ("I;16", "I", "F"):
        values = generator.integers(0, 65536, (height, width))
        image = Image.fromarray(values.astype({"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]))
    else:
        depth = len(Image.new(mode, (1, 1)).getbands())
        bits = 8 * ((width + 7) // 8) * height // 8 if mode == "1" else width * height * depth
        image = Image.frombytes(mode, (width, height), generator.bytes(bits))
    if mode == "P":
        image.putpalette(generator.bytes(768))
    return encoded(image, kind), (width, height)


def attempt(path: Path, size: tuple[int, int] | None) -> torch.Tensor | str:
    """Return the pixels, or an error that starts with the path."""
    try:
        pixels = decode(path, size, max_pixels=100_000)  # a flipped bit must not make a huge image
    except ImageDecodeError as error:
        message = str(error)
        return message if message.startswith(f"{str(path)!r}: ") else pytest.fail(message)
    assert pixels.dtype == torch.uint8 and pixels.ndim == 3 and pixels.shape[0] == 3
    return pixels


@given(image=images(), size=st.sampled_from([None, (1, 1), (32, 20)]), damage=st.floats(0, 1), flip=st.booleans())
@settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_complete_truncated_and_damaged_files(
    tmp_path: Path,
    image: tuple[bytes, tuple[int, int]],
    size: tuple[int, int] | None,
    damage: float,
    flip: bool,
) -> None:
    """An image of the right shape or an error with the path; for a truncated file the same pixels or an error."""
    content, (width, height) = image
    path = tmp_path / "x.png"
    path.write_bytes(content)
    whole = attempt(path, size)
    if isinstance(whole, str):
        assert "LAB" in whole
        return
    assert whole.shape == (3, *(size or (height, width)))
    place = int(damage * (len(content) - 1))
    damaged = bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :] if flip else b""
    path.write_bytes(content[:place] + damaged)
    pixels = attempt(path, size)
    if isinstance(pixels, torch.Tensor):
        assert size is None or pixels.shape[1:] == size
        assert flip or torch.equal(pixels, whole)
