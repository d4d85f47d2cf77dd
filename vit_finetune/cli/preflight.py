"""Checks before fit starts: all problems are reported in one message."""

import os
import shutil
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from vit_finetune import environment
from vit_finetune.cli import callback_conflicts, monitors, preflight_epoch, preflight_resume
from vit_finetune.cli.run_dir import RunTrainer
from vit_finetune.data import ImageDataModule
from vit_finetune.errors import out_of_range, raise_problems
from vit_finetune.model import class_weights, flops, lora, memory, precision, pretrained, unfreeze
from vit_finetune.module import ViTClassifier

RANGES: dict[str, tuple[float, float | None]] = {  # of numbers among the options of the model
    **dict.fromkeys(("lr", "min_lr", "weight_decay", "head_lr_scale"), (0, None)),
    **dict.fromkeys(("label_smoothing", "warmup", "layer_decay"), (0, 1)),
    "drop_path": (0, 0.99),
    "lr_for_batch": (1, None),
}
MAY_BE_NULL = ("layer_decay", "lr_for_batch")
BAD_LIGHTNING = {"2.6.2", "2.6.3"}  # malicious releases that were on the registry for some hours
OLDEST_LIGHTNING = (2, 6, 6)  # earlier releases let a checkpoint run code


def check_fit(trainer: Trainer, model: ViTClassifier, data: ImageDataModule, checkpoint: Path | None) -> None:
    """Find reasons why ``fit`` would fail or have no effect.

    Args:
        trainer: Configured Trainer.
        model: Configured model whose network is not built yet.
        data: Configured data of which nothing is read yet; it is read only if options depend on the number of images.
        checkpoint: The checkpoint to resume from.

    Raises:
        MisconfigurationException: Lists every problem and its fix.
    """
    classes = model.class_names or data.class_names
    problems = [_unsafe_lightning(), *monitors.problems(trainer, model, len(classes) if classes else None)]
    problems += [_no_compiler(trainer, model), *preflight_epoch.problems(trainer)]
    problems += [*_invalid_options(model), *_strategy_conflicts(trainer, model), _too_large(trainer, model)]
    problems += callback_conflicts.find(trainer, resumed=checkpoint is not None)
    if checkpoint is not None:
        problems += preflight_resume.problems(trainer, model, data, checkpoint)
    else:
        problems += [_occupied(trainer), _no_weights(model)]
    raise_problems([*problems, data.unavailable_reason()])
    preflight_epoch.check(trainer, data, checkpoint)
    _warn(trainer)


# The model and its options


def _invalid_options(model: ViTClassifier) -> list[str | None]:
    """Find values that are out of range, and options that exclude each other."""
    h: Any = model.hparams
    problems: list[str | None] = []
    for name, (low, high) in RANGES.items():
        if h[name] is not None or name not in MAY_BE_NULL:
            problems.append(out_of_range(f"--model.{name}", h[name], low, high))
    if h.ema is not None and not 0 <= h.ema < 1:
        problems.append(f"--model.ema is {h.ema}; expected at least 0 and below 1, such as 0.999.")
    if h.class_names is not None and len(h.class_names) < 2:
        problems.append(f"--model.class_names is {h.class_names}; expected at least two classes, or null.")
    problems += [
        f"--model.{name} is {h[name]}; expected at least 1, or null."
        for name in ("unfreeze_by", "lora_rank")
        if h[name] is not None and h[name] < 1
    ]
    problems.append(class_weights.invalid_reason(h.class_weights, model.class_names))
    chosen = [f"--model.{name}" for name in ("freeze_backbone", "unfreeze_by", "lora_rank") if h[name]]
    if len(chosen) > 1:
        problems.append(f"{' and '.join(chosen)} exclude each other; choose one.")
    if h.lora_rank:
        problems.append(lora.unavailable_reason())
    return problems


def _strategy_conflicts(trainer: Trainer, model: ViTClassifier) -> list[str | None]:
    h: Any = model.hparams
    strategy = trainer.strategy
    problems: list[str | None] = []
    if h.ema is not None and isinstance(strategy, FSDPStrategy):
        problems.append("--model.ema does not support FSDP's flat parameters; use configs/strategy/fsdp2.yaml or ddp.")
    if h.unfreeze_by and isinstance(strategy, (FSDPStrategy, ModelParallelStrategy)):
        problems.append(
            "--model.unfreeze_by works on one device and with DDP; sharded optimizers cannot resume with frozen blocks."
        )
    if h.unfreeze_by:
        problems.append(unfreeze.ddp_conflict(strategy))
    if h.lora_rank and memory.layout_of(trainer).tensor_parallel > 1:
        problems.append("--model.lora_rank does not work with tensor parallelism; set tensor_parallel_size to 1.")
    return problems


