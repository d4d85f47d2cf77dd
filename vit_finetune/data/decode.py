"""Decode an image file of any mode to uint8 RGB."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vit_finetune.errors import ImageDecodeError

EXTENSIONS = frozenset(
    ".apng .bmp .gif .jfif .jpe .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()  # noqa: SIM905
)
# The content decides, not the file name. Other types are refused: Pillow passes some of them to external programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
BACKGROUND = (255, 255, 255)  # of transparent pixels, in training and prediction
MAX_PIXELS = 89_478_485  # Pillow's own limit
Resize = Literal["crop", "stretch"]


class EncodedImage(NamedTuple):
    """An image that is not a file of its own, such as a row of a Parquet table."""

    name: str
    content: bytes


Source = str | os.PathLike[str] | EncodedImage

TIFF_BITS, TIFF_PHOTOMETRIC = 258, 262  # tags of the TIFF 6.0 specification


def decode(
    source: Source,
    size: tuple[int, int] | None = None,
    *,
    resize: Resize = "crop",
    crop_pct: float = 1.0,
    max_pixels: int = MAX_PIXELS,
) -> Tensor:
    """Decode an image (stand-in)."""
    with _open(source, max_pixels) as image:
        rgb = to_rgb(image)
        if size is not None and rgb.size != (size[1], size[0]):
            box = (0.0, 0.0, float(rgb.width), float(rgb.height))
            if resize == "crop":
                scale = min(rgb.width / size[1], rgb.height / size[0]) * crop_pct
                w, h = scale * size[1], scale * size[0]
                x, y = (rgb.width - w) / 2, (rgb.height - h) / 2
                box = (x, y, x + w, y + h)
            rgb = rgb.resize((size[1], size[0]), Image.Resampling.BICUBIC, box)
    return torch.from_numpy(np.asarray(rgb).transpose(2, 0, 1).copy())


def read_size(source: Source, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return width and height from the file's header, without decoding.

    Raises:
        ImageDecodeError: The header cannot be read.
    """
    with _open(source, max_pixels) as image:
        return image.size


@contextmanager
def _open(source: Source, max_pixels: int) -> Iterator[Image.Image]:
    path = source.name if isinstance(source, EncodedImage) else source
    try:
        if isinstance(source, EncodedImage):
            import io

            opened = Image.open(io.BytesIO(source.content), formats=FORMATS)
        else:
            if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
                raise OSError("not a regular file, or a folder that cannot be opened")
            opened = Image.open(path, formats=FORMATS)
        with opened as image:
            if image.width * image.height > max_pixels:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels, more than {max_pixels}")
            yield image
    except Exception as error:  # Pillow raises anything from SyntaxError to struct.error on damaged files
        raise ImageDecodeError(f"{os.fspath(path)!r}: {_reason(path, error)}") from error


def _reason(path: str | os.PathLike[str], error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if os.path.isfile(path) and os.path.getsize(path) == 0:
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        return f"damaged, or not an image of type {', '.join(FORMATS)}"
    if isinstance(error, Image.DecompressionBombError):
        return f"possible decompression bomb: {error}"
    return str(error) or type(error).__name__


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to 8-bit RGB without clipping, and apply the EXIF rotation."""
    upright = _upright(image)
    if upright.mode.startswith("I") or upright.mode == "F":
        return _gray_to_8_bits(upright, _value_range(image)).convert("RGB")
    if upright.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in upright.info:
        rgba = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", rgba.size, (*BACKGROUND, 255)), rgba)
    return upright.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    image.load()  # the rest can then only fail because of damaged EXIF data, which is common
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # anything from SyntaxError to struct.error
        return image


def _value_range(image: Image.Image) -> tuple[float, float] | None:
    """Return the values of black and white for gray pixels of more than 8 bits; ``None`` if the file defines none."""
    tags = getattr(image, "tag_v2", {})
    if image.mode.startswith("I;") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        white = 2.0 ** tags.get(TIFF_BITS, (16,))[0] - 1
        return (white, 0.0) if tags.get(TIFF_PHOTOMETRIC) == 0 else (0.0, white)
    return None


def _gray_to_8_bits(image: Image.Image, value_range: tuple[float, float] | None) -> Image.Image:
    values = np.asarray(image, dtype=np.float64)
    values = np.where(np.isfinite(values), values, 0)
    low, high = value_range or (values.min(), values.max())
    if image.mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scaled = (values - low) * (255 / (high - low or 1))
    return Image.fromarray(scaled.round().astype(np.uint8))
