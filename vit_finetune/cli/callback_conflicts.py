"""Lightning's callbacks that do not fit this project: why, and what to use instead."""

from importlib.util import find_spec

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)

from vit_finetune.callbacks import ResumeCheckpoint
from vit_finetune.callbacks.stop_reason import callbacks_of

# Also of classes that are derived from these.
REASONS: dict[type[Callback], str] = {
    BaseFinetuning: "freezes before the network is built, and its parameter groups have no part in the schedule. Use "
    "--model.unfreeze_by 3 (gradual unfreezing) or --model.freeze_backbone true.",
    BatchSizeFinder: "changes the batch size after options and schedule are fixed. Use the command tune --what "
    "batch_size.",
    GradientAccumulationScheduler: "changes the number of optimizer steps that the learning rate schedule is "
    "made for. Use --trainer.accumulate_grad_batches, which is constant.",
    LearningRateFinder: "replaces the learning rate schedule. Use the command tune.",
    ModelPruning: "looks for weights before the network is built. Prune the trained model with torch.nn.utils.prune, "
    "or train a smaller one: --model.name.",
    OnExceptionCheckpoint: "lets later runs resume from its file without being asked. Use "
    "--last_checkpoint.every_n_steps 100, and --ckpt_path last to resume.",
    StochasticWeightAveraging: "replaces the learning rate schedule. Use --model.ema 0.999.",
    WeightAveraging: "copies the model before the network is built, and leaves the average out of the best checkpoint. "
    "Use --model.ema 0.999.",
}


def find(trainer: Trainer, resumed: bool) -> list[str]:
    """Find callbacks that would fail or have a wrong effect.

    Args:
        trainer: Configured Trainer.
        resumed: The run continues from a checkpoint.

    Returns:
        One message per callback, with the reason and the alternative.
    """
    callbacks = callbacks_of(trainer)
    problems = []
    for callback in callbacks:
        reason = next((text for kind, text in REASONS.items() if isinstance(callback, kind)), None)
        reason = reason or _condition(callback, trainer, resumed)
        if reason:
            problems.append(f"{type(callback).__name__} {reason}")
    return problems + _same_files(callbacks)


def _condition(callback: Callback, trainer: Trainer, resumed: bool) -> str | None:
    """Return why a callback does not work under these circumstances."""
    if isinstance(callback, SpikeDetection) and resumed:
        return "of Lightning 2.6 cannot restore its state. Resume without it."
    on_cpu = trainer.strategy.root_device.type == "cpu"
    if isinstance(callback, DeviceStatsMonitor) and on_cpu and not find_spec("psutil"):
        return "needs psutil on a CPU: pip install psutil."
    if isinstance(callback, ModelCheckpoint) and callback.save_on_exception and trainer.world_size > 1:
        return (
            "with save_on_exception waits for the other processes where one has failed. Use "
            "--last_checkpoint.every_n_steps."
        )
    return None


def _same_files(callbacks: list[Callback]) -> list[str]:
    """Report checkpoint callbacks that would overwrite ``last.ckpt``, from which runs are resumed."""
    if not any(isinstance(callback, ResumeCheckpoint) for callback in callbacks):
        return []
    return [
        "ModelCheckpoint with save_last would overwrite last.ckpt, which every run keeps (--last_checkpoint). Do not "
        "set save_last, or set a dirpath."
        for callback in callbacks
        if isinstance(callback, ModelCheckpoint) and callback.save_last and callback.dirpath is None
    ]
