"""Callbacks that every run has."""

from vit_finetune.callbacks.last import LastCheckpoint
from vit_finetune.callbacks.predictions import PredictionWriter
from vit_finetune.callbacks.progress import PlainProgress, progress_bar
from vit_finetune.callbacks.speed import SpeedMonitor
from vit_finetune.callbacks.summary import RunSummary

__all__ = ["LastCheckpoint", "PlainProgress", "PredictionWriter", "RunSummary", "SpeedMonitor", "progress_bar"]
