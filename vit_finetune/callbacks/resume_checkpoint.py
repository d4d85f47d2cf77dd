"""Checkpoint to resume a run from: saved after each epoch, every few steps, and when a signal ends the run."""

import os
import shlex
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
from typing_extensions import override

from vit_finetune.evaluation.metrics import require_finite

# SLURM sends SIGUSR1 some time before the end of a job; Windows does not have it.
SIGNALS = [signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]
AGREE_EVERY = 10  # batches; several processes agree on where to stop, which takes one small all-reduce


class LoopPosition:
    """Position of the training loop, as far as it decides where a run can be saved and stopped.

    A run that is resumed from a state between a step and the validation, or the end of the epoch, that follows this
    step would skip them. Lightning has no public question for that, hence the private attributes.

    Args:
        trainer: During ``fit``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def epoch_done(self) -> bool:
        """All batches of the epoch are trained on."""
        return self.trainer.is_last_batch

    @property
    def ends_now(self) -> bool:
        """The run ends after this step: the last one, or a callback such as a time limit stops it."""
        trainer = self.trainer
        # Private: should_stop alone does not end a run that has to reach min_epochs or min_steps first.
        stopped = trainer.should_stop and trainer.fit_loop._can_stop_early
        last_epoch = self.epoch_done and trainer.current_epoch + 1 == trainer.max_epochs
        return stopped or last_epoch or trainer.global_step == trainer.max_steps

    @property
    def step_done(self) -> bool:
        """An optimizer step is finished within an epoch.

        Accumulated gradients are not saved: a run that ends among them has fewer of them in its next step.
        """
        accumulating = (self.trainer.fit_loop.batch_idx + 1) % self.trainer.accumulate_grad_batches
        return not self.epoch_done and (not accumulating or self.ends_now)

    @property
    def between_steps(self) -> bool:
        """An optimizer step is finished within an epoch, and no validation follows before the next one."""
        loop = self.trainer.fit_loop
        # Private: intervals in batches, epochs and seconds all decide on a validation; only this method knows.
        return self.step_done and not loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]

    @property
    def agree_now(self) -> bool:
        """All processes exchange at this step which signals they received."""
        every = max(1, AGREE_EVERY // self.trainer.accumulate_grad_batches)
        return self.trainer.world_size == 1 or self.trainer.global_step % every == 0


class ResumeCheckpoint(Checkpoint):
    """Keep ``checkpoints/last.ckpt`` in the run folder: weights, optimizer, schedule and position in the data.

    SIGTERM, SIGUSR1 and the first Ctrl+C end the run after the current step (after the last step of an epoch: at its
    end). The state is saved, and the exit code is 128 plus the number of the signal. A second Ctrl+C ends the run at
    once. A run that is killed can be resumed from the last saved state.

    Args:
        every_n_steps: Also save every N optimizer steps, not only at the end of each epoch.
        save_weights_only: Save the weights only; such a checkpoint cannot be resumed from.
    """

    def __init__(self, every_n_steps: int | None = None, save_weights_only: bool = False) -> None:
        self.every_n_steps = every_n_steps
        self.save_weights_only = save_weights_only
        self.path: Path | None = None
        self._received: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.log_dir is not None:  # log_dir is broadcast, so all processes have to ask for it
            self.path = Path(trainer.log_dir) / "checkpoints" / "last.ckpt"
        # Private: a strategy for a single device does not know its environment.
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment):
            # Lightning's own requeueing leaves a file that every later job would resume from without being asked to.
            environment.auto_requeue = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._received = None
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._receive)  # Lightning restores the handlers when the run ends

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if LoopPosition(trainer).between_steps:
            self._save_or_stop(trainer, outputs)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and LoopPosition(trainer).step_done:
            self._save_or_stop(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        position = LoopPosition(trainer)
        if position.epoch_done:
            self.save(trainer)
            if not position.ends_now:
                self._stop_on_signal(trainer)

    def _save_or_stop(self, trainer: Trainer, outputs: Any = None) -> None:
        position = LoopPosition(trainer)
        if position.ends_now or (self.every_n_steps and trainer.global_step % self.every_n_steps == 0):
            if outputs is not None:
                require_finite(trainer, float(outputs["loss"]), "training")  # do not overwrite good weights by NaN
            self.save(trainer)
        if position.agree_now:
            self._stop_on_signal(trainer)

    def save(self, trainer: Trainer) -> None:
        """Write the file; all processes have to call it."""
        if self.path is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.path, self.save_weights_only)

    def _stop_on_signal(self, trainer: Trainer) -> None:
        number = self._received or 0
        if trainer.world_size > 1:  # all processes have to stop, with the same exit code
            received = torch.tensor(number, device=trainer.strategy.root_device)
            number = int(trainer.strategy.reduce(received, reduce_op="max"))
        if not number:
            return
        self.save(trainer)
        rank_zero_info(f"{signal.Signals(number).name} after step {trainer.global_step}: {self._saved()}")
        raise SystemExit(128 + number)

    def _saved(self) -> str:
        if self.path is None or not self.path.exists():  # nothing is written with --trainer.fast_dev_run
            return "nothing was saved"
        file = os.path.relpath(self.path)
        if self.save_weights_only:
            return f"saved the weights to {file}"
        return f"saved {file}. To resume: fit with the same options and --ckpt_path {shlex.quote(file)}"
