"""Callbacks that every run has, and those that can be added."""

from vit_finetune.callbacks.forecast import MemoryForecast
from vit_finetune.callbacks.last import LastCheckpoint
from vit_finetune.callbacks.predictions import PredictionWriter
from vit_finetune.callbacks.progress import PlainProgress, progress_bar
from vit_finetune.callbacks.projector import Projector
from vit_finetune.callbacks.report import TestReport
from vit_finetune.callbacks.speed import SpeedMonitor
from vit_finetune.callbacks.summary import RunSummary
from vit_finetune.callbacks.tensorboard import TensorBoard

__all__ = [
    "LastCheckpoint",
    "MemoryForecast",
    "PlainProgress",
    "PredictionWriter",
    "Projector",
    "RunSummary",
    "SpeedMonitor",
    "TensorBoard",
    "TestReport",
    "progress_bar",
]
