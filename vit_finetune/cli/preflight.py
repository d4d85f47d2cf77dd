"""Everything that can be refused before work starts, all problems in one message."""

import os
import shutil
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from vit_finetune import environment
from vit_finetune.checkpoint import epochs_done
from vit_finetune.data import ImageDataModule
from vit_finetune.model import pretrained
from vit_finetune.module import METRICS, ViTClassifier

RESTART = "To start anew from its weights: fit --model.weights"
BAD_LIGHTNING = {"2.6.2", "2.6.3"}  # malicious releases that were on the registry for some hours
OLDEST_LIGHTNING = (2, 6, 6)  # earlier ones can be made to run code by a checkpoint


def check_fit(
    trainer: Trainer,
    model: ViTClassifier,
    data: ImageDataModule,
    path: Path | None,
    checkpoint: dict[str, Any] | None,
) -> None:
    """Looks for reasons why ``fit`` would fail or do nothing.

    Args:
        trainer: As configured.
        model: As configured, its network not yet built.
        data: As configured, nothing read yet.
        path: The checkpoint to resume from.
        checkpoint: Its contents.

    Raises:
        MisconfigurationException: Lists every problem and the way out of each.
    """
    from vit_finetune.model import vit

    problems = [_unsafe_lightning(), *_unknown_metrics(trainer), _no_compiler(trainer, model), *_unfit(trainer, model)]
    try:
        size = vit.parameter_bytes(model.hparams)
        problems.append(_no_room(trainer, size, averaged=model.hparams["ema"] is not None))
    except MisconfigurationException as error:
        problems.append(str(error))
    if checkpoint is not None:
        problems += [_cannot_resume(trainer, path, checkpoint), _average_dropped(model, checkpoint)]
        problems.append(_other_optimizer(model, path, checkpoint))
    else:
        problems += [_occupied(trainer), _no_weights(model)]
    problems.append(data.missing())
    refuse([problem for problem in problems if problem])
    _warn(trainer)


def check_shards(trainer: Trainer, path: Path | None) -> None:
    """Refuses a checkpoint that several processes wrote in parts, where the strategy cannot read it.

    Raises:
        MisconfigurationException: Names the command that makes one file of it.
    """
    readers = (FSDPStrategy, ModelParallelStrategy)
    if path is not None and path.is_dir() and not isinstance(trainer.strategy, readers):
        raise MisconfigurationException(
            f"--ckpt_path {path} is a folder of shards, which only the FSDP and ModelParallel strategies read. Make "
            f"one file of it: python -m vit_finetune.checkpoint {path}"
        )


def check_slurm(devices: int | str | list[int], nodes: int) -> None:
    """Refuses to wait for tasks of a SLURM job that will never come, because srun did not start this process.

    Raises:
        MisconfigurationException: Names the variable and the ways out.
    """
    tasks, job = os.environ.get("SLURM_NTASKS", "1"), os.environ.get("SLURM_JOB_NAME")
    if tasks == "1" or job in ("bash", "interactive") or "SLURM_STEP_ID" in os.environ:
        return
    if str(devices) != "1" or nodes > 1 or "SLURM_NTASKS_PER_NODE" not in os.environ:
        raise MisconfigurationException(
            f"SLURM_NTASKS is {tasks}, but srun did not start this process, so the other tasks would never come. In a "
            "job: srun python -m vit_finetune ... with --ntasks-per-node equal to --trainer.devices, see "
            "configs/strategy/slurm.sh. For a run of its own within the allocation put SLURM_JOB_NAME=bash before it."
        )


def explain_notebook(error: MisconfigurationException, command: str) -> MisconfigurationException:
    """Adds the way out to Lightning's refusal of a strategy that cannot start its processes from a notebook."""
    return _not_in_a_notebook(command) if "interactive" in str(error) else error


def check_notebook(trainer: Trainer, command: str) -> None:
    """Refuses the forked processes that Lightning would start from a notebook.

    They hang once a cell has computed anything on several threads, and fail once one has asked CUDA anything.

    Raises:
        MisconfigurationException: Names the command that works.
    """
    if _IS_INTERACTIVE and isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise _not_in_a_notebook(command)


