"""Checkpoint of the best epoch, by any metric."""

import re
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from vit_finetune.checkpoint import Checkpoint
from vit_finetune.evaluation.metrics import direction


class BestCheckpoint(ModelCheckpoint):
    """Save the best checkpoint of a run, with Lightning's ModelCheckpoint.

    Args:
        monitor: Metric to compare, such as val/acc or val/loss.
        mode: min keeps the lowest values, max the highest. Default: min for a loss, max for other metrics.
        filename: Name of the file, without its ending. Default: best-, the epoch and the metric, such as
            best-epoch03-acc0.9500 or best-epoch03-loss0.1234.
        save_weights_only: Save the weights only, without the state that resuming needs.
        auto_insert_metric_name: Put the names of the metrics into the file name.
        enable_version_counter: Never overwrite a file; append -v1 and so on to its name.
    """

    def __init__(
        self,
        monitor: str | None = "val/acc",
        mode: str | None = None,
        filename: str | None = None,
        save_weights_only: bool = True,
        auto_insert_metric_name: bool = False,
        enable_version_counter: bool = False,
        **kwargs: Any,
    ) -> None:
        if (monitor or "").startswith("train/") and kwargs.get("save_on_train_epoch_end") is None:
            kwargs["save_on_train_epoch_end"] = True  # validation ends before train/ metrics are logged
        super().__init__(
            monitor=monitor,
            mode=mode or direction(monitor or "") or "max",
            filename=filename or _template(monitor),
            save_weights_only=save_weights_only,
            auto_insert_metric_name=auto_insert_metric_name,
            enable_version_counter=enable_version_counter,
            **kwargs,
        )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # All processes have to agree on which files there are.
        self._files: list[str] = trainer.strategy.broadcast([p.name for p in Path(self.dirpath or "").glob("*.ckpt")])

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Checkpoint) -> None:
        """Take over the state of the ModelCheckpoint that saved the best checkpoint in version 0.1."""
        states = checkpoint["callbacks"]
        older = self.state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)
        if older in states:
            states.setdefault(self.state_key, states[older])

    @override
    def load_state_dict(self, state_dict: Checkpoint) -> None:
        """Restore the best values; if the run folder has moved, for the files that have moved with it."""
        if state_dict["dirpath"] != self.dirpath:
            best, scores = self._moved(state_dict["best_model_path"]), state_dict["best_k_models"]
            state_dict = state_dict | {
                "dirpath": self.dirpath,
                "best_model_path": best,
                "best_model_score": state_dict["best_model_score"] if best else None,
                "best_k_models": {self._moved(path): score for path, score in scores.items() if self._moved(path)},
                "kth_best_model_path": self._moved(state_dict["kth_best_model_path"]),
            }
        super().load_state_dict(state_dict)

    def _moved(self, path: str) -> str:
        name = Path(path).name
        return str(Path(self.dirpath or "") / name) if name in self._files else ""


def _template(monitor: str | None) -> str:
    """Return a file name with the last part of the metric's name and its value."""
    if monitor is None or set(monitor) & set("{}[]:!"):  # characters with a meaning in a template
        return "best-epoch{epoch:02d}"
    name = re.sub(r"[^\w.-]+", "-", monitor.rpartition("/")[2])
    return f"best-epoch{{epoch:02d}}-{name}{{{monitor}:.4f}}"
