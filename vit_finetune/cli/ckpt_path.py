"""``--ckpt_path``: the options that select a checkpoint, and the checkpoint that they select."""

import argparse
import os
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType
from typing_extensions import override

from vit_finetune.evaluation.find_checkpoint import KEYWORDS, RUNS, modified, newest

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
    found = newest(folder, value)
    if found is None:
        raise MisconfigurationException(
            f"--ckpt_path {value}: no run in {folder} has {KEYWORDS[value]}. Train a model with fit first, or give a "
            "file."
        )
    return found


def _last_of_restarted_job(folder: Path) -> Path | None:
    if not any(int(os.environ.get(name, "0")) for name in RESTART_COUNTS):
        return None
    # Older runs belong to other jobs. A run that ended before its options were saved has a folder, but no config.yaml.
    begun = {path: path for path in folder.rglob("version_*") if path.is_dir()}
    begun |= {path.parent: path for path in folder.rglob("config.yaml")}
    run = max(begun, key=lambda path: modified(begun[path]), default=folder)
    last = run / "checkpoints" / KEYWORDS["last"]
    return last if last.exists() else None


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
