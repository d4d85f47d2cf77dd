"""Metrics, calibration, test reports and plots."""
