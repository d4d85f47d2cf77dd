"""Checkpoints and run folders: ``runs/<experiment>/version_N/{config.yaml, checkpoints/, events...}``."""

import os
import pickle
import sys
import tempfile
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

Checkpoint = dict[str, Any]
"""Contents of a checkpoint file: weights, hyperparameters, loops, and what callbacks add."""
KEYWORDS = {"best": "best-*.ckpt", "last": "last.ckpt"}
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables in which torchrun and SLURM count how often they restarted this job."""


def resolve(value: str, runs: Path, experiment: str | None) -> Path | None:
    """Find the checkpoint of ``--ckpt_path``.

    Args:
        value: A file; ``best`` or ``last`` of the newest run that has one; or ``restart``: ``last`` of the newest run
            if torchrun or SLURM restarted this job, otherwise nothing.
        runs: Folder of all runs.
        experiment: Search only its runs, if it has any.

    Returns:
        The file, or ``None`` to start a new run.

    Raises:
        MisconfigurationException: The file does not exist.
    """
    if value == "restart":
        return _last_of_restarted_job(runs / experiment if experiment else runs)
    if value not in KEYWORDS:
        path = Path(value)
        if not path.exists():
            raise MisconfigurationException(
                f"--ckpt_path {value}: no such file. Expected a file, best, last or restart."
            )
        return path
    folder = runs / experiment if experiment and (runs / experiment).is_dir() else runs
    found = sorted(folder.rglob(f"checkpoints/{KEYWORDS[value]}"), key=_modified)
    if not found:
        raise MisconfigurationException(
            f"--ckpt_path {value}: no run in {folder} has {KEYWORDS[value]}. Train a model with fit first, or give a "
            "file."
        )
    return found[-1]


def _last_of_restarted_job(folder: Path) -> Path | None:
    restarted = any(int(os.environ.get(name, "0")) for name in RESTART_COUNTS)
    newest = max(folder.rglob("config.yaml"), key=_modified, default=None)  # older runs belong to other jobs
    last = newest.parent / "checkpoints" / KEYWORDS["last"] if newest else None
    return last if restarted and last and last.exists() else None


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def find(source: str | os.PathLike[str], runs: Path) -> Path:
    """Find the checkpoint to evaluate: of a folder, the best one of its newest run.

    Args:
        source: A checkpoint, a folder, or ``best`` or ``last`` of the newest run.
        runs: Folder of all runs.

    Raises:
        MisconfigurationException: There is no checkpoint.
    """
    folder = Path(source)
    if str(source) in KEYWORDS:
        folder = resolve(str(source), runs, None) or folder
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise MisconfigurationException(
            f"{folder}: no such file or folder. Expected a run folder, a checkpoint, best or last."
        )
    if (folder / "meta.pt").is_file():
        raise MisconfigurationException(
            f"{folder} is a sharded checkpoint. Consolidate it first: python -m vit_finetune.checkpoint {folder}"
        )
    for pattern in KEYWORDS.values():
        found = [path for path in folder.rglob(pattern) if path.is_file()]
        if found:
            return max(found, key=_modified)
    raise MisconfigurationException(
        f"{folder} contains no checkpoint. Expected a run folder, a checkpoint, best or last."
    )


def read_header(path: Path) -> Checkpoint:
    """Read a checkpoint; its tensors are memory-mapped, not copied.

    Raises:
        MisconfigurationException: The file is not a Lightning checkpoint.
    """
    try:
        # A sharded checkpoint is a folder; its hyperparameters are in meta.pt.
        file = path / "meta.pt" if path.is_dir() else path
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "the file is empty"
        raise MisconfigurationException(f"--ckpt_path {path} is damaged or not a checkpoint: {reason}") from error
    if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
        raise MisconfigurationException(
            f"--ckpt_path {path} contains only weights. To start a new run from them: fit --model.weights {path}"
        )
    return checkpoint


def option_defaults(checkpoint: Checkpoint) -> tuple[dict[str, object], dict[str, object] | None]:
    """Return the options that a checkpoint was trained with.

    Returns:
        The options of the model as ``{"model.lr": ...}``, and those of the data as ``{"class_path": ..., "init_args":
        ...}`` if the run was started from the command line, otherwise ``None``.
    """
    model = {f"model.{key}": value for key, value in public_items(checkpoint.get("hyper_parameters", {})).items()}
    data = checkpoint.get("datamodule_hyper_parameters", {})
    if "_class_path" not in data:  # written by LightningCLI
        return model, None
    return model, {"class_path": data["_class_path"], "init_args": public_items(data)}


def public_items(hparams: MutableMapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters without the entries that LightningCLI adds for itself."""
    return {key: value for key, value in hparams.items() if not key.startswith("_")}


def run_folder(checkpoint: Path) -> Path | None:
    """Return the run folder that contains a checkpoint, ``None`` if it is not in one."""
    run = checkpoint.resolve().parent.parent
    return run if (run / "config.yaml").is_file() else None


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
