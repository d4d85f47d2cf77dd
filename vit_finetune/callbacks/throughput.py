"""Throughput, time spent waiting for data, and memory."""

import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from vit_finetune.data.datasets import Batch
from vit_finetune.model import flops, lora, memory
from vit_finetune.model.precision import trainer_precision
from vit_finetune.module import ViTClassifier


class ThroughputLogger(Callback):
    """Log throughput and memory over the steps since the last logged point, without the time spent in validation.

    - ``train/images_per_second``, over all devices
    - ``train/data_time_fraction``, fraction of the time in which training waited for the DataLoader
    - ``train/tflops``, 1e12 floating-point operations per second and device, see :mod:`vit_finetune.model.flops`
    - ``train/mfu``, model FLOPs utilization: the same as a fraction of the peak in the device's data sheet, if known
    - ``train/peak_memory_gb``, of this process so far
    - ``train/first_step_seconds``, once: the first step includes compilation and other warm-up
    - ``train/seconds``, once: all of training with its validation

    On a GPU the clock is read without synchronization, which makes no difference over a logging interval.
    """

    def __init__(self) -> None:
        self._images = 0
        self._start = 0.0
        self._waited = 0.0
        self._train_start = 0.0
        self._first_step_done = False
        self._tera_per_image = 0.0
        self._peak: float | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # With unfreeze_by, the operations per image grow from epoch to epoch.
        if isinstance(pl_module, ViTClassifier) and pl_module.class_names and not pl_module.hparams["unfreeze_by"]:
            self._tera_per_image = flops.flops_per_image(pl_module.config, len(pl_module.class_names)) / 1e12
            self._peak = flops.peak_flops(pl_module.device, trainer_precision(trainer))
        self._train_start = time.perf_counter()
        self._restart(trainer)  # a run that is resumed within an epoch has no on_train_epoch_start

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        self._images += len(batch["label"])
        if not self._first_step_done:
            self._first_step_done = True
            self._log(trainer, {"train/first_step_seconds": time.perf_counter() - self._start})
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (every and (batch_idx + 1) % every == 0) or trainer.is_last_batch:
            self._log(trainer, self._values(trainer, pl_module))
            self._restart(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, {"train/seconds": time.perf_counter() - self._train_start})

    def _values(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        seconds = time.perf_counter() - self._start
        # The processes of a tensor-parallel group train on the same images.
        replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        speed = self._images * replicas / seconds
        values = {"train/images_per_second": speed, "train/peak_memory_gb": peak_memory_gb(module.device)}
        if (waited := _waited(trainer)) is not None:
            values["train/data_time_fraction"] = (waited - self._waited) / seconds
        if self._tera_per_image:
            values["train/tflops"] = speed * self._tera_per_image / trainer.world_size
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
            logger.log_metrics(values, step=max(0, trainer.global_step - 1))  # index of the step just finished


def _waited(trainer: Trainer) -> float | None:
    """Return the seconds spent waiting for the DataLoader so far, if it counts them."""
    waited: float | None = getattr(trainer.train_dataloader, "waited", None)
    return waited


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory so far in GB (1e9 bytes): allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if sys.platform == "linux":
        # getrusage includes the memory of the parent process before this one was started.
        peak = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if peak:
            return int(peak[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS and KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class MemoryForecast(Callback):
    """Log the predicted memory of training on each device, to compare with ``train/peak_memory_gb``.

    The tags are ``memory/forecast_gb`` and its parts, such as ``memory/activations_gb``; see
    :mod:`vit_finetune.model.memory`; and ``memory/trainable_parameters``, their number. The forecast takes one or two
    seconds before the first step.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, ViTClassifier)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        config, classes = pl_module.config, len(pl_module.class_names or [])
        forecast = memory.of_fit(trainer, config, classes, data.batch_size)
        values = {f"memory/{name}_gb": size / 1e9 for name, size in vars(forecast).items() if size is not None}
        values["memory/forecast_gb"] = forecast.total / 1e9
        values["memory/trainable_parameters"] = lora.trainable_parameters(lora.build_meta(config, classes))
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
