"""Speed of the input pipeline in images per second of CPU time: ``python -m vit_finetune.benchmark.input_pipeline``.

The first table compares two ways from stored 32-pixel images to the 224-pixel input of a model: this project's (one
index operation, normalize, resize by two matrix products) and the usual one (for each image: Pillow, bicubic resize,
tensor, normalize). The second compares random resized crops of 256-pixel images to 224 pixels.
"""

import statistics
import time
from collections.abc import Callable

import torch
from PIL import Image
from torchvision.transforms import v2

from vit_finetune.data import Shapes
from vit_finetune.data.random_crop import crop_batch, random_boxes, random_resized_crop
from vit_finetune.formatting import median_range
from vit_finetune.model.preprocess import Preprocess

SIZE = 224
BATCH = 32  # larger results do not fit into memory that is reused, and new pages cost more than the arithmetic
STORED, CROPS = 256, 64  # side and number of the images to crop
SCALE = 0.35
ROUNDS = 7
MEAN = STD = [0.5, 0.5, 0.5]


def batches_per_second(function: Callable[[], object], repeats: int) -> float:
    """Return batches per second of CPU time over all threads, for a function that makes one batch."""
    start = time.process_time()
    for _ in range(repeats):
        function()
    return repeats / (time.process_time() - start)


def compare(functions: dict[str, tuple[Callable[[], object], int]], images: int) -> None:
    """Print the median speeds over alternating rounds, and their ratios to the first function.

    Args:
        functions: For each name, a function that makes one batch, and how often to call it in a round.
        images: Images in a batch.
    """
    speeds: dict[str, list[float]] = {name: [] for name in functions}
    with torch.inference_mode():
        for function, _ in functions.values():
            function()  # warm-up
        for _ in range(ROUNDS):
            for name, (function, repeats) in functions.items():
                speeds[name].append(images * batches_per_second(function, repeats))
    base = statistics.median(next(iter(speeds.values())))
    for name, values in speeds.items():
        shown = f"{name:36s} {median_range(values):24s} images per CPU second"
        print(f"{shown}  ratio {statistics.median(values) / base:.2f}")


def small_images() -> dict[str, tuple[Callable[[], object], int]]:
    """Return the two ways from 32-pixel images to normalized model input."""
    data = Shapes(train_size=2000, batch_size=BATCH)
    data.setup("fit")
    images = [Image.fromarray(i.permute(1, 2, 0).numpy()) for i in next(iter(data.val_dataloader()))["image"]]
    resize = [v2.Resize(SIZE, v2.InterpolationMode.BICUBIC), v2.ToImage()]
    one_by_one = v2.Compose([*resize, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    full, half = Preprocess((SIZE, SIZE), MEAN, STD), Preprocess((SIZE, SIZE), MEAN, STD).bfloat16()
    train = data.datasets["train"]
    positions = torch.randint(len(train), (BATCH,)).tolist()
    return {
        "Pillow, one by one": (lambda: torch.stack(one_by_one(images)), 2),
        "whole batch, fp32": (lambda: full(train.__getitems__(positions)["image"]), 20),
        "whole batch, bf16": (lambda: half(train.__getitems__(positions)["image"]), 100),
    }


def random_crops() -> dict[str, tuple[Callable[[], object], int]]:
    """Return torchvision's transform on tensors, and this project's crops as they run on a CPU and on a GPU."""
    stored = torch.randint(0, 256, (CROPS, 3, STORED, STORED), dtype=torch.uint8)
    boxes, flipped = random_boxes(stored, SCALE, (SIZE, SIZE)), torch.rand(CROPS) < 0.5
    crop = v2.RandomResizedCrop(SIZE, (SCALE, 1), interpolation=v2.InterpolationMode.BICUBIC)
    in_float = v2.Compose([v2.ToDtype(torch.float32, scale=True), crop])
    return {
        "torchvision, float32 tensors": (lambda: torch.stack([in_float(image) for image in stored]), 1),
        "torchvision, uint8 tensors": (lambda: torch.stack([crop(image) for image in stored]), 3),
        "random_resized_crop on a CPU": (lambda: random_resized_crop(stored, SCALE, True, (SIZE, SIZE)), 3),
        "as on a GPU, matrices in float32": (lambda: crop_batch(stored, boxes, (SIZE, SIZE), flipped), 1),
    }


if __name__ == "__main__":
    print(f"{BATCH} images of 32 pixels to {SIZE}, {ROUNDS} rounds, {torch.get_num_threads()} threads")
    compare(small_images(), BATCH)
    print(f"random crops of {CROPS} images of {STORED} pixels to {SIZE}")
    compare(random_crops(), CROPS)
