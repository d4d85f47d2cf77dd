"""Check the metrics that callbacks monitor against those that a run logs."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from vit_finetune.callbacks import BestCheckpoint
from vit_finetune.callbacks.stop_reason import callbacks_of, is_users_own
from vit_finetune.errors import raise_problems
from vit_finetune.evaluation.metrics import direction
from vit_finetune.module import METRICS, ViTClassifier

LOGGER_ONLY = tuple(
    f"train/{name}"
    for name in (
        *("loss_step", "acc_step", "lr", "lr_lowest", "grad_norm", "images_per_second", "data_time_fraction"),
        *("tflops", "mfu", "peak_memory_gb", "first_step_seconds", "seconds"),
    )
)
"""Tags that go to the loggers and not to callbacks, besides those of the groups below."""
LOGGER_ONLY_GROUPS = ("precision/", "memory/", "best/", "test/")


def problems(trainer: Trainer, model: LightningModule, classes: int | None) -> list[str]:
    """Find callbacks that would not find their metric, or keep its worst value.

    Args:
        trainer: Configured Trainer.
        model: The model. A subclass of ViTClassifier may log metrics of its own.
        classes: Number of classes, if known.
    """
    found = []
    unknown_may_exist = type(model) is not ViTClassifier or any(map(is_users_own, callbacks_of(trainer)))
    for callback in callbacks_of(trainer):
        if not isinstance(callback, (EarlyStopping, ModelCheckpoint)) or callback.monitor is None:
            continue
        name = "--best_checkpoint" if isinstance(callback, BestCheckpoint) else type(callback).__name__
        start = f"{name} monitors {callback.monitor!r}"
        if not unknown_may_exist or callback.monitor in METRICS:
            own = ["step", "epoch"] if isinstance(callback, ModelCheckpoint) else []
            found += [f"{start}, {reason}" for reason in _unavailable(callback.monitor, classes, own)]
        found += [f"{start}{reason}" for reason in _wrong_mode(callback.monitor, callback.mode)]
        if callback.monitor.startswith("val/") and trainer.limit_val_batches == 0:
            if isinstance(callback, EarlyStopping):
                found.append(f"{start}, but --trainer.limit_val_batches 0 skips validation.")
            else:
                rank_zero_warn("Validation is off: only the last checkpoint will be saved, not the best one.")
    return found


def _unavailable(monitor: str, classes: int | None, own: list[str]) -> list[str]:
    few = classes is not None and classes <= 5
    names = [name for name in METRICS if not (few and name.endswith("acc_top5"))] + own
    expected = f"Expected one of: {', '.join(names)}."
    if monitor in names:
        return []
    if monitor in METRICS:
        return [f"which needs more than five classes; the data has {classes}. {expected}"]
    if monitor in LOGGER_ONLY or monitor.startswith(LOGGER_ONLY_GROUPS):
        return [f"which goes to the logger only and is not available to callbacks. {expected}"]
    return [f"which is not logged. {expected}"]


def _wrong_mode(monitor: str, mode: str) -> list[str]:
    right = direction(monitor)
    if right in (None, mode):
        return []
    return [f" with mode {mode}, which takes the worst value for the best; set mode {right}, or leave it out."]


class CheckMonitors(Callback):
    """Check the monitored metrics once more when the number of classes is known, before the first epoch."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        names: list[str] | None = getattr(getattr(trainer, "datamodule", None), "class_names", None)
        if names is not None:
            raise_problems(problems(trainer, pl_module, len(names)))