def _not_in_a_notebook(command: str) -> MisconfigurationException:
    return MisconfigurationException(
        "A notebook cannot start the processes of several devices. Give the command a process of its own, in a cell as "
        f"!python -m vit_finetune {command} ... or in a terminal; or take one device: --trainer.devices 1 and no "
        "--trainer.strategy."
    )


def refuse(problems: list[str]) -> None:
    """Raises one message for all problems, if there are any."""
    if len(problems) == 1:
        raise MisconfigurationException(problems[0])
    if problems:
        listed = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise MisconfigurationException(f"{len(problems)} things stand in the way:{listed}")


def _cannot_resume(trainer: Trainer, path: Path | None, checkpoint: dict[str, Any]) -> str | None:
    if path is not None and path.is_file() and "optimizer_states" not in checkpoint:
        return f"--ckpt_path {path} holds weights only; training can go on from --ckpt_path last. {RESTART} {path}"
    epochs, steps = epochs_done(checkpoint), checkpoint["global_step"]
    for name, done, limit in (("epochs", epochs, trainer.max_epochs), ("steps", steps, trainer.max_steps)):
        if limit is not None and 0 <= limit <= done:
            return (
                f"--ckpt_path {path} has {done} {name} behind it and --trainer.max_{name} is {limit} in all; "
                f"raise it to go on. {RESTART} {path}"
            )
    return None


def _average_dropped(model: ViTClassifier, checkpoint: dict[str, Any]) -> str | None:
    if "training_weights" in checkpoint and model.hparams["ema"] is None:
        return "The run keeps a moving average of its weights and cannot go on without: leave --model.ema out."
    return None


def _other_optimizer(model: ViTClassifier, path: Path | None, checkpoint: dict[str, Any]) -> str | None:
    """Options that decide what optimizer state there is, and how its parameters are grouped."""
    before, now = checkpoint.get("hyper_parameters", {}), model.hparams
    changed = [name for name in ("optimizer", "freeze_backbone", "lora_rank") if before.get(name) != now[name]]
    neutral = {"layer_decay": (None, 1), "head_lr_scale": (1,), "weight_decay": (0,)}
    changed += [name for name, values in neutral.items() if (before.get(name) in values) != (now[name] in values)]
    if not changed or "optimizer_states" not in checkpoint:
        return None
    options = ", ".join(f"--model.{name} {now[name]} (was {before.get(name)})" for name in changed)
    return f"The optimizer's state in {path} does not fit {options}: leave out what was changed. {RESTART} {path}"


def _occupied(trainer: Trainer) -> str | None:
    if trainer.log_dir and (Path(trainer.log_dir) / "config.yaml").exists():
        return (
            f"{trainer.log_dir} holds a run already. Leave --trainer.logger.version out, name another, or go on with "
            "that run by --ckpt_path last."
        )
    return None


def _no_weights(model: ViTClassifier) -> str | None:
    from vit_finetune.model import vit

    file, name = model.hparams["weights"], model.hparams["name"]
    if file == pretrained.BUNDLED:
        return _bundled_incompatibility(model)
    if file:
        return None if Path(file).is_file() else f"--model.weights {file}: no such file, nor is it 'embedded'."
    if not model.hparams["pretrained"]:
        return None
    try:
        vit.check_name(name)
    except MisconfigurationException:
        return None  # an unknown name is a problem of its own, told already
    return vit.weights_unavailable_reason(name)


def _bundled_incompatibility(model: ViTClassifier) -> str | None:
    from vit_finetune.model import vit

    try:
        return pretrained.incompatibility(vit.build_meta(model.hparams, 1000))
    except MisconfigurationException:
        return None  # a network that cannot be built is a problem of its own, told already


def _unsafe_lightning() -> str | None:
    version = lightning.__version__
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if version in BAD_LIGHTNING:
        return f"lightning {version} is a malicious release. Remove it, change the keys of this machine, take 2.6.6."
    if numbers < OLDEST_LIGHTNING:
        return f"lightning {version} can be made to run code by a checkpoint: pip install 'lightning>=2.6.6'."
    return None


