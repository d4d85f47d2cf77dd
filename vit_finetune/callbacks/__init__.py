"""Callbacks that every run has, and those that can be added."""

from vit_finetune.callbacks.prediction_writer import PredictionWriter
from vit_finetune.callbacks.progress import PlainProgress, progress_bar
from vit_finetune.callbacks.projector import Projector
from vit_finetune.callbacks.resume_checkpoint import LastCheckpoint
from vit_finetune.callbacks.run_summary import RunSummary
from vit_finetune.callbacks.tensorboard import TensorBoard
from vit_finetune.callbacks.test_report import TestReport
from vit_finetune.callbacks.throughput import MemoryForecast, SpeedMonitor

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
