"""Progress on a terminal and in a file."""

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar

from vit_finetune.evaluation.metrics import StepLogger

REFRESH_EVERY = 20  # steps; a bar redrawn each step costs as much as the rest of the logging
LINE_EVERY = 30.0  # seconds between lines in a file


def progress_bar() -> ProgressBar:
    """A Rich bar on a terminal, plain lines where the output is a file or a pipe."""
    return RichProgress(refresh_rate=REFRESH_EVERY) if sys.stdout.isatty() else LineProgressBar()


class RichProgress(RichProgressBar):
    """Lightning's bar with the few values that fit on one line."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        """Picks them from the epoch's metrics and from what the module logs within an epoch."""
        known = {**super().get_metrics(trainer, pl_module), **_latest(pl_module)}
        shown = {name: f"{known[name]:.3f}" for name in ("train/loss_step", "val/acc") if name in known}
        return shown | ({"lr": f"{known['train/lr']:.1e}"} if "train/lr" in known else {})


class LineProgressBar(ProgressBar):
    """Prints a line after each epoch and, in long epochs, every half minute."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._epoch: int | None = None
        self._next = 0.0

    def disable(self) -> None:
        """Called by the Trainer on all processes but the first."""
        self._enabled = False

    def enable(self) -> None:
        """The opposite of :meth:`disable`."""
        self._enabled = True

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Prints the epoch before, whose metrics are complete only now."""
        self._print_epoch(trainer)
        self._begin(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Prints a line if the last one is old enough."""
        if self._epoch is None:  # a run that goes on within an epoch gets no start of that epoch
            self._begin(trainer)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY
            self._print(
                trainer, f"step {batch_idx + 1}/{trainer.num_training_batches}", ("train/loss_step", "train/lr")
            )

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Prints the last epoch."""
        self._print_epoch(trainer)

    def on_predict_start(self, *_: Any) -> None:
        """Starts the clock."""
        self._next = time.monotonic() + LINE_EVERY

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Prints a line if the last one is old enough."""
        if self._enabled and time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY
            print(f"predict batch {batch_idx + 1}/{trainer.num_predict_batches[dataloader_idx]}", flush=True)

    def _begin(self, trainer: Trainer) -> None:
        self._epoch = trainer.current_epoch
        self._next = time.monotonic() + LINE_EVERY

    def _print_epoch(self, trainer: Trainer) -> None:
        if self._epoch is not None:
            self._print(trainer, "done", ("train/loss", "train/acc", "val/loss", "val/acc"))
        self._epoch = None

    def _print(self, trainer: Trainer, position: str, names: tuple[str, ...]) -> None:
        if not self._enabled:
            return
        last = f"/{trainer.max_epochs - 1}" if trainer.max_epochs and trainer.max_epochs > 0 else ""  # both from 0
        known = {**trainer.progress_bar_metrics, **_latest(trainer.lightning_module)}
        shown = "  ".join(f"{name} {known[name]:.4g}" for name in names if name in known)
        print(f"epoch {self._epoch}{last} {position}  {shown}", flush=True)


def _latest(module: LightningModule) -> dict[str, float]:
    """What the module logged last within the epoch; other modules than ours may have no such thing."""
    window = getattr(module, "window", None)
    return window.latest if isinstance(window, StepLogger) else {}
