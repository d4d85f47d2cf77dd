"""Summary of a run: options and best metric for TensorBoard, files and next commands for the terminal."""

import os
import shlex
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from vit_finetune.callbacks.resume_checkpoint import ResumeCheckpoint
from vit_finetune.callbacks.tensorboard import tensorboard_loggers
from vit_finetune.checkpoint import read_header
from vit_finetune.evaluation.find_checkpoint import KEYWORDS, RUNS, best_callback, newest

PACKAGE = f"{__name__.partition('.')[0]}."


class RunSummary(Callback):
    """Log the options with the best metric (tab HPARAMS); print the checkpoints and the next commands at the end."""

    @override
    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log while the event file is open."""
        best = best_callback(trainer)
        if best is None or best.best_model_score is None:
            return
        options = {f"model/{key}": value for key, value in pl_module.hparams.items() if not key.startswith("_")}
        data: Any = getattr(trainer, "datamodule", None)
        hparams = data.hparams if data else {}
        options |= {f"data/{key}": value for key, value in hparams.items() if key != "_instantiator"}
        options |= {"precision": str(trainer.precision), "world_size": trainer.world_size}
        options["seed"] = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        metrics = {f"best/{best.monitor}": float(best.best_model_score)}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(options, metrics)
            else:
                logger.log_hyperparams(options)
                logger.log_metrics(metrics, trainer.global_step)

    @override
    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        best, last = _best_file(trainer), _last_file(trainer)
        lines = [f"best  {_description(trainer, best)}" if best else "best  none: validation did not run"]
        lines += [f"last  {os.path.relpath(last)}"] if last else []
        following = [
            f"python -m vit_finetune {_test_command(path)}{_data_option(trainer)}" for path in [best or last] if path
        ]
        following += [f"tensorboard --logdir {_quoted(logger.save_dir)}" for logger in tensorboard_loggers(trainer)[:1]]
        lines += [f"{'      ' if number else 'next  '}{command}" for number, command in enumerate(following)]
        print("\n".join(lines), flush=True)


def _best_file(trainer: Trainer) -> Path | None:
    best = best_callback(trainer)
    return Path(best.best_model_path) if best and best.best_model_path and Path(best.best_model_path).exists() else None


def _last_file(trainer: Trainer) -> Path | None:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ResumeCheckpoint) and callback.path is not None and callback.path.exists():
            return callback.path
    return None


def _description(trainer: Trainer, path: Path) -> str:
    best = best_callback(trainer)
    score = best.best_model_score if best else None
    metric = f"{best.monitor} {float(score):.4f} " if best and score is not None else ""
    return f"{metric}in epoch {read_header(path)['epoch']}  {os.path.relpath(path)}"


def _test_command(path: Path) -> str:
    """Return the arguments that test a checkpoint; ``best`` or ``last`` if the word alone finds this very file."""
    for keyword in KEYWORDS:
        found = newest(Path(RUNS), keyword)
        if found and found.resolve() == path.resolve():
            return f"test --ckpt_path {keyword}"
    return f"test --ckpt_path {_quoted(path)}"


def _data_option(trainer: Trainer) -> str:
    """Return the option that names data of your own: its class is not imported because a checkpoint says so."""
    data = type(getattr(trainer, "datamodule", None))
    return "" if data.__module__.startswith((PACKAGE, "builtins")) else f" --data {data.__module__}.{data.__qualname__}"


def _quoted(path: str | os.PathLike[str]) -> str:
    return shlex.quote(os.path.relpath(path))