def _no_compiler(trainer: Trainer, model: ViTClassifier) -> str | None:
    on_cpu = trainer.strategy.root_device.type == "cpu"
    if model.hparams["compile"] and on_cpu and not environment.cpp_compiler():
        return "--model.compile true needs a C++ compiler on a CPU: install g++ or set CXX, or leave it false."
    return None


def _no_weights(model: ViTClassifier) -> str | None:
    from vit_finetune.model import vit

    file, name = model.hparams["weights"], model.hparams["name"]
    try:
        if file == pretrained.BUNDLED:
            return pretrained.incompatibility(vit.build_meta(model.config, 1000))
        if file:
            return None if Path(file).is_file() else f"--model.weights {file}: no such file (or embedded)."
        if not model.hparams["pretrained"]:
            return None
        vit.check_name(name)
    except MisconfigurationException:
        return None  # a network that cannot be built is reported by _too_large
    return vit.weights_unavailable_reason(name)


# Software, files


def _unsafe_lightning() -> str | None:
    version = lightning.__version__
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if version in BAD_LIGHTNING:
        return (
            f"lightning {version} is a malicious release. Uninstall it, rotate this machine's credentials, and install "
            "2.6.6."
        )
    if numbers < OLDEST_LIGHTNING:
        return f"lightning {version} lets a checkpoint run code: pip install 'lightning>=2.6.6'."
    return None


def _occupied(trainer: Trainer) -> str | None:
    """Report a run in the folder of a TensorBoardLogger of the user; other runs have a new folder."""
    if isinstance(trainer, RunTrainer) and trainer.run is not None:
        return None
    if trainer.log_dir and (Path(trainer.log_dir) / "config.yaml").exists():
        return (
            f"{trainer.log_dir} already contains a run. Do not set --trainer.logger.version, choose another one, or "
            "resume that run: --ckpt_path last."
        )
    return None


def _too_large(trainer: Trainer, model: ViTClassifier) -> str | None:
    """Report a network that cannot be built, or whose checkpoints do not fit on the disk."""
    from vit_finetune.model import vit

    config = model.config
    try:
        weights = vit.parameter_bytes(config)
        flops.forward_flops(config, num_classes=2)
    except MisconfigurationException as error:
        return str(error)
    except RuntimeError as error:  # the network can be built, but not run
        return f"The network cannot process an image: {error}. Check --model.timm_kwargs {config.timm_kwargs}."
    folder = Path(trainer.log_dir or trainer.default_root_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return f"{folder} is not writable; choose another folder with --trainer.default_root_dir."
    # Best weights and two full states, of which one is being written; a state is 3 times the weights, with EMA 4.
    free, needed = shutil.disk_usage(folder).free, (7 if config.ema is None else 9) * weights
    if trainer.checkpoint_callbacks and free < needed:
        return (
            f"{folder} has {free / 1e9:.1f} GB free; checkpoints take {needed / 1e9:.1f} GB. Free up space, choose "
            "another --trainer.default_root_dir, or set --trainer.enable_checkpointing false."
        )
    return None


def _warn(trainer: Trainer) -> None:
    """Warn about settings that work, but probably not as intended."""
    warn_slow_bf16(trainer.strategy.root_device, precision.trainer_precision(trainer))
    if isinstance(trainer.strategy, FSDPStrategy) and trainer.world_size == 1:
        rank_zero_warn("FSDP on one device shards nothing and is slower; do not set --trainer.strategy.")


def warn_slow_bf16(device: torch.device, name: str) -> None:
    """Warn if bf16 is slower than other precisions on a device.

    Args:
        device: Device of the run.
        name: As in ``--trainer.precision``.
    """
    if precision.compute_dtype(name) != torch.bfloat16:
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        gpu = torch.cuda.get_device_name(device)
        rank_zero_warn(f"{gpu} has no native bf16: {name} is emulated and slow. --trainer.precision 16-mixed is fast.")
    if device.type == "cpu" and not environment.bf16_instructions():
        rank_zero_warn(f"This CPU has no native bf16: --trainer.precision {name} is slower than 32-true.")
