"""How fast training is, what it waits for, and how much memory it takes."""

import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vit_finetune.data.datasets import Batch
from vit_finetune.model import flops, memory


class ThroughputLogger(Callback):
    """Logs speed and memory over the steps since the last point; time spent in validation does not count.

    - ``train/images_per_second``, over all devices
    - ``train/data_time_fraction``, share of the time in which training waited for the loader
    - ``train/tflops``, 1e12 floating-point operations a second and device, see :mod:`vit_finetune.model.flops`
    - ``train/mfu``, the same as a share of what the device's data sheet promises, for devices that are known
    - ``train/peak_memory_gb``, of this process so far
    - ``train/first_step_seconds``, once: the first step holds compilation and other warm-up
    - ``train/seconds``, once: the whole of training with its validation

    On a GPU the clock is read without waiting for the device, which over a logging interval makes no difference.
    """

    def __init__(self) -> None:
        self._images = 0
        self._start = 0.0
        self._waited = 0.0
        self._train_start = 0.0
        self._stepped = False
        self._tera = 0.0
        self._peak: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks up what an image costs, and starts the clock of the run."""
        names = getattr(pl_module, "class_names", None)
        if names and not pl_module.hparams["unfreeze_by"]:  # which makes an image dearer from epoch to epoch
            self._tera = flops.flops_per_image(pl_module.hparams, len(names)) / 1e12
            self._peak = flops.peak_flops(pl_module.device, str(trainer.precision))
        self._train_start = time.perf_counter()
        self._restart(trainer)  # a run that goes on within an epoch gets no start of that epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._restart(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves validation out of the time."""
        self._restart(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Counts the batch; logs at the logging interval and at the epoch's end."""
        self._images += len(batch["label"])
        if not self._stepped:
            self._stepped = True
            self._log(trainer, {"train/first_step_seconds": time.perf_counter() - self._start})
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (every and (batch_idx + 1) % every == 0) or trainer.is_last_batch:
            self._log(trainer, self._values(trainer, pl_module))
            self._restart(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the time of the whole training."""
        self._log(trainer, {"train/seconds": time.perf_counter() - self._train_start})

    def _values(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        seconds = time.perf_counter() - self._start
        # Processes of one tensor-parallel group work on the same images.
        replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        speed = self._images * replicas / seconds
        values = {"train/images_per_second": speed, "train/peak_memory_gb": peak_memory_gb(module.device)}
        if (waited := _waited(trainer)) is not None:
            values["train/data_time_fraction"] = (waited - self._waited) / seconds
        if self._tera:
            values["train/tflops"] = speed * self._tera / trainer.world_size
            if self._peak:
                values["train/mfu"] = values["train/tflops"] * 1e12 / self._peak
        return values

    def _restart(self, trainer: Trainer) -> None:
        self._images = 0
        self._waited = _waited(trainer) or 0.0
        self._start = time.perf_counter()

    @staticmethod
    def _log(trainer: Trainer, values: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(values, step=max(0, trainer.global_step - 1))  # the index of the step just done


def _waited(trainer: Trainer) -> float | None:
    """Seconds spent waiting for the loader so far, where the loader counts them."""
    waited: float | None = getattr(trainer.train_dataloader, "waited", None)
    return waited


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


class MemoryForecast(Callback):
    """Logs what memory training should take on each device, to compare with ``train/peak_memory_gb``.

    ``memory/forecast_gb`` and its parts; see :mod:`vit_finetune.model.memory`. Takes a second or two before the first step.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the forecast."""
        names = getattr(pl_module, "class_names", None) or ()
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        forecast = memory.of_fit(trainer, pl_module.hparams, len(names), data.batch_size)
        values = {f"memory/{name}_gb": size / 1e9 for name, size in vars(forecast).items() if size is not None}
        for logger in trainer.loggers:
            logger.log_metrics({"memory/forecast_gb": forecast.total / 1e9, **values}, step=trainer.global_step)
