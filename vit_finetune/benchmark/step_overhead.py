"""Overhead per training step over a plain PyTorch loop: ``python -m vit_finetune.benchmark.step_overhead``.

Times three of the six frameworks of :mod:`vit_finetune.benchmark.frameworks`: the plain loop, which only trains;
Lightning's Trainer with everything off; and the command line with everything that a run has: progress, TensorBoard,
metrics and checkpoints. Time is taken where the dataset returns a batch, for all alike, and averaged over windows of 50
steps, so that work done every 50 steps counts. The 10th percentile leaves out the influence of other programs.
"""

from vit_finetune.benchmark.frameworks.compare import overhead_table, time_steps


def measure() -> None:
    """Print milliseconds per step of the plain loop and the overhead of the Trainer and of the command line."""
    print(overhead_table(time_steps(["lightning_trainer", "this_project"], rounds=5, steps=1000, device="cpu")))


if __name__ == "__main__":
    measure()
