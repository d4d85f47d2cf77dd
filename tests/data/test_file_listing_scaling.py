"""Listing and reading files takes time in proportion to their number."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from vit_finetune.data.decode import decode, read_size
from vit_finetune.data.file_listing import find_images, list_classes, try_files

FILES = 2000
CLASSES = 10
ROUNDS = 5


def make_images(root: Path, files: int) -> Path:
    """Write images of 8 by 8 pixels into class folders."""
    for number in range(CLASSES):
        (root / str(number)).mkdir(parents=True)
    for number in range(files):
        color = (number % 256, number // 256 % 256, 0)
        Image.new("RGB", (8, 8), color).save(root / str(number % CLASSES) / f"{number:07d}.png")
    return root


def seconds(function: Callable[[], object]) -> float:
    """CPU time over all threads."""
    start = time.process_time()
    function()
    return time.process_time() - start


@pytest.mark.slow
def test_cost_per_file_does_not_grow_with_their_number(tmp_path: Path) -> None:
    roots = {files: make_images(tmp_path / str(files), files) for files in (FILES, 4 * FILES)}
    paths = {files: find_images(root) for files, root in roots.items()}
    functions: dict[str, Callable[[int], object]] = {
        "list": lambda files: [list_classes(roots[files]) for _ in range(5)],
        "read headers": lambda files: list(try_files(read_size, paths[files], "headers")),
        "decode": lambda files: sum(1 for _ in try_files(decode, paths[files], "decoded")),
    }
    for name, function in functions.items():
        per_file: dict[int, list[float]] = {files: [] for files in roots}
        for _ in range(ROUNDS):
            for files, taken in per_file.items():
                taken.append(seconds(partial(function, files)) / files)
        few, many = (statistics.median(taken) for taken in per_file.values())
        assert many <= 1.5 * few, f"{name}: {1e6 * few:.1f} and {1e6 * many:.1f} microseconds per file"
