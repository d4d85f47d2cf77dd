"""The full state of a run, to go on from: after each epoch, every so many steps, and when a signal ends it."""

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vit_finetune.evaluation.metrics import require_finite

# SLURM sends the last one some time before a job's end; Windows has none.
SIGNALS = [signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]
ASK_EVERY = 10  # batches; several processes have to agree on where to stop, and asking takes a message each


class ResumeCheckpoint(Checkpoint):
    """Keeps ``checkpoints/last.ckpt`` in the run's folder: weights, optimizer, schedule, position in the data.

    SIGTERM, SIGUSR1 and the first Ctrl+C end the run after the step at hand (after the last step of an epoch, at its
    end), with the state saved and 128 plus the signal's number as exit code; a second Ctrl+C ends it at once. A run
    killed in any other way goes on from the file as it was written last.

    Args:
        every_n_steps: Save every so many optimizer steps too, not only at the end of each epoch.
        save_weights_only: Leave out what is needed to go on training.
    """

    def __init__(self, every_n_steps: int | None = None, save_weights_only: bool = False) -> None:
        self.every_n_steps = every_n_steps
        self.save_weights_only = save_weights_only
        self.path: Path | None = None
        self._received: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Decides on the file, the same in every process."""
        if stage == "fit" and trainer.log_dir is not None:
            self.path = Path(trainer.log_dir) / "checkpoints" / "last.ckpt"
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment):
            # Lightning's own way leaves a file that every later job would go on from, unasked.
            environment.auto_requeue = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes over the signals."""
        self._received = None
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._receive)  # Lightning gives them back, whichever way the run ends

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves if it is time to, and stops if a signal asked for it."""
        # A run that goes on from a state between a step and the validation or the end of the epoch that follows leaves
        # those out. They save themselves.
        loop = trainer.fit_loop
        if not trainer.is_last_batch and not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):  # type: ignore[arg-type]
            self._between_steps(trainer, outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Does the same after a validation within an epoch."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not trainer.is_last_batch:
            self._between_steps(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the finished epoch, whatever its metric; stops if a signal asked for it and more was to come."""
        if not trainer.is_last_batch:
            return
        self.save(trainer)
        complete = trainer.current_epoch + 1 == trainer.max_epochs or trainer.global_step == trainer.max_steps
        if not complete and not _ends_early(trainer):
            self._stop_if_asked(trainer)

    def _between_steps(self, trainer: Trainer, outputs: Any = None) -> None:
        window = trainer.accumulate_grad_batches
        ends = trainer.global_step == trainer.max_steps or _ends_early(trainer)
        # Gradients that were accumulated are not saved. A run that ends among them has fewer in its next step.
        if (trainer.fit_loop.epoch_loop.batch_idx + 1) % window and not ends:
            return
        if ends or (self.every_n_steps and trainer.global_step % self.every_n_steps == 0):
            if outputs is not None:
                require_finite(trainer, float(outputs["loss"]), "training")  # no broken weights over good ones
            self.save(trainer)
        if trainer.world_size == 1 or trainer.global_step % max(1, ASK_EVERY // window) == 0:
            self._stop_if_asked(trainer)

    def save(self, trainer: Trainer) -> None:
        """Writes the file; called in every process."""
        if self.path is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.path, self.save_weights_only)

    def _stop_if_asked(self, trainer: Trainer) -> None:
        number = self._received or 0
        if trainer.world_size > 1:  # all have to stop, and to end with the same code
            received = torch.tensor(number, device=trainer.strategy.root_device)
            number = int(trainer.strategy.reduce(received, reduce_op="max"))
        if not number:
            return
        self.save(trainer)
        where = os.path.relpath(self.path) if self.path else "nothing"
        rank_zero_info(
            f"{signal.Signals(number).name} after step {trainer.global_step}: saved {where}; "
            "go on by fit with the same options and --ckpt_path last"
        )
        raise SystemExit(128 + number)


def _ends_early(trainer: Trainer) -> bool:
    """Whether a callback ends the run, a time limit for example."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early
