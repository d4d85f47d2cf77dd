"""Decode an image of any type to uint8 RGB, and bring it to a size.

A JPEG file is decoded at the smallest DCT scale (1/8, 1/4, 1/2 or 1) that still has a pixel for each one of the
result, and images are resized as channels-last uint8 tensors, for which PyTorch has a vectorized antialiased filter.
Over torchvision's transforms of Pillow images, per CPU second to 224 pixels (two-core AMD EPYC, one thread), that is
1.8 times as fast for photographs of 500 pixels and 11 times for JPEG files of 4000 x 3000; the values (0 to 255) differ
from those of a full decode by 0.2 and 1.0 on average. ``torchvision.io.decode_jpeg`` returns the same pixels as Pillow
and would make that 2.0 and 3 times, as it has no scales. It is not used, not even where no scale applies: it is
deprecated since torchvision 0.29 and will be removed.
"""

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor
from torch.nn import functional

from vit_finetune.errors import ImageDecodeError

EXTENSIONS = frozenset(
    ".apng .bmp .gif .jfif .jpe .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()  # noqa: SIM905
)
# The content decides, not the file name. Other types are refused: Pillow passes some of them to external programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
BACKGROUND = (255, 255, 255)  # of transparent pixels, in training and prediction
MAX_PIXELS = 1024**3 // 4 // 3  # default of PIL.Image.MAX_IMAGE_PIXELS: a quarter of a GiB as RGB
TIFF_WIDTH, TIFF_HEIGHT, TIFF_BITS, TIFF_PHOTOMETRIC = 256, 257, 258, 262  # tags of the TIFF 6.0 specification
# EXIF orientation: the dimensions to flip, after exchanging width and height from 5 on.
FLIPS: dict[int, tuple[int, ...]] = {1: (), 2: (-1,), 3: (-2, -1), 4: (-2,), 5: (), 6: (-1,), 7: (-2, -1), 8: (-2,)}
EPSILON = 1e-6  # above the rounding error of a position in pixels

Resize = Literal["crop", "stretch"]


class EncodedImage(NamedTuple):
    """An image that is not a file of its own, such as a row of a Parquet table."""

    name: str
    """Stands for the path in messages."""
    content: bytes
    """The content of an image file."""


Source: TypeAlias = str | os.PathLike[str] | EncodedImage


def decode(
    source: Source,
    size: tuple[int, int] | None = None,
    *,
    resize: Resize = "crop",
    crop_pct: float = 1.0,
    max_pixels: int = MAX_PIXELS,
) -> Tensor:
    """Decode an image.

    The EXIF rotation is applied, transparent pixels become white, and only the first frame or page is read. Gray
    values of 9 to 16 bits are scaled to 8 bits by their full range, floats between 0 and 1 by that range, and wider
    integers and other floats, which have no defined range, by the minimum and maximum of the image.

    Args:
        source: A file, or the content of one.
        size: Height and width of the result; ``None`` keeps the original size and ignores ``resize`` and ``crop_pct``.
        resize: ``"crop"`` resizes the largest centered box with the aspect ratio of ``size``, ``"stretch"`` the whole
            image; bicubic with antialiasing.
        crop_pct: Fraction of the sides of that box to keep, like timm's ``crop_pct``.
        max_pixels: Refuse images with more pixels.

    Returns:
        uint8, shape ``(3, H, W)``.

    Raises:
        ImageDecodeError: The image is missing, empty, truncated, too large or not an image.
    """
    with _open(source, max_pixels) as image:
        crop = crop_pct if resize == "crop" else None
        extent = None if size is None else _scale_jpeg(image, size, crop)
        rgb = to_rgb(image)
        orientation = _orientation(image)
    width, height = extent or rgb.size
    pixels = torch.from_numpy(np.array(rgb)).permute(2, 0, 1)[:, :height, :width]
    if size is not None:
        pixels = _resize(pixels, _turn(size, orientation), crop)
    if orientation >= 5:
        pixels = pixels.transpose(1, 2)
    return pixels.flip(FLIPS[orientation]).contiguous()


