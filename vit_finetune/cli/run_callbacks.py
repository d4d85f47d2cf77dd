"""Callbacks that a command has without being asked."""

from collections.abc import Iterable
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelSummary, ProgressBar

from vit_finetune import callbacks
from vit_finetune.cli.monitors import CheckMonitors

STEP_HOOKS = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *(f"on_{stage}_batch_{end}" for stage in ("train", "validation", "test", "predict") for end in ("start", "end")),
)


def skip_empty_hooks(each: Iterable[Callback]) -> None:
    """Turn off the hooks of a step that a callback does not define.

    The Trainer enters a profiler for each hook of each callback, also for an empty one, which takes longer than all
    callbacks of a run together. It skips a hook that is not callable.
    """
    for callback in each:
        for hook in STEP_HOOKS:
            if hook not in vars(callback) and getattr(type(callback), hook) is getattr(Callback, hook):
                setattr(callback, hook, None)


def run_callbacks(command: str, options: Namespace, command_line: str | None = None) -> list[Callback]:
    """Return the callbacks that a command needs, and no others: each costs some microseconds per step.

    Args:
        command: Such as ``fit``.
        options: Its options, with objects in place of classes.
        command_line: The whole command, for reports.
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
        own.append(callbacks.TestReport(command_line))
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
