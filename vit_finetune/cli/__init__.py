"""Command line: options, checks before a run, and commands."""
