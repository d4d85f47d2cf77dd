"""Pictures per second and peak memory."""

import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vit_finetune.data.pictures import Batch


class SpeedMonitor(Callback):
    """Logs ``train/images_per_second``, over all processes, and ``train/peak_memory_gb``, of this one.

    Both cover the steps since the last point; time spent in validation does not count. On a GPU the clock is read
    without waiting for the device, which over a logging interval makes no difference.
    """

    def __init__(self) -> None:
        self._images = 0
        self._start = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._restart()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves validation out of the time."""
        self._restart()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Counts the batch; logs at the logging interval and at the epoch's end."""
        self._images += len(batch["label"])
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (every and (batch_idx + 1) % every == 0) or trainer.is_last_batch:
            speed = self._images * trainer.world_size / (time.perf_counter() - self._start)
            values = {"train/images_per_second": speed, "train/peak_memory_gb": peak_memory_gb(pl_module.device)}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step - 1)  # the index of the step just done
            self._restart()

    def _restart(self) -> None:
        self._images = 0
        self._start = time.perf_counter()


def peak_memory_gb(device: torch.device) -> float:
    """Largest memory so far in GB (1e9 bytes): allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if sys.platform == "linux":
        # getrusage also counts what the program that started this one had used by then.
        peak = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if peak:
            return int(peak[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS and KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
