"""Options that a checkpoint was trained with, as defaults: only those that this version has and that import nothing.

jsonargparse imports and creates whatever a ``class_path`` names. A checkpoint may come from anywhere, so a class from
outside this package is used only if the user names it, on the command line or in a config file.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from enum import Enum
from importlib import import_module
from pathlib import Path, PurePath
from typing import Literal, NamedTuple, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from vit_finetune.checkpoint import Checkpoint, public_items
from vit_finetune.cli.parser import class_option_types
from vit_finetune.data import ImageDataModule
from vit_finetune.module import ViTClassifier

PACKAGE = f"{__name__.partition('.')[0]}."
EXACT_COMMANDS = ("fit", "doctor")  # a run is resumed with all its options or not at all
PLAIN = (str, int, float, bool, type(None), PurePath, Enum, dict, list, tuple, set)


class Rejected(NamedTuple):
    """An option of a checkpoint that cannot be used here."""

    name: str
    value: object
    reason: str
    replaceable: bool

    def __str__(self) -> str:
        return f"--{self.name} {self.value!r} ({self.reason})"


class StoredOptions:
    """Options of the model and the data in a checkpoint.

    Args:
        path: The checkpoint, for messages.
        header: Its contents.
    """

    def __init__(self, path: Path, header: Checkpoint) -> None:
        self.path = path
        self.rejected: list[Rejected] = []
        model = self._usable(ViTClassifier, "model", public_items(header.get("hyper_parameters", {})))
        self.model = {f"model.{name}": value for name, value in model.items()}
        data = header.get("datamodule_hyper_parameters", {})
        self._data = public_items(data)
        self.data_class = str(data["_class_path"]) if "_class_path" in data else None  # written by LightningCLI
        """Class of the data, ``None`` if the run was not started from the command line."""

    @property
    def importable(self) -> bool:
        """Return whether the class of the data belongs to this package and exists."""
        if self.data_class is None or not self.data_class.startswith(PACKAGE):
            return False
        try:
            return issubclass(_import(self.data_class), ImageDataModule)
        except (ImportError, AttributeError, TypeError):
            return False

    def data(self) -> dict[str, object]:
        """Return class and options of the data; call it only if the class is importable or named by the user."""
        assert self.data_class is not None
        options = self._usable(_import(self.data_class), "data", self._data)
        return {"class_path": self.data_class, "init_args": options}

    def require_data_class(self) -> None:
        """Refuse to guess the data.

        Raises:
            MisconfigurationException: Names the class that the checkpoint was trained with.
        """
        if self.data_class is not None and not self.importable:
            gone = self.data_class.startswith(PACKAGE)
            remedy = (
                "Choose the data: --data CLASS, such as --data ImageFolder."
                if gone
                else f"Give --data {self.data_class} to use it, or choose other data."
            )
            raise MisconfigurationException(
                f"{self.path} was trained with data {self.data_class}, which is not in this package. {remedy}"
            )

    def report(self, command: str, given: Collection[str], same_data: bool) -> None:
        """Warn about options that are left out, or refuse to resume without them.

        Args:
            command: Such as ``fit``.
            given: Names of the options that the user has set.
            same_data: The class of the data is that of the checkpoint.

        Raises:
            MisconfigurationException: The run cannot be resumed with all its options.
        """
        relevant = [one for one in self.rejected if same_data or not one.name.startswith("data.")]
        left_out = [one for one in relevant if not (one.replaceable and one.name in given)]
        if not left_out:
            return
        listed = ", ".join(map(str, left_out))
        if command in EXACT_COMMANDS:
            remedy = "give a valid value, or " if all(one.replaceable for one in left_out) else ""
            raise MisconfigurationException(
                f"--ckpt_path {self.path} cannot be resumed: it was trained with {listed}. To resume, {remedy}use the "
                f"version that wrote it. To start a new run from its weights: fit --model.weights {self.path}"
            )
        rank_zero_warn(f"{self.path} was trained with options that are left out: {listed}.")

    def _usable(self, cls: type, section: str, stored: dict[str, object]) -> dict[str, object]:
        """Return the options that a class accepts, the others are added to ``rejected``."""
        types = class_option_types(cls)
        checker = ArgumentParser(exit_on_error=False, add_help=False)
        for name in types.keys() & stored.keys():
            checker.add_argument(f"--{name}", type=types[name])
        usable: dict[str, object] = {}
        for name, value in stored.items():
            reason = _problem(cls, checker, name, value, types)
            if reason is None:
                usable[name] = value
            else:
                self.rejected.append(Rejected(f"{section}.{name}", value, reason, name in types))
        return usable


def _problem(cls: type, checker: ArgumentParser, name: str, value: object, types: dict[str, object]) -> str | None:
    """Return why an option of a checkpoint cannot be used, ``None`` if it can."""
    if name not in types:
        return "this version does not have it"
    if _names_class(value) or (isinstance(value, str) and _imports(types[name])):
        return "it names code to import, which only you may do"
    try:
        checker.parse_object({name: value})
        create: Callable[..., object] = cls
        if issubclass(cls, ImageDataModule) and cls.__module__.startswith(PACKAGE):
            with suppress(TypeError):  # other options are required
                create(**{name: value})  # checks the range; reads nothing
    except (ArgumentError, MisconfigurationException):
        return "not valid in this version"
    return None


def _names_class(value: object) -> bool:
    """Return whether a value contains the mapping by which jsonargparse is told to create an object."""
    if isinstance(value, dict):
        return "class_path" in value or any(map(_names_class, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_names_class, value))


def _imports(kind: object) -> bool:
    """Return whether text may stand for something to import: in an option that takes a class or a function."""
    if get_origin(kind) is Literal:
        return False
    if kind is Callable or get_origin(kind) in (Callable, type):
        return True
    if get_args(kind):
        return any(map(_imports, get_args(kind)))
    return isinstance(kind, type) and not issubclass(kind, PLAIN)


def _import(class_path: str) -> type:
    module, _, name = class_path.rpartition(".")
    found: type = getattr(import_module(module), name)
    return found
