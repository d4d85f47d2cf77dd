"""What one training step costs beyond a plain PyTorch loop: ``python -m vit_finetune.benchmark.step_cost``.

Both sides train the same network on the same batches with the same augmentation, optimiser and schedule. The plain loop
does nothing else; the other side is the command line as a user gets it, with progress, TensorBoard, metrics and
checkpoints. Time is taken where the data set hands out a batch, equally on both sides, and averaged over windows of 50
steps, so that what happens every 50 steps counts. The 10th percentile leaves out what other programs did meanwhile.
"""

import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from vit_finetune import main
from vit_finetune.augment import shift_and_flip
from vit_finetune.data import Shapes
from vit_finetune.data.pictures import Batch, MemoryPictures, PictureSet
from vit_finetune.network import build, preprocessing
from vit_finetune.optim import WarmupCosine, build_optimizer, parameter_rules

WINDOW = 50  # steps
STEPS = 1000
ROUNDS = 5
BATCH = 8
NAME = "vit_tiny_patch16_224"
# One block of width 16 hides nothing; twelve of them have a real network's number of tensors.
DEPTHS = (1, 12)

clock: list[float] = []


class TimedPictures(MemoryPictures):
    """Notes the time at which each batch is asked for."""

    def __getitems__(self, positions: list[int]) -> Batch:
        """Returns the batch."""
        clock.append(time.perf_counter())
        return super().__getitems__(positions)


class TimedShapes(Shapes):
    """The generated pictures, on the clock."""

    def load(self, stage: str) -> dict[str, PictureSet]:
        """Reads the same pictures as :class:`Shapes`."""
        sets = super().load(stage)
        for pictures in sets.values():
            pictures.__class__ = TimedPictures
        return sets


def plain_loop(depth: int) -> None:
    """The loop as one would write it by hand."""
    data = TimedShapes(train_size=BATCH * STEPS * 2, val_fraction=0.5, batch_size=BATCH)
    data.setup("fit")
    net = build(NAME, 10, 32, 0.0, kwargs(depth)).train()
    preprocess = preprocessing({"size": (32, 32), "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"})
    optimizer = build_optimizer(net, parameter_rules(net, 0.05, 0.75), "adamw", 3e-4, fused=True)
    schedule = WarmupCosine(optimizer, STEPS, 0.1, 1e-6)
    for step, batch in enumerate(data.train_dataloader()):
        images = shift_and_flip(batch["image"], 0.125, True)
        loss = F.cross_entropy(net(preprocess(images)), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step_update(step + 1)


def command_line(depth: int) -> None:
    """The same through ``fit``."""
    with tempfile.TemporaryDirectory() as folder:
        model = [f"--model.name={NAME}", "--model.pretrained=false", "--model.img_size=32"]
        model.append(f"--model.timm_kwargs={kwargs(depth)}")
        data = [f"--data={TimedShapes.__module__}.TimedShapes", f"--data.train_size={BATCH * STEPS * 2}"]
        data += ["--data.val_fraction=0.5", f"--data.batch_size={BATCH}"]
        trainer = [f"--trainer.default_root_dir={folder}", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
        trainer += ["--trainer.limit_val_batches=1", "--trainer.num_sanity_val_steps=0"]
        main(["fit", *model, *data, *trainer])


def kwargs(depth: int) -> dict[str, int]:
    """The small network."""
    return {"patch_size": 16, "embed_dim": 16, "depth": depth, "num_heads": 1}


def windows() -> list[float]:
    """Mean milliseconds a step in each window, the first two windows left out as warm-up."""
    times = clock[: STEPS + 1]
    means = [(b - a) / WINDOW * 1e3 for a, b in zip(times[::WINDOW], times[WINDOW::WINDOW], strict=False)]
    clock.clear()
    return means[2:]


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    return sorted(values)[int(share * (len(values) - 1))]


def measure() -> None:
    """Prints milliseconds a step for both sides and their difference."""
    for depth in DEPTHS:
        results: dict[str, list[float]] = {"plain": [], "fit": []}
        for _ in range(ROUNDS):
            plain_loop(depth)
            results["plain"] += windows()
            command_line(depth)
            results["fit"] += windows()
        for share, name in ((0.1, "10th percentile"), (0.5, "median")):
            plain, fit = (percentile(results[side], share) for side in ("plain", "fit"))
            print(f"depth {depth:2d}  {name:15s}  plain {plain:.3f} ms  fit {fit:.3f} ms  cost {fit - plain:.3f} ms")


if __name__ == "__main__":
    # Under its own name: the command line makes TimedShapes from there, and both must use one clock.
    from vit_finetune.benchmark import step_cost  # noqa: PLW0406

    torch.set_num_threads(1)
    print(f"one thread, batch {BATCH}, {ROUNDS} rounds of {STEPS} steps, {Path(__file__).name}")
    step_cost.measure()
