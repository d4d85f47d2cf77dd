"""What the runs gave, and what follows from it."""

import ast
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from vit_finetune.benchmark.frameworks.run import Measured

NAMES = {
    "plain": "Plain PyTorch",
    "fabric": "Lightning Fabric",
    "accelerate": "HF Accelerate",
    "hf_trainer": "HF Trainer",
    "ours": "vit_finetune fit",
}
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Run:
    """One run of one framework.

    Args:
        framework: A key of ``NAMES``.
        task: ``learning``, or the number of blocks of the network whose step is timed.
        precision: As in ``--trainer.precision``.
        round: Counted from 0.
        measured: What it gave, ``None`` if it did not run.
        reason: Why it did not run.
    """

    framework: str
    task: str
    precision: str
    round: int
    measured: Measured | None = None
    reason: str = ""

    def __str__(self) -> str:
        what = f"{self.task} block(s)" if self.task.isdigit() else self.task
        head = f"{what:12s} {self.precision:10s} round {self.round}  {NAMES[self.framework]:16s}"
        if self.measured is None:
            return f"{head}  not run: {self.reason}"
        return f"{head}  {percentile(self.measured.windows, 0.5):.3f} ms a step"


@dataclass(frozen=True)
class Cost:
    """What a step costs: plain PyTorch's in milliseconds, of others what they take beyond it in microseconds.

    Args:
        value: Over the windows of all rounds.
        low: Of the round with the least.
        high: Of the round with the largest.
    """

    value: float
    low: float
    high: float


def done(runs: Sequence[Run], task: str) -> Iterator[tuple[Run, Measured]]:
    """The runs of a task that gave something."""
    return ((run, run.measured) for run in runs if run.task == task and run.measured is not None)


def depths(runs: Sequence[Run]) -> list[str]:
    """Numbers of blocks of the networks whose steps were timed."""
    return list(dict.fromkeys(run.task for run in runs if run.task.isdigit()))


def costs(runs: Sequence[Run], depth: str, share: float) -> dict[str, Cost]:
    """What a step costs with each framework.

    Args:
        runs: All.
        depth: See :func:`depths`.
        share: Of the windows, which leaves out what other programs did meanwhile: 0.1 for the 10th percentile.

    Returns:
        Empty if plain PyTorch did not run; without frameworks that did not run.
    """
    rounds: dict[str, dict[int, list[float]]] = {}
    for run, measured in done(runs, depth):
        rounds.setdefault(run.framework, {})[run.round] = measured.windows
    if "plain" not in rounds:
        return {}
    plain = rounds.pop("plain")
    base = percentile([*chain(*plain.values())], share)
    bases = {number: percentile(windows, share) for number, windows in plain.items()}
    result = {"plain": Cost(base, min(bases.values()), max(bases.values()))}
    for name, windows in rounds.items():
        each = [(percentile(w, share) - bases[number]) * 1e3 for number, w in windows.items() if number in bases]
        if each:
            result[name] = Cost((percentile([*chain(*windows.values())], share) - base) * 1e3, min(each), max(each))
    return result


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies."""
    return sorted(values)[int(share * (len(values) - 1))]


def largest_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """Between two sequences of losses; 0 if they are equal bit for bit, nan if one has a nan."""
    return float(np.abs(np.subtract(left, right)).max())


def lines_of_code(file: Path) -> int:
    """Counts the lines that hold code: neither blank nor comment nor docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    with tokenize.open(file) as source:
        tokens = [token for token in tokenize.generate_tokens(source.readline) if token.type not in LAYOUT]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)
