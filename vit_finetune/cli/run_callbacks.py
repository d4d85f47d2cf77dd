"""Callbacks that a command has without being asked."""

from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelSummary, ProgressBar

from vit_finetune import callbacks
from vit_finetune.cli.monitors import CheckMonitors


def run_callbacks(command: str, options: Namespace) -> list[Callback]:
    """Return the callbacks that a command needs, and no others: each costs some microseconds per step.

    Args:
        command: Such as ``fit``.
        options: Its options, with objects in place of classes.
    """
    own: list[Callback] = []
    trainer, given = options.trainer, as_list(options.trainer.callbacks)
    if command == "fit":
        own.append(callbacks.StopReason())  # its line precedes the summary
        own += [callbacks.ThroughputLogger(), callbacks.RunSummary(), options.tensorboard, CheckMonitors()]
        has_summary = any(isinstance(callback, ModelSummary) for callback in given)
        own += [callbacks.NetworkSummary()] if trainer.enable_model_summary is not False and not has_summary else []
    if command == "predict":
        own.append(options.predictions)
    if command == "test":
        own.append(callbacks.TestReport())
        own += [options.projector] if options.projector.images else []
    has_bar = any(isinstance(callback, ProgressBar) for callback in given)
    if trainer.enable_progress_bar is not False and not has_bar:
        own.append(callbacks.progress_bar())
    if trainer.enable_checkpointing is not False:
        own += [options.best_checkpoint, options.last_checkpoint]
    return own


def as_list(value: object) -> list[Any]:
    """Return the value of an option that takes one object, a list or nothing, as a list."""
    return [] if value is None else [*value] if isinstance(value, list) else [value]
