"""Metrics, calibration, test reports, plots, and the event files of runs."""

from vit_finetune.evaluation import runs

__all__ = ["runs"]
