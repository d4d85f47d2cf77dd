"""Expand ``~`` and environment variables in options that hold a path, wherever the option was set.

The expanded path is saved in ``config.yaml`` and in checkpoints: it still names the same folder when the file is used
by another user, in another job, or after the variable has changed.
"""

import os
import re
from pathlib import Path, PurePath

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException

PREFIX = "VIT_FINETUNE"
"""Of environment variables: ``VIT_FINETUNE_FIT__MODEL__LR`` sets ``--model.lr`` of ``fit``."""
PATH_OPTION = re.compile(r"(^|_)(root|dir|dirpath|path|file|folder|output|weights)$")
"""Options that hold a path, by the last part of their name; values of the type ``Path`` count under any name."""
NOT_A_PATH = ("class_path",)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def expand(value: str, option: str) -> str:
    """Expand ``~``, ``$NAME`` and ``${NAME}``.

    Args:
        value: A path.
        option: Option that holds it, such as ``--data.root``.

    Raises:
        MisconfigurationException: A variable is not set.
    """

    def content(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise MisconfigurationException(
                f"{option} {value}: the environment variable {name} is not set. Set it, or give the path itself."
            )
        return os.environ[name]

    return os.path.expanduser(VARIABLE.sub(content, value))


def expand_options(options: Namespace | dict[str, object], parent: str = "") -> None:
    """Expand all paths in parsed options, in place, also those of nested classes and lists.

    Args:
        options: Options of a command or of one of its classes.
        parent: Name of these options, for messages.

    Raises:
        MisconfigurationException: A variable is not set; names option and variable.
    """
    values = vars(options) if isinstance(options, Namespace) else options
    for name, value in values.items():
        option = parent if name == "init_args" else f"{parent}.{name}" if parent else f"--{name}"
        values[name] = _expanded(value, name, option)


def _expanded(value: object, name: str, option: str) -> object:
    if isinstance(value, (Namespace, dict)):
        expand_options(value, option)
    elif isinstance(value, list):
        return [_expanded(item, name, option) for item in value]
    elif isinstance(value, PurePath):
        return Path(expand(str(value), option))
    elif isinstance(value, str) and PATH_OPTION.search(name) and name not in NOT_A_PATH:
        return expand(value, option)
    return value


def expand_config_files(args: list[str]) -> list[str]:
    """Expand the paths of ``--config``, which the parser opens while it parses; return the other arguments unchanged.

    Raises:
        MisconfigurationException: A variable is not set, or a file is not text.
    """
    variable = f"{PREFIX}_{command_name(args)}__CONFIG"
    if variable in os.environ:
        os.environ[variable] = _expanded_file(os.environ[variable])  # the parser reads it from there
    expanded = [*args]
    for position, arg in enumerate(args):
        if arg in ("-c", "--config") and args[position + 1 :]:
            expanded[position + 1] = _expanded_file(args[position + 1])
        elif arg.startswith("--config="):
            expanded[position] = f"--config={_expanded_file(arg.removeprefix('--config='))}"
    return expanded


def _expanded_file(value: str) -> str:
    if value.lstrip().startswith("{") or "\n" in value or ": " in value:  # options in place of a file name
        return value
    path = expand(value, "--config")
    if os.path.isfile(path):
        try:
            Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise MisconfigurationException(
                f"--config {value} is not a text file in UTF-8 ({error}); expected YAML. A checkpoint is given with "
                "--ckpt_path."
            ) from error
    return path


def command_name(args: list[str]) -> str:
    """Return the command as it appears in the names of environment variables."""
    return args[0].replace("-", "_").upper() if args else ""
