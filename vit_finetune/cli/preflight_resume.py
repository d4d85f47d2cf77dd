"""Checks of a checkpoint to resume from, before anything is written."""

from pathlib import Path

from lightning.pytorch import Trainer

from vit_finetune.checkpoint import Checkpoint, epochs_done, read_header
from vit_finetune.data import ImageDataModule, position
from vit_finetune.evaluation.find_checkpoint import KEYWORDS
from vit_finetune.model import memory
from vit_finetune.module import ViTClassifier

NEW_RUN = "To start a new run from its weights: fit --model.weights"


def problems(trainer: Trainer, model: ViTClassifier, data: ImageDataModule, path: Path) -> list[str | None]:
    """Find reasons why a run cannot be resumed with these options, without reading the data.

    Args:
        trainer: Configured Trainer.
        model: Configured model.
        data: Configured data.
        path: The checkpoint.
    """
    checkpoint = read_header(path)
    reason = position.refusal(loader_state(checkpoint), global_batch(trainer, data))
    ema_dropped = "training_weights" in checkpoint and model.hparams["ema"] is None
    return [
        _finished(trainer, path, checkpoint),
        "The run uses EMA and cannot resume without it: do not set --model.ema." if ema_dropped else None,
        _other_optimizer(model, path, checkpoint),
        f"--ckpt_path {path}: {reason}" if reason else None,
    ]


def loader_state(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the state of the training loader in a checkpoint; empty if it holds none."""
    state: dict[str, int] = [*checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", []), {}][0]
    options = checkpoint.get("datamodule_hyper_parameters", {})
    # Older checkpoints hold the batch size only among the options.
    return {name: options[name] for name in ("batch_size",) if name in options} | state


def global_batch(trainer: Trainer, data: ImageDataModule) -> position.GlobalBatch:
    """Return the images of an optimizer step that a configured run will have."""
    replicas = trainer.world_size // memory.layout_of(trainer).tensor_parallel
    return position.GlobalBatch(data.batch_size, trainer.accumulate_grad_batches, max(1, replicas))


def _finished(trainer: Trainer, path: Path, checkpoint: Checkpoint) -> str | None:
    if path.is_file() and "optimizer_states" not in checkpoint:
        last = path.with_name(KEYWORDS["last"])
        full = f" To resume: --ckpt_path {last}." if last.exists() else ""
        return f"--ckpt_path {path} contains only weights.{full} {NEW_RUN} {path}"
    epochs, steps = epochs_done(checkpoint), checkpoint["global_step"]
    for name, done, limit in (("epochs", epochs, trainer.max_epochs), ("steps", steps, trainer.max_steps)):
        if limit is not None and 0 <= limit <= done:
            return (
                f"--ckpt_path {path} has already trained for {done} {name}, and --trainer.max_{name} is {limit} in "
                f"total; increase it to resume. {NEW_RUN} {path}"
            )
    return None


def _other_optimizer(model: ViTClassifier, path: Path, checkpoint: Checkpoint) -> str | None:
    """Compare the options that decide which optimizer state exists and how its parameters are grouped."""
    before, now = checkpoint.get("hyper_parameters", {}), model.hparams
    changed = [name for name in ("optimizer", "freeze_backbone", "lora_rank") if before.get(name) != now[name]]
    neutral = {"layer_decay": (None, 1), "head_lr_scale": (1,), "weight_decay": (0,)}
    changed += [name for name, values in neutral.items() if (before.get(name) in values) != (now[name] in values)]
    if not changed or "optimizer_states" not in checkpoint:
        return None
    options = ", ".join(f"--model.{name} {now[name]} (was {before.get(name)})" for name in changed)
    return f"The optimizer state in {path} does not fit {options}: undo the change. {NEW_RUN} {path}"
