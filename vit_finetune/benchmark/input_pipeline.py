"""From stored 32-pixel images to 224-pixel model input: ``python -m vit_finetune.benchmark.input_pipeline``.

Compares this project's path (one index operation, normalize, resize by two matrix products) with the usual one (per
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
BATCH = 32  # larger results leave the heap, and then fresh pages cost more than the arithmetic
ROUNDS = 7
MEAN = STD = [0.5, 0.5, 0.5]


def rate(function: Callable[[], object], repeats: int) -> float:
    """Images per second of CPU time over all threads, for a function that makes one batch."""
    start = time.process_time()
    for _ in range(repeats):
        function()
    return repeats * BATCH / (time.process_time() - start)


def measure() -> None:
    """Prints the median rates and ratios over interleaved rounds."""
    data = Shapes(train_size=2000, batch_size=BATCH)
    data.setup("fit")
    batch = next(iter(data.val_dataloader()))["image"]
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in batch]
    one_by_one = v2.Compose(
        [
            v2.Resize(SIZE, v2.InterpolationMode.BICUBIC),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    full, half = Preprocess((SIZE, SIZE), MEAN, STD), Preprocess((SIZE, SIZE), MEAN, STD).bfloat16()
    train = data.datasets["train"]
    positions = torch.randint(len(train), (BATCH,)).tolist()

    def ours(module: Preprocess) -> torch.Tensor:
        result: torch.Tensor = module(train.__getitems__(positions)["image"])
        return result

    rates: dict[str, list[float]] = {"Pillow, one by one": [], "ours, fp32": [], "ours, bf16": []}
    with torch.inference_mode():
        ours(full), ours(half), one_by_one(images[0])
        for _ in range(ROUNDS):
            rates["Pillow, one by one"].append(rate(lambda: torch.stack(one_by_one(images)), 2))
            rates["ours, fp32"].append(rate(lambda: ours(full), 20))
            rates["ours, bf16"].append(rate(lambda: ours(half), 100))
    base = statistics.median(rates["Pillow, one by one"])
    for name, values in rates.items():
        ratio = statistics.median(values) / base
        print(f"{name:20s} {median_range(values):24s} images per CPU second  ratio {ratio:.1f}")


if __name__ == "__main__":
    print(f"{BATCH} images of 32 pixels to {SIZE}, {ROUNDS} rounds, {torch.get_num_threads()} threads")
    measure()
