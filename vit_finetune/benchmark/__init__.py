"""Benchmarks for your own machine; see ``README.md`` in this folder.

They compare alternatives side by side in one run, because absolute times on a shared machine say little.
"""
