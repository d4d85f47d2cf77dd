"""Checks of how the processes of a run are started: SLURM, notebooks, restarts by torchrun, sharded checkpoints."""

import os
import sys
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy


def check_slurm(devices: int | str | list[int], nodes: int) -> None:
    """Refuse to wait for other tasks of a SLURM job if srun did not start this process.

    Raises:
        MisconfigurationException: Names the variable and the remedies.
    """
    tasks, job = os.environ.get("SLURM_NTASKS", "1"), os.environ.get("SLURM_JOB_NAME")
    if tasks == "1" or job in ("bash", "interactive") or "SLURM_STEP_ID" in os.environ:
        return
    if str(devices) != "1" or nodes > 1 or "SLURM_NTASKS_PER_NODE" not in os.environ:
        raise MisconfigurationException(
            f"SLURM_NTASKS is {tasks}, but this process was not started by srun, so it would wait forever for the "
            "other tasks. In a job: srun python -m vit_finetune ... with --ntasks-per-node equal to --trainer.devices "
            "(configs/strategy/slurm.sh). To run independently within an allocation, set SLURM_JOB_NAME=bash."
        )


def notebook_error(command: str) -> MisconfigurationException:
    """Return the error for a run on several devices that was started from a notebook."""
    return MisconfigurationException(
        "Runs on several devices cannot be started from a notebook. Run the command in its own process, in a cell as "
        f"!python -m vit_finetune {command} ... or in a terminal; or use one device: --trainer.devices 1 and no "
        "--trainer.strategy."
    )


def check_notebook(trainer: Trainer, command: str) -> None:
    """Refuse the forked processes that Lightning would start from a notebook.

    They hang once a cell has run PyTorch on several threads, and fail once a cell has initialized CUDA. Lightning
    itself refuses all other ways to start processes from a notebook.

    Raises:
        MisconfigurationException: Names the command that works.
    """
    if hasattr(sys, "ps1") and trainer.strategy.launcher is not None:
        raise notebook_error(command)


def check_shards(trainer: Trainer, path: Path | None) -> None:
    """Refuse a sharded checkpoint that the strategy cannot read.

    Raises:
        MisconfigurationException: Names the command that consolidates it.
    """
    readers = (FSDPStrategy, ModelParallelStrategy)
    if path is not None and path.is_dir() and not isinstance(trainer.strategy, readers):
        raise MisconfigurationException(
            f"--ckpt_path {path} is a sharded checkpoint, which only the FSDP and ModelParallel strategies can read. "
            f"Consolidate it into one file first: python -m vit_finetune.checkpoint {path}"
        )


def use_new_port_after_restart() -> None:
    """Let processes that torchrun restarted meet at a new port.

    With torch 2.14, the store at the old port still holds the addresses of the previous attempt's processes, and the
    first process to connect waits for them forever.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + attempt)
