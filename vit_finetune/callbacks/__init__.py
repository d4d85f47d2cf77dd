"""Callbacks of every run, and optional ones."""

from vit_finetune.callbacks.best_checkpoint import BestCheckpoint
from vit_finetune.callbacks.model_summary import NetworkSummary
from vit_finetune.callbacks.prediction_writer import PredictionWriter
from vit_finetune.callbacks.progress import LineProgressBar, progress_bar
from vit_finetune.callbacks.projector import Projector
from vit_finetune.callbacks.resume_checkpoint import ResumeCheckpoint
from vit_finetune.callbacks.run_summary import RunSummary
from vit_finetune.callbacks.stop_reason import StopReason
from vit_finetune.callbacks.tensorboard import TensorBoard
from vit_finetune.callbacks.test_report import TestReport
from vit_finetune.callbacks.throughput import MemoryForecast, ThroughputLogger

__all__ = [
    "BestCheckpoint",
    "LineProgressBar",
    "MemoryForecast",
    "NetworkSummary",
    "PredictionWriter",
    "Projector",
    "ResumeCheckpoint",
    "RunSummary",
    "StopReason",
    "TensorBoard",
    "TestReport",
    "ThroughputLogger",
    "progress_bar",
]
