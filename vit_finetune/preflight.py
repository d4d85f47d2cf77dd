"""Everything that can be refused before work starts, all problems in one message."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from vit_finetune import checkpoints
from vit_finetune.data import ImageDataModule
from vit_finetune.module import ViTClassifier

RESTART = "To start anew from its weights: fit --model.weights"


def check_fit(
    trainer: Trainer, model: ViTClassifier, data: ImageDataModule, path: Path | None, checkpoint: dict[str, Any] | None
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
    from vit_finetune import network

    problems: list[str | None] = []
    if checkpoint is not None:
        problems.append(_cannot_resume(trainer, path, checkpoint))
    else:
        problems.append(_occupied(trainer))
        if model.hparams["weights"]:
            problems.append(_no_file(model.hparams["weights"]))
        elif model.hparams["pretrained"]:
            network.check_name(model.hparams["name"])
            problems.append(network.missing_weights(model.hparams["name"]))
    problems.append(data.missing())
    refuse([problem for problem in problems if problem])


def refuse(problems: list[str]) -> None:
    """Raises one message for all problems, if there are any."""
    if len(problems) == 1:
        raise MisconfigurationException(problems[0])
    if problems:
        listed = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise MisconfigurationException(f"{len(problems)} things stand in the way:{listed}")


def _cannot_resume(trainer: Trainer, path: Path | None, checkpoint: dict[str, Any]) -> str | None:
    if "optimizer_states" not in checkpoint:
        return f"--ckpt_path {path} holds weights only; training can go on from --ckpt_path last. {RESTART} {path}"
    epochs, steps = checkpoints.epochs_done(checkpoint), checkpoint["global_step"]
    for name, done, limit in (("epochs", epochs, trainer.max_epochs), ("steps", steps, trainer.max_steps)):
        if limit is not None and 0 <= limit <= done:
            return (
                f"--ckpt_path {path} has {done} {name} behind it and --trainer.max_{name} is {limit} in all; "
                f"raise it to go on. {RESTART} {path}"
            )
    return None


def _occupied(trainer: Trainer) -> str | None:
    if trainer.log_dir and (Path(trainer.log_dir) / "config.yaml").exists():
        return (
            f"{trainer.log_dir} holds a run already. Leave --trainer.logger.version out, name another, or go on with "
            "that run by --ckpt_path last."
        )
    return None


def _no_file(weights: str) -> str | None:
    return None if Path(weights).is_file() else f"--model.weights {weights}: no such file."


def has_bf16_units() -> bool:
    """Whether 16-bit matrix products are done in hardware by the device that ``--trainer.accelerator auto`` takes.

    On a CPU these are AVX512-BF16, AMX or Arm's BF16 instructions; without them bf16 is slower than 32 bits.
    """
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(bf16_instructions())


def bf16_instructions() -> list[str]:
    """The CPU's instructions for bf16, by PyTorch's names; empty too where PyTorch is too old to tell (before 2.11)."""
    found: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return [unit for unit in ("avx512_bf16", "amx_bf16", "bf16") if found.get(unit)]
