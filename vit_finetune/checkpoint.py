"""Checkpoints and run folders: ``runs/<experiment>/version_N/{config.yaml, checkpoints/, events...}``."""

import os
import sys
import tempfile
import zipfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typing_extensions import override

from vit_finetune.errors import unreadable

Checkpoint = dict[str, Any]
"""Contents of a checkpoint file: weights, hyperparameters, loops, and what callbacks add."""


def read_header(path: Path) -> Checkpoint:
    """Read a checkpoint; its tensors are memory-mapped, not copied.

    Raises:
        MisconfigurationException: The file is not a Lightning checkpoint, or would run code.
    """
    file = path / "meta.pt" if path.is_dir() else path  # a sharded checkpoint is a folder
    if path.is_dir() and not file.exists():
        raise MisconfigurationException(f"--ckpt_path {path} is a folder; expected a checkpoint, best or last.")
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # torch raises all kinds of errors on files that are not checkpoints
        raise MisconfigurationException(f"--ckpt_path {path} {unreadable(error)}") from error
    if not isinstance(checkpoint, dict):
        raise MisconfigurationException(
            f"--ckpt_path {path} is not a checkpoint: it contains a {type(checkpoint).__name__}."
        )
    if "pytorch-lightning_version" not in checkpoint:
        raise MisconfigurationException(
            f"--ckpt_path {path} contains only weights. To start a new run from them: fit --model.weights {path}"
        )
    return checkpoint


def public_items(hparams: MutableMapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters without the entries that LightningCLI adds for itself."""
    return {key: value for key, value in hparams.items() if not key.startswith("_")}


def run_folder(checkpoint: Path) -> Path | None:
    """Return the run folder that contains a checkpoint, ``None`` if it is not in one."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file() else None


def epochs_done(checkpoint: Checkpoint) -> int:
    """Return the number of finished epochs."""
    done: int = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    return done


def consolidate(folder: Path) -> Path:
    """Write a sharded checkpoint as one file, ``last-whole.ckpt`` for ``last.ckpt``.

    The file contains weights, hyperparameters and class names: for evaluation, prediction and ``--model.weights``. To
    resume training, use the folder with the strategy that wrote it.

    Raises:
        MisconfigurationException: The folder is not a sharded checkpoint, or the file already exists.
    """
    whole = folder.with_name(f"{folder.stem}-whole.ckpt")
    if not (folder / "meta.pt").is_file():
        raise MisconfigurationException(f"{folder} is not a sharded checkpoint.")
    if whole.exists():
        raise MisconfigurationException(f"{whole} already exists.")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        dcp_to_torch_save(folder, Path(scratch) / "shards.pt")
        shards = torch.load(Path(scratch) / "shards.pt", map_location="cpu", weights_only=True)
    checkpoint = torch.load(folder / "meta.pt", map_location="cpu", weights_only=True)
    # ModelParallelStrategy calls the weights state_dict, FSDPStrategy calls them model.
    checkpoint["state_dict"] = shards.get("state_dict") or shards["model"]
    AtomicCheckpointIO().save_checkpoint(checkpoint, whole)
    return whole


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write to a temporary file and rename it: a crash or a full disk leaves the previous file unchanged."""

    @override
    def save_checkpoint(
        self, checkpoint: Checkpoint, path: str | os.PathLike[str], storage_options: object = None
    ) -> None:
        """Save a checkpoint.

        Raises:
            OSError: The disk is full; the previous file is unchanged.
        """
        part = Path(f"{path}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def begin_next_epoch(trainer: Trainer) -> None:
    """Start the next epoch in a resumed run that was saved at the end of an epoch.

    With ``--trainer.max_steps``, Lightning 2.6 treats every resumed run as one within an epoch: it would repeat the
    finished epoch without batches, and count it.
    """
    loop = trainer.fit_loop
    if loop.restarted_on_epoch_end:
        loop.epoch_progress.increment_completed()
        loop.reset_restart_stage()
        loop.epoch_loop.restarting = False
        loop._restarting = False  # private: with max_steps the public setter always sets True


def make_plain(hparams: MutableMapping[str, Any]) -> None:
    """Replace paths, tuples and NumPy numbers by text, lists and Python numbers, in place.

    A checkpoint that is loaded with ``weights_only=True`` holds nothing else. Options of the command line are plain
    already; from Python a ``Path`` or a ``numpy.float64`` may be passed.
    """
    for name, value in hparams.items():
        hparams[name] = _plain(value)


def _plain(value: object) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


if __name__ == "__main__":
    try:
        print(consolidate(Path(sys.argv[1])))
    except (IndexError, MisconfigurationException) as error:
        sys.exit(f"error: {error} Usage: python -m vit_finetune.checkpoint FOLDER")
