"""Speed from image files to 224-pixel tensors: ``python -m vit_finetune.benchmark.decoding FOLDER``.

Compares this project's decoder with the two usual ones, torchvision's transforms of Pillow images and of tensors, in
images per second of CPU time, for the images of a folder and for the same enlarged to the size of a camera's. Also
prints the difference of the decoder's pixels to a full decode that is cut and resized in the same way.
"""

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image, read_file
from torchvision.transforms import v2

from vit_finetune.cli.main import report_errors
from vit_finetune.cli.parser import ReadableParser
from vit_finetune.data.decode import decode
from vit_finetune.data.file_listing import find_images
from vit_finetune.errors import ImageDecodeError, require
from vit_finetune.formatting import markdown_table, median_range

IMAGES = 200  # at most, evenly spaced
LARGE_IMAGES = 5
LARGE = (4000, 3000)
QUALITY = 92
ROUNDS = 7
BASE = "torchvision, Pillow images"


def decoders(size: int) -> dict[str, Callable[[str], Tensor]]:
    """Return the functions to compare: a path to uint8 ``(3, size, size)``, the center of the image."""
    resize = [v2.Resize(size, v2.InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(size)]
    on_images: Callable[[Image.Image], Tensor] = v2.Compose([*resize, v2.PILToTensor()])
    on_tensors: Callable[[Tensor], Tensor] = v2.Compose(resize)

    def pillow(path: str) -> Tensor:
        with Image.open(path) as image:
            return on_images(image.convert("RGB"))

    def tensors(path: str) -> Tensor:
        return on_tensors(decode_image(read_file(path), ImageReadMode.RGB))

    return {BASE: pillow, "torchvision, tensors": tensors, "this project": lambda path: decode(path, (size, size))}


def readable(paths: list[str], functions: dict[str, Callable[[str], Tensor]]) -> list[str]:
    """Return the files that every decoder can read, and print how many were left out for each."""
    for name, function in functions.items():
        read = [path for path in paths if _can_read(function, path)]
        if len(read) < len(paths):
            print(f"Skipped {len(paths) - len(read)} files that cannot be read by: {name}")
        paths = read
    return paths


def _can_read(function: Callable[[str], Tensor], path: str) -> bool:
    try:
        function(path)
    except (ImageDecodeError, RuntimeError, OSError, ValueError, SyntaxError):
        return False
    return True


def enlarge(paths: list[str], folder: str) -> list[str]:
    """Write some of the images as large JPEG files; return their paths."""
    large = [os.path.join(folder, f"{number}.jpg") for number in range(min(LARGE_IMAGES, len(paths)))]
    for source, target in zip(spread(paths, LARGE_IMAGES), large, strict=True):
        with Image.open(source) as image:
            image.convert("RGB").resize(LARGE, Image.Resampling.BICUBIC).save(target, quality=QUALITY)
    return large


def spread(paths: list[str], count: int) -> list[str]:
    """Return at most ``count`` paths, evenly spaced."""
    return [paths[number * len(paths) // count] for number in range(count)] if len(paths) > count else paths


def measure(title: str, paths: list[str], size: int, rounds: int) -> None:
    """Print the speeds over alternating rounds, and the difference to a full decode."""
    functions = decoders(size)
    speeds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            for path in paths:
                function(path)
            speeds[name].append(len(paths) / (time.process_time() - start))
    base = statistics.median(speeds[BASE])
    rows = [[name, median_range(v, 1), f"{statistics.median(v) / base:.2f}"] for name, v in speeds.items()]
    print(f"\n{title}\n\n{markdown_table(['Decoder', 'Images per CPU second', 'Ratio'], rows)}")
    means, largest = zip(*(difference(path, size) for path in paths), strict=True)
    print(f"\nDifference to a full decode (of 255): mean {statistics.mean(means):.2f}, largest {max(largest):.0f}")


def difference(path: str, size: int) -> tuple[float, float]:
    """Return the mean and the largest absolute difference to a full decode that is cut and resized in the same way."""
    with tempfile.TemporaryDirectory() as folder:
        full = os.path.join(folder, "full.ppm")  # has no scales: it is always decoded in full
        Image.fromarray(decode(path).permute(1, 2, 0).numpy()).save(full)
        absolute = (decode(path, (size, size)).float() - decode(full, (size, size)).float()).abs()
    return absolute.mean().item(), absolute.max().item()


def main(args: list[str]) -> None:
    """Compare the decoders on the images of a folder.

    Args:
        args: Arguments after ``python -m vit_finetune.benchmark.decoding``.

    Raises:
        SystemExit: With code 2 if there are no images to read.
    """
    parser = ReadableParser(prog="python -m vit_finetune.benchmark.decoding", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="Folder with images, also in folders below it.")
    parser.add_argument("--size", type=int, default=224, help="Height and width of the results in pixels.")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="Number of times that each decoder reads all images."
    )
    with report_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow about odd files, of torchvision about TorchCodec
        options = parser.parse_args(args)
        require("--size", options.size, 1)
        require("--rounds", options.rounds, 1)
        run(options.folder, options.size, options.rounds)


def run(folder: Path, size: int, rounds: int) -> None:
    """Print the comparison for the images of a folder, and for some of them enlarged.

    Raises:
        MisconfigurationException: There are no images that all decoders can read.
    """
    paths = spread(find_images(folder), IMAGES) if folder.is_dir() else []
    if not paths:
        raise MisconfigurationException(f"{folder} is not a folder that contains images.")
    paths = readable(paths, decoders(size))
    if not paths:
        raise MisconfigurationException(f"{folder} contains no images that all of the decoders can read.")
    print(f"To {size} x {size} pixels, {rounds} rounds, {torch.get_num_threads()} threads")
    measure(f"{len(paths)} images of {folder}", paths, size, rounds)
    with tempfile.TemporaryDirectory() as temporary:
        large = enlarge(paths, temporary)
        title = f"{len(large)} of them enlarged to {LARGE[0]} x {LARGE[1]}, JPEG quality {QUALITY}"
        measure(title, large, size, rounds)


if __name__ == "__main__":
    main(sys.argv[1:])
