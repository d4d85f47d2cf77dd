"""Line that says why a run ended before its last epoch."""

from collections.abc import Iterator
from datetime import timedelta

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from vit_finetune.checkpoint import Checkpoint


class StopReason(Callback):
    """Print which callback or limit ended a run early, and why; in a resumed run, apply the limits as given now.

    ``--trainer.max_time`` is the time of one call, and the patience of EarlyStopping is the one typed. Lightning would
    count the time of earlier calls, and restore the patience of the checkpoint.
    """

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Checkpoint) -> None:
        states = checkpoint["callbacks"]
        for callback in callbacks_of(trainer):
            if isinstance(callback, Timer):
                states.pop(callback.state_key, None)
            elif isinstance(callback, EarlyStopping) and callback.state_key in states:
                running = EarlyStoppingReason.NOT_STOPPED.value
                states[callback.state_key] |= {"patience": callback.patience, "stopping_reason": running}

    @override
    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_last_batch and trainer.current_epoch == trainer.max_epochs:
            return
        if trainer.should_stop:
            print(f"stopped by {' and '.join(_reasons(trainer)) or _others(trainer)}", flush=True)
        elif trainer.global_step == trainer.max_steps and trainer.max_epochs != -1:
            print(f"stopped by --trainer.max_steps {trainer.max_steps}", flush=True)


def _reasons(trainer: Trainer) -> Iterator[str]:
    for callback in callbacks_of(trainer):
        if isinstance(callback, EarlyStopping) and callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED:
            why = str(callback.stopping_reason_message).removesuffix(" Signaling Trainer to stop.")
            if callback.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED:
                count, best = callback.wait_count, float(callback.best_score)
                why = f"{callback.monitor} did not improve in its last {count} values, best {best:.4g}"
            yield f"EarlyStopping: {why}"
        elif isinstance(callback, Timer):
            left = callback.time_remaining()
            if left is not None and left <= 0:
                limit = timedelta(seconds=round(callback.time_elapsed() + left))
                yield f"Timer: the time limit of {limit} is used up (--trainer.max_time)"


def _others(trainer: Trainer) -> str:
    """Name the callbacks of the user, of which one set ``trainer.should_stop``."""
    names = [type(callback).__name__ for callback in callbacks_of(trainer) if is_users_own(callback)]
    return f"a callback that set trainer.should_stop{': ' if names else ''}{' or '.join(names)}"


def is_users_own(callback: Callback) -> bool:
    """Return whether a callback is neither from this package nor from Lightning."""
    return type(callback).__module__.partition(".")[0] not in (__name__.partition(".")[0], "lightning")


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return all callbacks of a Trainer, in their order."""
    callbacks: list[Callback] = vars(trainer)["callbacks"]  # the Trainer does not declare it
    return callbacks
