"""Progress bar for terminals and progress lines for files."""

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from typing_extensions import override

from vit_finetune.evaluation.metrics import StepLogger

REFRESH_EVERY = 20  # steps; redrawing the bar at each step costs as much as the rest of the logging
LINE_EVERY = 30.0  # seconds between lines in a file


def progress_bar() -> ProgressBar:
    """Return a Rich progress bar for a terminal, plain lines for a file or a pipe."""
    return RichProgress(refresh_rate=REFRESH_EVERY) if sys.stdout.isatty() else LineProgressBar()


class RichProgress(RichProgressBar):
    """Lightning's progress bar with the few values that fit on one line."""

    _validated: int | None = None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = None if trainer.sanity_checking else trainer.current_epoch
        super().on_validation_end(trainer, pl_module)

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        known = {**super().get_metrics(trainer, pl_module), **_latest(pl_module)}
        shown = {name: f"{known[name]:.3f}" for name in ("train/loss_step", "val/acc") if name in known}
        if "val/acc" in shown and self._validated not in (None, trainer.current_epoch):
            shown["val/acc"] += f" (epoch {self._validated})"
        return shown | ({"lr": f"{known['train/lr']:.1e}"} if "train/lr" in known else {})

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_predict_start(trainer, pl_module)
        self._speed = _PredictSpeed()

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._speed.add(trainer, batch)
        if self.progress is not None and self.predict_progress_bar_id is not None:
            # Lightning's column for metrics stays empty outside fit.
            description = f"{self.predict_description}{self._speed}"
            self.progress.update(self.predict_progress_bar_id, description=description)
        super().on_predict_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)


class LineProgressBar(ProgressBar):
    """Print a line after each epoch and every 30 seconds within an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._epoch: int | None = None
        self._validated: int | None = None
        self._next = 0.0

    @override
    def disable(self) -> None:
        """Print nothing; the Trainer calls it on all processes but the first."""
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def on_train_epoch_start(self, trainer: Trainer, *_: object) -> None:
        self._print_epoch(trainer)  # the previous epoch, whose metrics are complete only now
        self._begin(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._epoch is None:  # a run that is resumed within an epoch has no on_train_epoch_start
            self._begin(trainer)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY
            self._print(
                trainer, f"step {batch_idx + 1}/{trainer.num_training_batches}", ("train/loss_step", "train/lr")
            )

    @override
    def on_validation_end(self, trainer: Trainer, *_: object) -> None:
        if not trainer.sanity_checking:
            self._validated = trainer.current_epoch

    @override
    def on_train_end(self, trainer: Trainer, *_: object) -> None:
        self._print_epoch(trainer)

    @override
    def on_predict_start(self, *_: object) -> None:
        self._next = time.monotonic() + LINE_EVERY
        self._speed = _PredictSpeed()

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._speed.add(trainer, batch)
        if self._enabled and time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY
            batches = trainer.num_predict_batches[dataloader_idx]
            print(f"predict batch {batch_idx + 1}/{batches}{self._speed}", flush=True)

    def _begin(self, trainer: Trainer) -> None:
        self._epoch = trainer.current_epoch
        self._next = time.monotonic() + LINE_EVERY

    def _print_epoch(self, trainer: Trainer) -> None:
        if self._epoch is not None:
            val = ("val/loss", "val/acc") if self._validated == self._epoch else ()  # otherwise of an earlier epoch
            self._print(trainer, "done", ("train/loss", "train/acc", *val))
        self._epoch = None

    def _print(self, trainer: Trainer, position: str, names: tuple[str, ...]) -> None:
        if not self._enabled:
            return
        last = f"/{trainer.max_epochs - 1}" if trainer.max_epochs and trainer.max_epochs > 0 else ""  # from 0
        known = {**trainer.progress_bar_metrics, **_latest(trainer.lightning_module)}
        shown = "  ".join(f"{name} {known[name]:.4g}" for name in names if name in known)
        print(f"epoch {self._epoch}{last} {position}  {shown}", flush=True)


class _PredictSpeed:
    """Mean images per second over all processes since the start of ``predict``."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._images = 0

    def add(self, trainer: Trainer, batch: object) -> None:
        """Count a batch and, as they have equally many, those of the other processes; ignore other kinds of batch."""
        if isinstance(batch, dict) and "index" in batch:
            shards = trainer.distributed_sampler_kwargs or {"num_replicas": 1}
            self._images += len(batch["index"]) * shards["num_replicas"]

    def __str__(self) -> str:
        return f"  {self._images / (time.monotonic() - self._start):.0f} images/s" if self._images else ""


def _latest(module: LightningModule) -> dict[str, float]:
    """Return the metrics that the module logged last within the epoch; a module of another class may have none."""
    train_log = getattr(module, "train_log", None)
    return train_log.latest if isinstance(train_log, StepLogger) else {}
