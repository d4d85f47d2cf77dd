"""One picture file to uint8 RGB pixels, whatever its mode."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

EXTENSIONS = frozenset(
    ".apng .bmp .gif .jfif .jpe .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()  # noqa: SIM905
)
# A file may have the name of another type of these. Types beyond them stay closed: Pillow hands some to other programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
BACKGROUND = (255, 255, 255)  # what shows through transparent pixels, in training and prediction alike
TIFF_BITS, TIFF_PHOTOMETRIC = 258, 262  # tags of the TIFF 6.0 specification


class BrokenPicture(MisconfigurationException):
    """A file that is not a readable picture; the message names it and says why."""

    def __init__(self, message: str) -> None:
        # An error from a worker process is made anew with the worker's whole traceback for a message; its end is ours.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].rstrip())


def decode(path: str | os.PathLike[str], size: int | None = None) -> Tensor:
    """Reads a picture.

    Rotation stored by cameras is applied, transparency is laid over white, of an animation or of several pages the
    first counts. Grey of 9 to 16 bits is scaled to 8 by its full range, floats between 0 and 1 by that range, and wider
    integers and other floats, which have no range of their own, by the least and largest value in the picture.

    Args:
        path: The file.
        size: Resize the shorter side to this many pixels (bicubic) and cut the centre square; ``None`` keeps the
            picture as it is.

    Returns:
        uint8, shape ``(3, H, W)``.

    Raises:
        BrokenPicture: The file is missing, empty, cut short, no picture, or too large to be one.
    """
    with _open(path) as picture:
        rgb = to_rgb(picture)
        if size is not None and rgb.size != (size, size):
            rgb = ImageOps.fit(rgb, (size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(rgb).transpose(2, 0, 1).copy())


def read_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Returns width and height from the file's header, without decoding.

    Raises:
        BrokenPicture: The header cannot be read, or tells of more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    with _open(path) as picture:
        return picture.size


@contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[Image.Image]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited on for ever
            raise OSError("it is no file, or a folder that cannot be opened")
        with Image.open(path, formats=FORMATS) as picture:
            limit = Image.MAX_IMAGE_PIXELS  # Pillow only warns up to twice this number
            if limit is not None and picture.width * picture.height > limit:
                raise Image.DecompressionBombError(f"{picture.width} x {picture.height} pixels, more than {limit}")
            yield picture
    except Exception as error:  # the decoders raise anything from SyntaxError to struct.error on damaged files
        raise BrokenPicture(f"{os.fspath(path)!r}: {_reason(path, error)}") from error


def _reason(path: str | os.PathLike[str], error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if os.path.isfile(path) and os.path.getsize(path) == 0:
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        return f"it is damaged, or no picture of the types {', '.join(FORMATS)}"
    if isinstance(error, Image.DecompressionBombError):
        return f"refused, it may be a decompression bomb: {error}"
    return str(error) or type(error).__name__


def to_rgb(picture: Image.Image) -> Image.Image:
    """Converts any mode to 8-bit RGB without clipping, upright."""
    upright = _upright(picture)
    if upright.mode.startswith("I") or upright.mode == "F":
        return _grey_to_8_bits(upright, _value_range(picture)).convert("RGB")
    if upright.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in upright.info:
        rgba = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", rgba.size, (*BACKGROUND, 255)), rgba)
    return upright.convert("RGB")


def _upright(picture: Image.Image) -> Image.Image:
    picture.load()  # so that what follows can only fail for the camera's notes, which are often mangled on the way
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:  # anything from SyntaxError to struct.error
        return picture


def _value_range(picture: Image.Image) -> tuple[float, float] | None:
    """What stands for black and for white in wide grey pixels, ``None`` if the file does not say."""
    tags = getattr(picture, "tag_v2", {})
    if picture.mode.startswith("I;") or (picture.mode == "I" and picture.format in ("PNG", "PPM")):
        white = 2.0 ** tags.get(TIFF_BITS, (16,))[0] - 1
        return (white, 0.0) if tags.get(TIFF_PHOTOMETRIC) == 0 else (0.0, white)
    return None


def _grey_to_8_bits(picture: Image.Image, value_range: tuple[float, float] | None) -> Image.Image:
    values = np.asarray(picture, dtype=np.float64)
    values = np.where(np.isfinite(values), values, 0)
    low, high = value_range or (values.min(), values.max())
    if picture.mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scaled = (values - low) * (255 / (high - low or 1))
    return Image.fromarray(scaled.round().astype(np.uint8))
