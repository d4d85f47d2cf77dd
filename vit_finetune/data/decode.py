"""One picture file to uint8 RGB pixels, whatever its mode."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image, ImageOps
from torch import Tensor

EXTENSIONS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
BACKGROUND = (255, 255, 255)  # what shows through transparent pixels, in training and prediction alike


class BrokenPicture(MisconfigurationException):
    """A file that is not a readable picture; the message names it and says why."""


def decode(path: str | os.PathLike[str], size: int | None = None) -> Tensor:
    """Reads a picture.

    Rotation stored by cameras is applied, transparency is laid over white, 16-bit grey is scaled to 8 bits, of an
    animation the first frame counts.

    Args:
        path: The file.
        size: Resize the shorter side to this many pixels (bicubic) and cut the centre square; ``None`` keeps the
            picture as it is.

    Returns:
        uint8, shape ``(3, H, W)``.

    Raises:
        BrokenPicture: The file is empty, cut short, no picture, or too large to be one.
    """
    with _open(path) as picture:
        rgb = to_rgb(picture)
    if size is not None and rgb.size != (size, size):
        rgb = ImageOps.fit(rgb, (size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(rgb).transpose(2, 0, 1).copy())


def read_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Returns width and height from the file's header, without decoding.

    Raises:
        BrokenPicture: The header cannot be read.
    """
    with _open(path) as picture:
        return picture.size


@contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[Image.Image]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as picture:
                yield picture
    except Exception as error:  # the decoders raise anything from SyntaxError to struct.error on damaged files
        empty = Path(path).is_file() and Path(path).stat().st_size == 0
        raise BrokenPicture(f"{os.fspath(path)!r}: {'the file is empty' if empty else error}") from error


def to_rgb(picture: Image.Image) -> Image.Image:
    """Converts any mode to 8-bit RGB without clipping, upright."""
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I") or picture.mode == "F":
        picture = _scale_to_8_bits(picture)
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        rgba = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", rgba.size, (*BACKGROUND, 255)), rgba)
    return picture.convert("RGB")


def _scale_to_8_bits(picture: Image.Image) -> Image.Image:
    """16-bit grey by its full range; wider integers and floats by what they hold, having no range of their own."""
    values = np.asarray(picture, dtype=np.float64)
    low, high = 0.0, 65535.0
    if picture.mode == "F" or values.min() < low or values.max() > high:
        low, high = float(values.min()), float(values.max())
    scaled = (values - low) * (255 / max(high - low, 1e-12))
    return Image.fromarray(scaled.round().astype(np.uint8))
