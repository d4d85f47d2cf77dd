"""The run folder ``runs/<experiment>/version_N/``, its logger and its ``config.yaml``."""

import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from typing_extensions import override

from vit_finetune.checkpoint import run_folder


def claim(parent: Path) -> Path:
    """Create the next ``version_N``; of several processes that ask at once, each gets a folder of its own."""
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(path.name[8:]) for path in parent.glob("version_*") if path.name[8:].isdecimal()]
    number = max(taken, default=-1) + 1
    while True:
        folder = parent / f"version_{number}"
        with suppress(FileExistsError):
            os.mkdir(folder)
            return folder
        number += 1


class RunFolder:
    """Folder of one run, whatever its loggers: that of a checkpoint, or a new one, created when the run starts.

    Args:
        root: Folder of all runs.
        experiment: Folder of a new run and its repetitions.
        checkpoint: The checkpoint to resume or evaluate.
    """

    def __init__(self, root: str, experiment: str, checkpoint: Path | None) -> None:
        self.root, self.experiment = Path(root), experiment
        self.path: Path | None = None
        self._created: list[Path] = []
        run = run_folder(checkpoint) if checkpoint else None
        if run is not None:
            self.path = Path(os.path.relpath(run))
            self.root, self.experiment = self.path.parent.parent, self.path.parent.name

    def create(self) -> Path:
        """Return the folder, after creating it for a new run."""
        if self.path is None:
            parent = self.root / self.experiment
            parents = [folder for folder in (parent, *parent.parents) if not folder.exists()]
            self.path = claim(parent)
            self._created = [self.path, *parents]
        return self.path

    def discard(self) -> None:
        """Delete what :meth:`create` created, for a run that was refused before it started."""
        for number, folder in enumerate(self._created):
            with suppress(OSError):  # by now, another run may use a folder above
                shutil.rmtree(folder) if number == 0 else folder.rmdir()
        self._created = []


class RunTrainer(Trainer):
    """Trainer with a run folder, which its callbacks know as ``trainer.log_dir``."""

    run: RunFolder | None = None
    """Set by the command line, unless a TensorBoardLogger of the user decides on the folder."""

    @property
    @override
    def log_dir(self) -> str | None:
        """The run folder; all processes have to ask for it. Before the run starts, the folder above."""
        if self.run is None:
            return super().log_dir
        folder: str = self.strategy.broadcast(str(self.run.path or self.run.root / self.run.experiment))
        return folder


def start_run(trainer: Trainer) -> None:
    """Create the run folder; the first process passes it to all others when they ask for ``trainer.log_dir``."""
    if not isinstance(trainer, RunTrainer) or trainer.run is None or not trainer.is_global_zero:
        return
    folder = trainer.run.create()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(folder / "checkpoints")


class RunLogger(TensorBoardLogger):
    """TensorBoard logger that writes to the run folder."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run.root, run.experiment, default_hp_metric=False)
        self.run = run

    @property
    @override
    def version(self) -> int | str:
        return self.run.path.name if self.run.path else super().version


class SilentLogger(RunLogger):
    """Logger that writes no event file: ``predict`` has nothing to log."""

    @property
    @override
    def experiment(self) -> Any:
        return DummyExperiment()


class SaveConfig(SaveConfigCallback):
    """Save the options of a run as ``config.yaml``, those of other commands as ``test.yaml`` and so on.

    The options of a resumed run replace the first ones, which are kept as ``config-1.yaml``. Nothing is left of a run
    that did not start: the options are saved when model, data and checkpoint fit together, and a new folder is deleted.
    """

    _started = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        command = trainer.state.fn.value if trainer.state.fn else stage
        self._file = Path(trainer.log_dir or ".") / ("config.yaml" if command == "fit" else f"{command}.yaml")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self.already_saved or not trainer.is_global_zero:
            return
        self.already_saved = True
        self._started = trainer.state.fn != "fit"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # Not trainer.ckpt_path: strategies that shard the network set it only after this hook.
        resumed = trainer.state.fn == "fit" and self.config.get("ckpt_path") is not None
        if resumed and self._file.exists():
            older = (self._file.with_name(f"config-{number}.yaml") for number in count(1))
            self._file.rename(next(file for file in older if not file.exists()))
        # A new run must not replace another one, and UTF-8 whatever the locale, because class names may need it.
        with open(self._file, "x" if trainer.state.fn == "fit" else "w", encoding="utf-8") as file:
            file.write(self.parser.dump(self.config, skip_unset=False))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = True

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not self._started and trainer.is_global_zero and isinstance(trainer, RunTrainer) and trainer.run:
            trainer.run.discard()
