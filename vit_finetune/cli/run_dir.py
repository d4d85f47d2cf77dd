"""The run folder: ``runs/<experiment>/version_N/``, its logger and its ``config.yaml``."""

import argparse
import os
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from typing_extensions import override

from vit_finetune.checkpoint import run_folder

RUNS = "runs"


def peek(args: ArgsType) -> argparse.Namespace:
    """Read the options that select a checkpoint, before the parser runs, whose defaults come from that checkpoint.

    Returns:
        ``ckpt_path``, ``experiment``, ``default_root_dir`` and the list ``config``. Later arguments override earlier
        ones, config files included, as in the parser itself.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ckpt_path")
    parser.add_argument("--experiment")
    parser.add_argument("--trainer.default_root_dir", dest="default_root_dir", default=RUNS)
    parser.add_argument("-c", "--config", action=_ConfigFile, default=[])
    return parser.parse_known_args(args if isinstance(args, list) else [])[0]


class _ConfigFile(argparse.Action):
    """Apply the options of a config file that :func:`peek` reads."""

    @override
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.config = [*namespace.config, values]
        options = _read(values)
        trainer = options.get("trainer")
        for section in (options, trainer if isinstance(trainer, dict) else {}):
            for name in ("ckpt_path", "experiment", "default_root_dir"):
                setattr(namespace, name, section.get(name, getattr(namespace, name)))


def _read(path: str) -> dict[str, Any]:
    """Return the options of a config file, none if it cannot be read; the parser will report it."""
    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return options if isinstance(options, dict) else {}


def experiment_name(options: Any) -> str | None:
    """Return ``--experiment`` or the name of the first ``--config`` file, ``None`` if neither is given."""
    named: str | None = options.experiment
    return named or (Path(str(options.config[0])).stem if options.config else None)


def logger(root: str, experiment: str, checkpoint: Path | None, command: str) -> TensorBoardLogger:
    """Return the logger of the checkpoint's run, or of a new run.

    Args:
        root: Folder of all runs.
        experiment: Folder of a new run and its repetitions.
        checkpoint: The checkpoint to resume or evaluate.
        command: Such as ``fit``; ``predict`` writes no event file.
    """
    kind = SilentLogger if command == "predict" else TensorBoardLogger
    run = run_folder(checkpoint) if checkpoint else None
    if run is None:
        return kind(root, experiment, default_hp_metric=False)
    run = Path(os.path.relpath(run))
    return kind(run.parent.parent, run.parent.name, run.name, default_hp_metric=False)


class SilentLogger(TensorBoardLogger):
    """Logger that knows the run folder but writes no event file: ``predict`` has nothing to log."""

    @property
    @override
    def experiment(self) -> Any:
        return DummyExperiment()


class SaveConfig(SaveConfigCallback):
    """Save the options of a run as ``config.yaml``, those of other commands as ``test.yaml`` and so on.

    The options of a resumed run replace the first ones, which are kept as ``config-1.yaml``.
    """

    def __init__(self, parser: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, **{**kwargs, "save_to_log_dir": False})

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        command = trainer.state.fn.value if trainer.state.fn else stage
        self._file = Path(trainer.log_dir or ".") / ("config.yaml" if command == "fit" else f"{command}.yaml")
        if stage == "fit" and trainer.is_global_zero and not self.already_saved:
            current, number = self._file, 1
            while current.exists():
                older = current.with_name(f"config-{number}.yaml")
                if not older.exists():
                    current.rename(older)
                number += 1
        super().setup(trainer, pl_module, stage)

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # UTF-8 whatever the locale, because class names may need it.
        self._file.write_text(self.parser.dump(self.config, skip_unset=False), encoding="utf-8")
