"""Metrics, calibration, reports and plots."""