def read_size(source: Source, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return width and height after the EXIF rotation from the header, without decoding.

    A rotation that a PNG file states only after its pixels is not found.

    Raises:
        ImageDecodeError: The header cannot be read, or declares more than ``max_pixels``.
    """
    with _open(source, max_pixels) as image:
        width, height = image.size
        if isinstance(image, TiffImageFile):  # some versions of Pillow rotate its size, some do not
            width, height = image.tag_v2[TIFF_WIDTH], image.tag_v2[TIFF_HEIGHT]
        return _turn((width, height), _orientation(image))


@contextmanager
def _open(source: Source, max_pixels: int) -> Iterator[Image.Image]:
    if Image.MAX_IMAGE_PIXELS is not None:  # Pillow warns of more, and refuses twice as many
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    try:
        if not isinstance(source, EncodedImage) and not stat.S_ISREG(os.stat(source).st_mode):  # a pipe would block
            raise OSError("not a regular file, or a folder that cannot be opened")
        file = io.BytesIO(source.content) if isinstance(source, EncodedImage) else source
        with Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                size = f"{_megapixels(image.width * image.height)} megapixels ({image.width} x {image.height})"
                raise ValueError(f"{size}, more than --data.max_megapixels {_megapixels(max_pixels)} allows")
            yield image
    except Exception as error:  # Pillow raises anything from SyntaxError to struct.error on damaged files
        name = source.name if isinstance(source, EncodedImage) else os.fspath(source)
        raise ImageDecodeError(f"{name!r}: {_reason(source, error, max_pixels)}") from error


def _megapixels(pixels: int) -> str:
    return f"{pixels / 1e6:.1f}" if pixels >= 1e5 else f"{pixels / 1e6:g}"


def _reason(source: Source, error: Exception, max_pixels: int) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(source, EncodedImage) and not source.content:
        return "the image is empty"
    if not isinstance(source, EncodedImage) and os.path.isfile(source) and os.path.getsize(source) == 0:
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        return f"damaged, or not an image of type {', '.join(FORMATS)}"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than twice the {_megapixels(max_pixels)} megapixels that --data.max_megapixels allows"
    return str(error) or type(error).__name__


# Size


def _turn(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    return (size[1], size[0]) if orientation >= 5 else size


def _box(width: int, height: int, size: tuple[int, int], crop_pct: float | None) -> tuple[float, float]:
    """Return width and height of the centered box that becomes the result; without ``crop_pct``, all of the image."""
    if crop_pct is None:
        return width, height
    scale = min(width / size[1], height / size[0]) * crop_pct
    return size[1] * scale, size[0] * scale


def _scale_jpeg(image: Image.Image, size: tuple[int, int], crop_pct: float | None) -> tuple[int, int] | None:
    """Choose the DCT scale of a JPEG file; return the width and height that its pixels then have."""
    if not isinstance(image, JpegImageFile):
        return None
    rows, columns = _turn(size, _orientation(image))
    box = _box(*image.size, (rows, columns), crop_pct)
    drafted = image.draft(None, (int(image.width * columns / box[0]), int(image.height * rows / box[1])))
    if drafted is None:
        return None
    _, (_, _, width, height) = drafted  # fractions; the file's last row and column of blocks may be mostly padding
    return round(width), round(height)


def _resize(pixels: Tensor, size: tuple[int, int], crop_pct: float | None) -> Tensor:
    """Resize the centered box.

    It is cut out rounded up to whole pixels, resized, and cut to the size. So it is centered exactly, and its edges are
    at most half a pixel of the result off, however small the image is.
    """
    rows, columns = _box(pixels.shape[2], pixels.shape[1], size, crop_pct)[::-1]
    y, x = int((pixels.shape[1] - rows) / 2 + EPSILON), int((pixels.shape[2] - columns) / 2 + EPSILON)
    pixels = pixels[:, y : pixels.shape[1] - y, x : pixels.shape[2] - x]
    y = round((pixels.shape[1] / rows - 1) * size[0] / 2)
    x = round((pixels.shape[2] / columns - 1) * size[1] / 2)
    outer = [size[0] + 2 * y, size[1] + 2 * x]
    resized = functional.interpolate(pixels[None], outer, mode="bicubic", antialias=True)[0]
    return resized[:, y : y + size[0], x : x + size[1]]


# Rotation and color


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 if there is none or the EXIF data is damaged, which is common.

    The method of PNG images would decode them first.
    """
    try:
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # anything from SyntaxError to struct.error
        return 1
    return orientation if orientation in FLIPS else 1


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to 8-bit RGB without clipping."""
    image.load()
    if image.mode.startswith("I") or image.mode == "F":
        return _gray_to_8_bits(image, _value_range(image)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (*BACKGROUND, 255)), rgba)
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it


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
