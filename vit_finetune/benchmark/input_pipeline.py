"""Speed from stored 32-pixel images to 224-pixel model input: ``python -m vit_finetune.benchmark.input_pipeline``.

Compares this project's way (one index operation, normalize, resize by two matrix products) with the usual one (for each
image: Pillow, bicubic resize, tensor, normalize), in images per second of CPU time.
"""

import statistics
import time
from collections.abc import Callable

import torch
from PIL import Image
from torchvision.transforms import v2

from vit_finetune.data import Shapes
from vit_finetune.formatting import median_range
from vit_finetune.model.preprocess import Preprocess

SIZE = 224
BATCH = 32  # larger results do not fit into memory that is reused, and new pages cost more than the arithmetic
ROUNDS = 7
MEAN = STD = [0.5, 0.5, 0.5]


def images_per_second(function: Callable[[], object], repeats: int) -> float:
    """Return images per second of CPU time over all threads, for a function that makes one batch."""
    start = time.process_time()
    for _ in range(repeats):
        function()
    return repeats * BATCH / (time.process_time() - start)


def measure() -> None:
    """Print the median speeds and ratios over alternating rounds."""
    data = Shapes(train_size=2000, batch_size=BATCH)
    data.setup("fit")
    images = [Image.fromarray(i.permute(1, 2, 0).numpy()) for i in next(iter(data.val_dataloader()))["image"]]
    resize = [v2.Resize(SIZE, v2.InterpolationMode.BICUBIC), v2.ToImage()]
    one_by_one = v2.Compose([*resize, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    full, half = Preprocess((SIZE, SIZE), MEAN, STD), Preprocess((SIZE, SIZE), MEAN, STD).bfloat16()
    train = data.datasets["train"]
    positions = torch.randint(len(train), (BATCH,)).tolist()
    functions: dict[str, tuple[Callable[[], object], int]] = {
        "Pillow, one by one": (lambda: torch.stack(one_by_one(images)), 2),
        "whole batch, fp32": (lambda: full(train.__getitems__(positions)["image"]), 20),
        "whole batch, bf16": (lambda: half(train.__getitems__(positions)["image"]), 100),
    }
    speeds: dict[str, list[float]] = {name: [] for name in functions}
    with torch.inference_mode():
        for function, _ in functions.values():
            function()  # warm-up
        for _ in range(ROUNDS):
            for name, (function, repeats) in functions.items():
                speeds[name].append(images_per_second(function, repeats))
    base = statistics.median(speeds["Pillow, one by one"])
    for name, values in speeds.items():
        shown = f"{name:20s} {median_range(values):24s} images per CPU second"
        print(f"{shown}  ratio {statistics.median(values) / base:.1f}")


if __name__ == "__main__":
    print(f"{BATCH} images of 32 pixels to {SIZE}, {ROUNDS} rounds, {torch.get_num_threads()} threads")
    measure()
