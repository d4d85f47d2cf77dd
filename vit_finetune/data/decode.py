"""Decode an image file of any mode to uint8 RGB."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

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
TIFF_BITS, TIFF_PHOTOMETRIC = 258, 262  # tags of the TIFF 6.0 specification


def decode(path: str | os.PathLike[str], size: int | None = None) -> Tensor:
    """Decode an image file.

    The EXIF rotation is applied, transparent pixels become white, and only the first frame or page is read. Gray
    values of 9 to 16 bits are scaled to 8 bits by their full range, floats between 0 and 1 by that range, and wider
    integers and other floats, which have no defined range, by the minimum and maximum of the image.

    Args:
        path: The file.
        size: Resize the shorter side to this many pixels (bicubic) and crop the center square; ``None`` keeps the
            original size.

    Returns:
        uint8, shape ``(3, H, W)``.

    Raises:
        ImageDecodeError: The file is missing, empty, truncated, too large or not an image.
    """
    with _open(path) as image:
        rgb = to_rgb(image)
        if size is not None and rgb.size != (size, size):
            rgb = ImageOps.fit(rgb, (size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(rgb).transpose(2, 0, 1).copy())


def read_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return width and height from the file's header, without decoding.

    Raises:
        ImageDecodeError: The header cannot be read, or declares more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    with _open(path) as image:
        return image.size


@contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[Image.Image]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
            raise OSError("not a regular file, or a folder that cannot be opened")
        with Image.open(path, formats=FORMATS) as image:
            limit = Image.MAX_IMAGE_PIXELS  # Pillow itself only warns up to twice this number
            if limit is not None and image.width * image.height > limit:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels, more than {limit}")
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
