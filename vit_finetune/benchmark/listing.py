"""Listing and checking many small files: ``python -m vit_finetune.benchmark.listing [--files 5000]``.

Makes N, 2 N and 4 N tiny images in ten class folders and lists, checks and decodes each set in turn, in several
rounds. CPU time per file that stays level shows that time grows in proportion. Memory is the most that Python's own
objects took at any moment of a further pass.
"""

import argparse
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from vit_finetune.data.decode import decode, read_size
from vit_finetune.data.file_listing import find_images, list_classes, try_files
from vit_finetune.formatting import median_range

ROUNDS = 3
CLASSES = 10


def plant(root: Path, files: int) -> Path:
    """Writes that many images of 8 by 8 pixels."""
    for number in range(CLASSES):
        (root / str(number)).mkdir(parents=True)
    for number in range(files):
        color = (number % 256, number // 256 % 256, 0)
        Image.new("RGB", (8, 8), color).save(root / str(number % CLASSES) / f"{number:07d}.png")
    return root


def measure(files: int) -> None:
    """Prints CPU time and peak memory for each work and size, and the time per file against the smallest size."""
    with tempfile.TemporaryDirectory() as folder:
        roots = {count: plant(Path(folder) / str(count), count) for count in (files, 2 * files, 4 * files)}
        paths = {count: find_images(root) for count, root in roots.items()}
        works: dict[str, Callable[[int], object]] = {
            "list": lambda count: list_classes(roots[count]),
            "read headers": lambda count: sum(1 for _ in try_files(read_size, paths[count], "headers")),
            "decode": lambda count: sum(1 for _ in try_files(decode, paths[count], "decoded")),
        }
        for name, work in works.items():
            seconds: dict[int, list[float]] = {count: [] for count in roots}
            for _ in range(ROUNDS):
                for count, taken in seconds.items():
                    start = time.process_time()
                    work(count)
                    taken.append(1e6 * (time.process_time() - start) / count)
            base = statistics.median(seconds[files])
            for count, taken in seconds.items():
                ratio = statistics.median(taken) / base
                print(
                    f"{name:13s}{count:8d} files  {statistics.median(taken) * count / 1e6:7.2f} CPU s  "
                    f"{median_range(taken, 1):26s} microseconds a file  ratio {ratio:.2f}  {peak(work, count):6.1f} MB"
                )


def peak(work: Callable[[int], object], count: int) -> float:
    """Largest memory in MB that the work took beyond what there was before."""
    tracemalloc.start()
    work(count)
    most = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return most


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=5000, help="size of the smallest set")
    arguments = parser.parse_args()
    print(f"{ROUNDS} rounds, median (least to largest)")
    measure(arguments.files)
