"""The task that all frameworks share, the values that are recorded, and a process for each run.

Network, weights, data, optimizer and schedule are made by this project's functions.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import seed_everything
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from vit_finetune.callbacks.throughput import peak_memory_gb
from vit_finetune.data import Shapes
from vit_finetune.data.datasets import Batch, ImageDataset, InMemoryDataset
from vit_finetune.model import local_weights, optim, vit
from vit_finetune.model.config import ViTConfig
from vit_finetune.model.precision import compute_dtype

Precision = Literal["32-true", "bf16-mixed", "16-mixed"]

NAME = "vit_tiny_patch16_224"
CLASSES = 10
PIXELS = 32
VAL_IMAGES = 200
WEIGHT_DECAY, WARMUP, MIN_LR = 0.05, 0.1, 1e-6  # as in ViTClassifier
WINDOW = 50  # steps; the default of --trainer.log_every_n_steps, so that what happens then counts
WARM_UP = 2  # windows
FAILED = "exit code"  # start of the reason of a failed run


@dataclass(frozen=True)
class Task:
    """A fine-tuning run on generated images, described by plain values that can be passed to another process.

    Args:
        name: As shown in the report.
        timm_kwargs: Architecture of the network.
        steps: Optimizer steps per epoch.
        epochs: Number of epochs, each with its own order of the images.
        batch: Images per step.
        lr: Peak learning rate of the head.
        layer_decay: Factor on the learning rate from each block to the one below it.
        precision: As in ``--trainer.precision``.
        device: ``cpu`` or ``cuda``.
        seed: For shuffling and augmentation.
        record: Report loss and accuracy. Off where only time is measured, because this project's command line needs
            an additional callback for them.
        weights: File of the initial weights, see :meth:`write_weights`.
    """

    name: str
    timm_kwargs: dict[str, Any] = field(default_factory=dict)
    steps: int = 100
    epochs: int = 1
    batch: int = 8
    lr: float = 3e-4
    layer_decay: float | None = 0.75
    precision: Precision = "32-true"
    device: str = "cpu"
    seed: int = 0
    record: bool = True
    weights: str = ""

    @property
    def config(self) -> ViTConfig:
        """Architecture of the network."""
        return ViTConfig(NAME, img_size=PIXELS, timm_kwargs=self.timm_kwargs)

    def write_weights(self) -> None:
        """Draw the initial weights from the seed and write them to the file that all frameworks read."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = vit.build(self.config, CLASSES)
        save_file(net.state_dict(), self.weights)

    @property
    def data_options(self) -> dict[str, Any]:
        """Arguments of :class:`TimedShapes`."""
        size = self.steps * self.batch + VAL_IMAGES
        return {"train_size": size, "val_fraction": VAL_IMAGES / size, "batch_size": self.batch}

    def data(self) -> "TimedShapes":
        """Draw the images."""
        data = TimedShapes(**self.data_options)
        data.setup("fit")
        return data

    def build(self) -> tuple[nn.Module, Optimizer]:
        """Build the model and its optimizer.

        Returns:
            A module from uint8 ``(B, 3, H, W)`` to logits ``(B, 10)`` on the CPU, and fused AdamW with the parameter
            groups of layer decay.
        """
        net = vit.build(self.config, CLASSES)
        local_weights.load(net, self.weights)
        vit.set_attention_kernel(net, torch.device(self.device), compute_dtype(self.precision))
        rules = optim.parameter_rules(net, WEIGHT_DECAY, self.layer_decay)
        optimizer = optim.build_optimizer(net, rules, "adamw", self.lr, fused=True)
        return nn.Sequential(vit.build_preprocess(self.config), net), optimizer

    def schedule(self, optimizer: Optimizer) -> optim.WarmupCosine:
        """Build the schedule; ``step_update(n)`` sets the learning rates after ``n`` optimizer steps."""
        schedule = optim.WarmupCosine(optimizer, WARMUP, MIN_LR)
        schedule.set_length(self.steps * self.epochs)
        return schedule


@dataclass
class Record:
    """Values that all frameworks record alike while they train.

    Attributes:
        times: Time at which each training batch was requested, in seconds.
        losses: Loss of each step, on its device.
        accuracy: On the validation images, after training.
    """

    times: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    accuracy: float | None = None

    def clear(self) -> None:
        """Remove the values of an earlier run in this process."""
        self.times, self.losses, self.accuracy = [], [], None


record = Record()


class TimedDataset(InMemoryDataset):
    """Dataset in memory that records when each batch is requested."""

    @override
    def __getitems__(self, positions: list[int]) -> Batch:
        record.times.append(time.perf_counter())
        return super().__getitems__(positions)


class TimedShapes(Shapes):
    """The generated images of :class:`Shapes`; requests for training batches are timed."""

    @override
    def load_datasets(self, stage: str) -> dict[str, ImageDataset]:
        datasets = super().load_datasets(stage)
        train = datasets.get("train")
        if isinstance(train, InMemoryDataset):
            datasets["train"] = TimedDataset(train.images, train.labels, train.names)
        return datasets


class Recorder(Callback):
    """Record losses and accuracy of a Lightning run."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        record.losses.append(outputs["loss"])

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record.accuracy = float(trainer.callback_metrics["val/acc"])


@dataclass(frozen=True)
class Result:
    """Result of one run of one framework.

    Attributes:
        framework: Name of its module.
        task: The task.
        round: Counted from 0.
        reason: Why it did not run; empty if it did.
        losses: Loss of each step; empty if not recorded.
        accuracy: On the validation images after training; ``None`` if not recorded.
        windows: Milliseconds per step, means over windows of 50 steps after warm-up.
        peak_memory_gb: Of the process, or on a GPU the memory allocated there.
    """

    framework: str
    task: Task
    round: int = 0
    reason: str = ""
    losses: list[float] = field(default_factory=list)
    accuracy: float | None = None
    windows: list[float] = field(default_factory=list)
    peak_memory_gb: float = 0.0


def execute(framework: str, task: Task) -> Result:
    """Run a framework in this process."""
    record.clear()
    seed_everything(task.seed)
    import_module(f"{__package__}.{framework}").run(task)
    return Result(
        framework,
        task,
        losses=[float(loss) for loss in record.losses],
        accuracy=record.accuracy,
        windows=[(end - start) / WINDOW * 1e3 for start, end in pairwise(record.times[::WINDOW][WARM_UP:])],
        peak_memory_gb=peak_memory_gb(torch.device(task.device)),
    )


def run_process(result: Result, path: Path) -> Result:
    """Run one framework in a process of its own, so that memory, start and settings are the same for all."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("VIT_FINETUNE_")}
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # the HF Trainer would use all of them
    variables = own | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": first_gpu}
    code = f"from {__package__}.task import main; main()"
    command = [sys.executable, "-c", code, result.framework, json.dumps(asdict(result.task)), str(path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return replace(result, reason=f"{FAILED} {done.returncode}: {last}")
    return replace(result, **json.loads(path.read_text(encoding="utf-8")))


def main() -> None:
    """Run a framework in the process that :func:`run_process` starts, with one thread."""
    framework, task, path = sys.argv[1:]
    torch.set_num_threads(1)
    result = vars(execute(framework, Task(**json.loads(task))))
    measured = {name: result[name] for name in ("losses", "accuracy", "windows", "peak_memory_gb")}
    Path(path).write_text(json.dumps(measured), encoding="utf-8")
