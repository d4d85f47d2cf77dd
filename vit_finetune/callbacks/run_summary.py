"""What a run came to: for TensorBoard's table of runs, and for the person at the terminal."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from vit_finetune.callbacks.resume_checkpoint import ResumeCheckpoint
from vit_finetune.checkpoint import read_header


class RunSummary(Callback):
    """Stores the options with the best metric (tab HPARAMS), and says at the end what there is and what comes next.

    Args:
        log_dir: The folder to name after ``tensorboard --logdir``.
    """

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir

    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes options and the best metric into the event file while it is open."""
        best = _best(trainer)
        if best is None or best.best_model_score is None:
            return
        options = {f"model/{key}": value for key, value in pl_module.hparams.items() if not key.startswith("_")}
        data: Any = getattr(trainer, "datamodule", None)
        options |= {
            f"data/{key}": value for key, value in (data.hparams if data else {}).items() if key != "_instantiator"
        }
        options |= {"precision": str(trainer.precision), "world_size": trainer.world_size}
        options["seed"] = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(options, {f"best/{best.monitor}": float(best.best_model_score)})

    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the best metric, its epoch, the files, and the next commands."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        best = _best(trainer)
        lines = []
        if best is not None and best.best_model_path:
            score = f"{best.monitor} {float(best.best_model_score):.4f}" if best.best_model_score is not None else ""
            epoch = read_header(Path(best.best_model_path))["epoch"]
            lines += [f"best  {score} in epoch {epoch}  {os.path.relpath(best.best_model_path)}"]
        else:
            lines += ["best  none: no validation took place"]
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ResumeCheckpoint) and callback.path is not None:
                lines.append(f"last  {os.path.relpath(callback.path)}")
        lines += [
            "next  python -m vit_finetune test --ckpt_path best",
            f"      tensorboard --logdir {self.log_dir}",
        ]
        print("\n".join(lines), flush=True)


def _best(trainer: Trainer) -> ModelCheckpoint | None:
    """The checkpoint callback that follows a metric."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor:
            return callback
    return None
