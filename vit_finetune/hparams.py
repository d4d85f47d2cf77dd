"""Hyperparameters as plain values: the only ones that a safely loaded checkpoint can hold on every system."""

import os
from collections.abc import MutableMapping
from typing import Any

import numpy as np


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
