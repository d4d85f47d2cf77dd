"""Predicted beside measured memory."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from vit_finetune import memory


class MemoryForecast(Callback):
    """Logs what memory training should take on each device, to compare with ``train/peak_memory_gb``.

    ``memory/forecast_gb`` and its parts; see :mod:`vit_finetune.memory`. Takes a second or two before the first step.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the forecast."""
        names = getattr(pl_module, "class_names", None) or ()
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        forecast = memory.of_fit(trainer, pl_module.hparams, len(names), data.batch_size)
        values = {f"memory/{name}_gb": size / 1e9 for name, size in vars(forecast).items() if size is not None}
        for logger in trainer.loggers:
            logger.log_metrics({"memory/forecast_gb": forecast.total / 1e9, **values}, step=trainer.global_step)
