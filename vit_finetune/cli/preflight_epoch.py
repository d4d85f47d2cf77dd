"""Checks of options that depend on the number of batches in an epoch, before anything is written."""

import math
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from vit_finetune.checkpoint import read_header
from vit_finetune.cli.preflight_resume import global_batch, loader_state
from vit_finetune.data import ImageDataModule, position
from vit_finetune.errors import raise_problems


def problems(trainer: Trainer) -> list[str | None]:
    """Find reasons why a run would not train or validate, whatever its data."""
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    found: list[str | None] = []
    if trainer.limit_train_batches == 0:
        found.append("--trainer.limit_train_batches is 0, so nothing would be trained; expected more than 0.")
    if trainer.limit_val_batches > 0 and every is not None and epochs is not None and every > epochs >= 0:
        found += _without_validation(
            trainer, f"--trainer.check_val_every_n_epoch {every} is more than --trainer.max_epochs {epochs}"
        )
    return found


def check(trainer: Trainer, data: ImageDataModule, checkpoint: Path | None) -> None:
    """Count the batches of an epoch if options depend on their number, and find reasons why a run would fail.

    Args:
        trainer: Configured Trainer.
        data: Configured data.
        checkpoint: The checkpoint to resume from.

    Raises:
        MisconfigurationException: Lists every problem and its fix.
    """
    loops = read_header(checkpoint) if checkpoint else None
    batch, state = global_batch(trainer, data), loader_state(loops) if loops else {}
    skipped = position.images_seen(state, batch) // (batch.batch_size * batch.replicas)
    in_batches = isinstance(trainer.val_check_interval, int) and trainer.limit_val_batches > 0
    fractions = [limit for limit in (trainer.limit_train_batches, trainer.limit_val_batches) if 0 < limit < 1]
    if not (skipped or in_batches or fractions):
        return
    data.prepare_data()
    batches = {
        name: math.ceil(math.ceil(images / batch.replicas) / batch.batch_size)
        for name, images in data.count_images().items()
    }
    limits = {"train": trainer.limit_train_batches, "val": trainer.limit_val_batches}
    raise_problems(_too_few(trainer, name, batches[name], limit) for name, limit in limits.items())
    limit = limits["train"]
    epoch = min(batches["train"], limit) if isinstance(limit, int) else int(batches["train"] * limit)
    found = _interval(trainer, epoch) if in_batches else []
    last = loops["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] if loops else False
    if skipped >= epoch and not last:
        found.append(
            f"--ckpt_path {checkpoint} was saved within an epoch, after {skipped} of its batches; with these options "
            f"an epoch has {epoch} batches. Resume with the data and the --trainer.limit_train_batches of that run."
        )
    raise_problems(found)


def _too_few(trainer: Trainer, name: str, batches: int, limit: float) -> str | None:
    """Report a fraction of the batches that is less than one."""
    if isinstance(limit, int) or limit == 0 or int(batches * limit) > 0:
        return None
    option = "overfit_batches" if getattr(trainer, "overfit_batches", 0) else f"limit_{name}_batches"
    digits = len(str(batches)) + 1
    least = math.ceil(10**digits / batches) / 10**digits
    return (
        f"--trainer.{option} is {limit}, which is less than one of the {batches} {name} batches; expected at least "
        f"{least:g}."
    )


def _interval(trainer: Trainer, epoch: int) -> list[str | None]:
    """Report a number of batches between validations that is never reached."""
    interval = trainer.val_check_interval
    if trainer.check_val_every_n_epoch is not None:
        if interval <= epoch:
            return []
        return [
            f"--trainer.val_check_interval is {interval}, but an epoch has {epoch} batches; expected at most {epoch}, "
            "or 1.0 to validate at the end of each epoch. To count batches across epochs: "
            "--trainer.check_val_every_n_epoch null."
        ]
    limits = [trainer.max_steps * trainer.accumulate_grad_batches] if trainer.max_steps != -1 else []
    limits += [trainer.max_epochs * epoch] if trainer.max_epochs not in (None, -1) else []
    if not limits or interval <= min(limits):
        return []
    return _without_validation(
        trainer, f"--trainer.val_check_interval {interval} is more than the {min(limits)} batches of the run"
    )


def _without_validation(trainer: Trainer, reason: str) -> list[str | None]:
    """Warn about a run without validation, and refuse to stop it by a metric of validation."""
    monitors = [callback.monitor for callback in trainer.early_stopping_callbacks]
    waiting = [monitor for monitor in monitors if monitor.startswith("val/")]
    if not waiting:
        rank_zero_warn(f"{reason}: validation does not run, and only the last checkpoint is saved, not the best one.")
    return [f"EarlyStopping monitors {monitor!r}, but {reason}, so validation does not run." for monitor in waiting]
