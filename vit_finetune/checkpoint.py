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
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

KEYWORDS = {"best": "best-*.ckpt", "last": "last.ckpt"}
# How often torchrun or SLURM has started this job again.
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def resolve(asked: str, runs: Path, experiment: str | None) -> Path | None:
    """Finds the checkpoint that ``--ckpt_path`` means.

    Args:
        asked: A file, or ``best`` or ``last`` of the newest run that has one, or ``restart``: nothing at first, and
            ``last`` of the newest run, if it has come so far, when torchrun or SLURM has started the job again.
        runs: Where all runs lie.
        experiment: Look only among its runs, if it has any.

    Returns:
        The file, or ``None`` for a fresh start.

    Raises:
        MisconfigurationException: There is no such file.
    """
    if asked == "restart":
        again = any(int(os.environ.get(name, "0")) for name in RESTART_COUNTS)
        started = (runs / experiment if experiment else runs).rglob("config.yaml")
        newest = max(started, key=lambda path: path.stat().st_mtime, default=None)  # older runs are those of other jobs
        last = newest.parent / "checkpoints" / KEYWORDS["last"] if newest else None
        return last if again and last and last.exists() else None
    if asked not in KEYWORDS:
        path = Path(asked)
        if not path.exists():
            raise MisconfigurationException(f"--ckpt_path {asked}: no such file. Give a file, best, last, or restart.")
        return path
    folder = runs / experiment if experiment and (runs / experiment).is_dir() else runs
    found = sorted(folder.rglob(f"checkpoints/{KEYWORDS[asked]}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise MisconfigurationException(
            f"--ckpt_path {asked}: no run below {folder} has {KEYWORDS[asked]}. Train one with fit, or give a file."
        )
    return found[-1]


def find(source: str | os.PathLike[str], runs: Path) -> Path:
    """Finds the checkpoint to evaluate: of a run's folder, or of the newest run below a folder, the best one.

    Args:
        source: A checkpoint, a folder, or ``best`` or ``last`` of the newest run.
        runs: Where all runs lie.

    Raises:
        MisconfigurationException: There is none.
    """
    folder = Path(source)
    if str(source) in KEYWORDS:
        folder = resolve(str(source), runs, None) or folder
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise MisconfigurationException(
            f"{folder}: no such file or folder. Give a run's folder, a file, best, or last."
        )
    if (folder / "meta.pt").is_file():
        raise MisconfigurationException(
            f"{folder} is a folder of shards. Make one file of it: python -m vit_finetune.checkpoint {folder}"
        )
    for pattern in KEYWORDS.values():
        found = [path for path in folder.rglob(pattern) if path.is_file()]
        if found:
            return max(found, key=lambda path: path.stat().st_mtime)
    raise MisconfigurationException(f"{folder} holds no checkpoint. Give a run's folder, a checkpoint, best, or last.")


def read_header(path: Path) -> dict[str, Any]:
    """Reads a checkpoint, its tensors mapped from the file and not copied into memory.

    Raises:
        MisconfigurationException: It is no checkpoint of Lightning.
    """
    try:
        # Processes that save their shards side by side leave a folder; its options are in a file of their own.
        file = path / "meta.pt" if path.is_dir() else path
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "it is empty"
        raise MisconfigurationException(f"--ckpt_path {path} is damaged or no checkpoint: {reason}") from error
    if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
        raise MisconfigurationException(
            f"--ckpt_path {path} holds weights but no checkpoint. To start from them: fit --model.weights {path}"
        )
    return checkpoint


def option_defaults(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What a checkpoint says about options.

    Returns:
        The model's options as ``{"model.lr": ...}``, and the data's as ``{"class_path": ..., "init_args": ...}`` if
        the run was started from the command line.
    """
    model = {f"model.{key}": value for key, value in _visible(checkpoint.get("hyper_parameters", {})).items()}
    data = checkpoint.get("datamodule_hyper_parameters", {})
    if "_class_path" not in data:
        return model, None
    return model, {"class_path": data["_class_path"], "init_args": _visible(data)}


def _visible(hparams: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hparams.items() if not key.startswith("_")}


def run_folder(checkpoint: Path) -> Path | None:
    """The run that a checkpoint lies in, ``None`` if it lies elsewhere."""
    run = checkpoint.resolve().parent.parent
    return run if (run / "config.yaml").is_file() else None


def epochs_done(checkpoint: dict[str, Any]) -> int:
    """Number of epochs that a checkpoint has behind it."""
    done: int = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    return done


def consolidate(folder: Path) -> Path:
    """Joins a checkpoint that several processes saved in parts into one file, ``last-whole.ckpt`` for ``last.ckpt``.

    The file holds weights, options and classes: for evaluation, prediction and ``--model.weights``. Going on with the
    training stays with the folder and the strategy that wrote it.

    Raises:
        MisconfigurationException: It is no such folder, or the file is there already.
    """
    whole = folder.with_name(f"{folder.stem}-whole.ckpt")
    if not (folder / "meta.pt").is_file():
        raise MisconfigurationException(f"{folder} is no folder of shards.")
    if whole.exists():
        raise MisconfigurationException(f"{whole} is there already.")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        dcp_to_torch_save(folder, Path(scratch) / "shards.pt")
        shards = torch.load(Path(scratch) / "shards.pt", map_location="cpu", weights_only=True)
    checkpoint = torch.load(folder / "meta.pt", map_location="cpu", weights_only=True)
    # ModelParallelStrategy calls the weights state_dict, FSDPStrategy calls them model.
    checkpoint["state_dict"] = shards.get("state_dict") or shards["model"]
    AtomicCheckpointIO().save_checkpoint(checkpoint, whole)
    return whole


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the final name and renames: a crash or a full disk leaves the file that was there before."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint.

        Raises:
            OSError: There is no room; the older file is untouched.
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
    """Lets a run that was saved at an epoch's end go on with the next epoch where ``--trainer.max_steps`` is given.

    There Lightning 2.6 takes every run that goes on for one within an epoch. It would run the finished epoch once more,
    without batches, and count it.
    """
    loop = trainer.fit_loop
    if loop.restarted_on_epoch_end:
        loop.epoch_progress.increment_completed()
        loop._restart_stage = RestartStage.NONE
        for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            each._restarting = False


class SaveConfig(SaveConfigCallback):
    """Saves the options of a run as ``config.yaml``, those of other commands as ``test.yaml`` and so on.

    The command line of a resumed run takes the place of the first one, which stays as ``config-1.yaml``.
    """

    def __init__(self, parser: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, **{**kwargs, "save_to_log_dir": False})

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes the file before anything else happens in the folder."""
        command = trainer.state.fn.value if trainer.state.fn else stage
        self.config_filename = "config.yaml" if command == "fit" else f"{command}.yaml"
        self._file = Path(trainer.log_dir or ".") / self.config_filename
        if stage == "fit" and trainer.is_global_zero and not self.already_saved:
            current, number = self._file, 1
            while current.exists():
                older = current.with_name(f"config-{number}.yaml")
                if not older.exists():
                    current.rename(older)
                number += 1
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes the file in UTF-8, which class names may need, whatever the locale."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(self.parser.dump(self.config, skip_unset=False), encoding="utf-8")


if __name__ == "__main__":
    try:
        print(consolidate(Path(sys.argv[1])))
    except (IndexError, MisconfigurationException) as error:
        sys.exit(f"error: {error}. Usage: python -m vit_finetune.checkpoint FOLDER")


def make_plain(hparams: MutableMapping[str, Any]) -> None:
    """Replaces paths, tuples and NumPy numbers by text, lists and Python numbers, in place.

    The command line gives plain values anyway; from Python a user may well pass a ``Path`` or a ``numpy.float64``.
    """
    for name, value in hparams.items():
        hparams[name] = _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
