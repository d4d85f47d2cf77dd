"""``--ckpt_path``: the options that select a checkpoint, and the checkpoint that they select."""

import argparse
import os
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType
from typing_extensions import override

from vit_finetune.cli.parser import SAVED
from vit_finetune.cli.paths import PREFIX, command_name, expand
from vit_finetune.evaluation.find_checkpoint import KEYWORDS, RUNS, modified, newest

RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables in which torchrun and SLURM count how often they restarted this job."""
PEEKED = ("ckpt_path", "experiment", "trainer.default_root_dir")


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
        ``ckpt_path``, ``experiment``, ``default_root_dir``, ``data`` (the class), the list ``config``, and ``names``,
        the set of options that are given. Later arguments override earlier ones, config files included, and all of
        them environment variables, as in the parser itself.

    Raises:
        MisconfigurationException: A path contains a variable that is not set.
    """
    given = args if isinstance(args, list) else []
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in PEEKED:
        parser.add_argument(f"--{name}", dest=name.rpartition(".")[2])
    parser.add_argument("--data", "--data.class_path", dest="data")
    parser.add_argument("-c", "--config", action=_ConfigFile, default=[])
    parser.set_defaults(default_root_dir=RUNS, names=set())
    options, others = parser.parse_known_args([*_environment(given), *given])
    options.names |= {other[2:].partition("=")[0].replace(".init_args", "") for other in others if other[:2] == "--"}
    for name in ("ckpt_path", "trainer.default_root_dir"):
        attribute = name.rpartition(".")[2]
        value = getattr(options, attribute)
        setattr(options, attribute, expand(value, f"--{name}") if value else value)
    return options


def _environment(args: list[str]) -> list[str]:
    """Return the options that are set by environment variables as arguments."""
    prefix = f"{PREFIX}_{command_name(args)}__"
    options = {name.removeprefix(prefix): name for name in os.environ if name.startswith(prefix)}
    config = [f"--config={os.environ[options.pop('CONFIG')]}"] if "CONFIG" in options else []  # the others override it
    return config + [f"--{key.lower().replace('__', '.')}={os.environ[name]}" for key, name in options.items()]


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
        for name in PEEKED:
            attribute = name.rpartition(".")[2]
            setattr(namespace, attribute, options.get(name, getattr(namespace, attribute)))
        namespace.data = options.get("data.class_path") or options.get("data") or namespace.data
        namespace.names |= options.keys()


def _read(path: str) -> dict[str, object]:
    """Return the options of a config file by name, none if it cannot be read; the parser will report it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        options = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    flat: dict[str, object] = {}
    for name, value in options.items() if isinstance(options, dict) else ():
        nested = value if isinstance(value, dict) else {}
        for section in (nested, nested.get("init_args")):
            flat |= {f"{name}.{key}": item for key, item in section.items()} if isinstance(section, dict) else {}
        flat |= {} if nested else {name: value}
    return {name: value for name, value in flat.items() if value is not None or not text.startswith(SAVED)}


def experiment_name(options: argparse.Namespace | Namespace) -> str | None:
    """Return ``--experiment`` or the name of the first ``--config`` file, ``None`` if neither is given.

    A file that a run has saved, ``runs/<experiment>/version_N/config.yaml``, has the name of its experiment.
    """
    named: str | None = options.experiment
    if named or not options.config:
        return named
    file = Path(str(options.config[0]))
    folder = file.absolute().parent
    return folder.parent.name if folder.name.startswith("version_") else file.stem
