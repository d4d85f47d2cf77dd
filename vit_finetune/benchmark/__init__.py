"""Measurements on the user's own machine, each a command: ``python -m vit_finetune.benchmark.step_overhead``.

They compare side by side in one run and print ratios, because absolute times of a shared machine mean little.
"""