def _unknown_metrics(trainer: Trainer) -> list[str]:
    problems = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = callback.monitor if isinstance(callback, (EarlyStopping, ModelCheckpoint)) else None
        if monitor is not None and monitor not in METRICS:
            kind = type(callback).__name__
            problems.append(f"{kind} follows {monitor!r}, which is not logged. Allowed: {', '.join(METRICS)}.")
        elif monitor is not None and monitor.startswith("val/") and trainer.limit_val_batches == 0:
            if isinstance(callback, EarlyStopping):
                problems.append(
                    f"EarlyStopping follows {monitor!r}, but --trainer.limit_val_batches 0 skips validation."
                )
            else:
                rank_zero_warn("Validation is off: there will be no best checkpoint, only the last one.")
    return problems


def _unfit(trainer: Trainer, model: ViTClassifier) -> list[str | None]:
    """Options of the model that are out of range, or that the strategy or another option rules out."""
    h: Any = model.hparams
    problems: list[str | None] = []
    if h.ema is not None and not 0 <= h.ema < 1:
        problems.append(f"--model.ema is {h.ema}; it must be at least 0 and below 1, such as 0.999.")
    problems += [
        f"--model.{name} is {h[name]}; it must be at least 1, or null."
        for name in ("unfreeze_by", "lora_rank")
        if h[name] is not None and h[name] < 1
    ]
    chosen = [f"--model.{name}" for name in ("freeze_backbone", "unfreeze_by", "lora_rank") if h[name]]
    if len(chosen) > 1:
        problems.append(f"{' and '.join(chosen)} contradict each other; choose one.")
    if h.ema is not None and isinstance(trainer.strategy, FSDPStrategy):
        problems.append("--model.ema cannot follow FSDP's flat parameters; use configs/strategy/fsdp2.yaml, or ddp.")
    if h.unfreeze_by and isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):
        problems.append(
            "--model.unfreeze_by works on one device and with ddp; sharded optimizers cannot resume half frozen."
        )
    if h.lora_rank:
        from vit_finetune.model import lora

        problems.append(lora.missing())
        if isinstance(trainer.strategy, ModelParallelStrategy) and trainer.strategy._tensor_parallel_size != 1:
            problems.append("--model.lora_rank cannot be cut for tensor parallel: tensor_parallel_size 1.")
    return problems


def _no_compiler(trainer: Trainer, model: ViTClassifier) -> str | None:
    on_cpu = trainer.strategy.root_device.type == "cpu"
    if model.hparams["compile"] and on_cpu and not environment.cpp_compiler():
        return "--model.compile true needs a C++ compiler on a CPU: install g++ or set CXX, or leave it false."
    return None


def _no_room(trainer: Trainer, weights: int, averaged: bool) -> str | None:
    """Room for the best weights and two full states, of which one is being written.

    Each is three times the weights, four times with a moving average.
    """
    folder = Path(trainer.log_dir or trainer.default_root_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return f"{folder} cannot be written to; choose another folder with --trainer.default_root_dir."
    free, needed = shutil.disk_usage(folder).free, (9 if averaged else 7) * weights
    if trainer.checkpoint_callbacks and free < needed:
        return (
            f"{folder} has {free / 1e9:.1f} GB free; checkpoints take {needed / 1e9:.1f} GB. Make room, choose another "
            "--trainer.default_root_dir, or set --trainer.enable_checkpointing false."
        )
    return None


def _warn(trainer: Trainer) -> None:
    """What works, but probably not as meant."""
    device, precision = trainer.strategy.root_device, str(trainer.precision)
    if device.type == "cuda" and precision.startswith("bf16") and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        rank_zero_warn(
            f"{name} has no bf16 units: {precision} is emulated and slow. --trainer.precision 16-mixed is fast."
        )
    if isinstance(trainer.strategy, FSDPStrategy) and trainer.world_size == 1:
        rank_zero_warn("FSDP on one device shards nothing and costs time; leave --trainer.strategy out.")
    if device.type == "cpu" and precision.startswith("bf16") and not environment.bf16_instructions():
        rank_zero_warn(f"This processor has no bf16 units: --trainer.precision {precision} is slower than 32-true.")
