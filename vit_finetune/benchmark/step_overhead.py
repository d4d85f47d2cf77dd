"""What one training step costs beyond a plain PyTorch loop: ``python -m vit_finetune.benchmark.step_overhead``.

Two of the five frameworks of :mod:`vit_finetune.benchmark.frameworks`, and nothing but their time: the plain loop trains
and does nothing else; the other side is the command line as a user gets it, with progress, TensorBoard, metrics and
checkpoints. Time is taken where the dataset hands out a batch, equally on both sides, and averaged over windows of 50
steps, so that what happens every 50 steps counts. The 10th percentile leaves out what other programs did meanwhile.
"""

from vit_finetune.benchmark.frameworks.compare import time_steps
from vit_finetune.benchmark.frameworks.tables import cost_table


def measure() -> None:
    """Prints milliseconds a step of the plain loop and what the command line takes beyond it."""
    print(cost_table(time_steps(["ours"], rounds=5, steps=1000, device="cpu")))


if __name__ == "__main__":
    measure()
