"""Exceptions of this project, and checks that name the option, its value and what is allowed."""

import math
import re
from collections.abc import Iterable

from lightning.fabric.utilities.exceptions import MisconfigurationException


class ImageDecodeError(MisconfigurationException):
    """A file cannot be read as an image; the message names the file and the reason."""

    def __init__(self, message: str) -> None:
        # A DataLoader worker re-raises an error with its traceback as the message; the original message is at the end.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].rstrip())


class NonFiniteLossError(RuntimeError):
    """The loss became NaN or inf; the message names the step and what may help."""


class ProcessFailedError(RuntimeError):
    """Another process of the run failed; the message names it."""


class ExportMismatchError(RuntimeError):
    """The predictions of an exported file differ from those of its checkpoint."""


def require(option: str, value: float | None, low: float, high: float | None = None) -> None:
    """Check that the value of an option is in range.

    Args:
        option: Name on the command line, such as ``--data.batch_size``.
        value: As given; the parser accepts null for every option.
        low: Smallest allowed value.
        high: Largest allowed value; ``None`` for no limit.

    Raises:
        MisconfigurationException: The value is out of range, NaN or infinite.
    """
    if problem := out_of_range(option, value, low, high):
        raise MisconfigurationException(problem)


def out_of_range(option: str, value: float | None, low: float, high: float | None = None) -> str | None:
    """Return the message of :func:`require`, ``None`` if the value is in range."""
    if value is not None and math.isfinite(value) and low <= value and (high is None or value <= high):
        return None
    expected = f"at least {low}" if high is None else f"a value between {low} and {high}"
    return f"{option} is {'null' if value is None else value}; expected {expected}."


def raise_problems(problems: Iterable[str | None]) -> None:
    """Raise one error that lists every problem.

    Args:
        problems: One message per problem; ``None`` where a check found nothing.

    Raises:
        MisconfigurationException: There is at least one problem.
    """
    found = [problem for problem in problems if problem]
    if len(found) == 1:
        raise MisconfigurationException(found[0])
    if found:
        listed = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(found, 1))
        raise MisconfigurationException(f"Found {len(found)} problems:{listed}")


def unreadable(error: Exception) -> str:
    """Return why ``torch.load`` refuses a file, to follow its name; without PyTorch's hints at unsafe loading.

    Args:
        error: Raised by ``torch.load(weights_only=True)``, or by timm on top of it.
    """
    text = str(error.__cause__ or error)
    # The part of PyTorch's messages that names what a pickle imports; an object of any class is made by a call.
    if called := re.search(r"GLOBAL (\S+)|but got <class '(\S+)'>|unrecognized function (\S+)", text):
        name = next(filter(None, called.groups()))
        return f"is refused: loading it would call {name}. A file may contain only tensors and plain values."
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)):
        return f"cannot be read: {error.strerror or 'no such file'}."
    return "is damaged or not a checkpoint (incomplete, or not written by torch.save or safetensors)."
