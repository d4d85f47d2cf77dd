"""Summary of a run: options and best metric for TensorBoard, files and next commands for the terminal."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from vit_finetune.callbacks.resume_checkpoint import ResumeCheckpoint
from vit_finetune.callbacks.tensorboard import tensorboard_loggers
from vit_finetune.checkpoint import read_header


class RunSummary(Callback):
    """Log the options with the best metric (tab HPARAMS); print the checkpoints and the next commands at the end.

    Args:
        log_dir: Folder of all runs, for ``tensorboard --logdir``.
    """

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir

    @override
    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log while the event file is open."""
        best = _best(trainer)
        if best is None or best.best_model_score is None:
            return
        options = {f"model/{key}": value for key, value in pl_module.hparams.items() if not key.startswith("_")}
        data: Any = getattr(trainer, "datamodule", None)
        hparams = data.hparams if data else {}
        options |= {f"data/{key}": value for key, value in hparams.items() if key != "_instantiator"}
        options |= {"precision": str(trainer.precision), "world_size": trainer.world_size}
        options["seed"] = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        for logger in tensorboard_loggers(trainer):
            logger.log_hyperparams(options, {f"best/{best.monitor}": float(best.best_model_score)})

    @override
    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        best = _best(trainer)
        lines = []
        if best is not None and best.best_model_path:
            metric = f"{best.monitor} {float(best.best_model_score):.4f}" if best.best_model_score is not None else ""
            epoch = read_header(Path(best.best_model_path))["epoch"]
            lines += [f"best  {metric} in epoch {epoch}  {os.path.relpath(best.best_model_path)}"]
        else:
            lines += ["best  none: validation did not run"]
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ResumeCheckpoint) and callback.path is not None:
                lines.append(f"last  {os.path.relpath(callback.path)}")
        lines += [
            "next  python -m vit_finetune test --ckpt_path best",
            f"      tensorboard --logdir {self.log_dir}",
        ]
        print("\n".join(lines), flush=True)


def _best(trainer: Trainer) -> ModelCheckpoint | None:
    """Return the checkpoint callback that monitors a metric."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor:
            return callback
    return None
