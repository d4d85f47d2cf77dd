"""One framework in a process of its own: clean memory, a clean start, one thread."""

import json
import sys
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import torch
from lightning import seed_everything

from vit_finetune.benchmark.frameworks import record
from vit_finetune.benchmark.frameworks.task import Task
from vit_finetune.callbacks.throughput import peak_memory_gb

WINDOW = 50  # steps; the default of --trainer.log_every_n_steps, so that what happens then counts
WARM_UP = 2  # windows


@dataclass
class Measured:
    """What one run gave.

    Args:
        losses: Of each step; empty if the task does not record.
        accuracy: Share of the held-out images, after the last step; ``None`` if the task does not record.
        windows: Milliseconds a step, means over windows of 50 steps, warm-up left out.
        peak_memory_gb: Largest memory of the process, or on a GPU the largest allocated there.
    """

    losses: list[float] = field(default_factory=list)
    accuracy: float | None = None
    windows: list[float] = field(default_factory=list)
    peak_memory_gb: float = 0.0


def execute(framework: str, task: Task) -> Measured:
    """Runs a framework in this process."""
    record.clear()
    seed_everything(task.seed)
    import_module(f"{__package__}.{framework}").run(task)
    marks = record.clock[::WINDOW][WARM_UP:]
    return Measured(
        losses=[float(loss) for loss in record.losses],
        accuracy=record.accuracies[-1] if record.accuracies else None,
        windows=[(end - start) / WINDOW * 1e3 for start, end in pairwise(marks)],
        peak_memory_gb=peak_memory_gb(torch.device(task.device)),
    )


if __name__ == "__main__":
    name, task, result = sys.argv[1:]
    torch.set_num_threads(1)
    measured = execute(name, Task(**json.loads(task)))
    Path(result).write_text(json.dumps(asdict(measured)))
