"""Comparison of the six frameworks: run them in turns, then write tables, a chart and ``results.csv``."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from vit_finetune.benchmark import charts, records
from vit_finetune.benchmark.charts import Bar, Panel
from vit_finetune.benchmark.frameworks.task import FAILED, WARM_UP, WINDOW, Precision, Result, Task, run_process
from vit_finetune.errors import require
from vit_finetune.formatting import markdown_table

Framework = Literal["plain", "fabric", "accelerate", "lightning_trainer", "hf_trainer", "this_project"]

NAMES: dict[str, str] = {
    "plain": "Plain PyTorch",
    "fabric": "Lightning Fabric",
    "accelerate": "HF Accelerate",
    "lightning_trainer": "Lightning Trainer, everything off",
    "hf_trainer": "HF Trainer",
    "this_project": "vit_finetune fit",
}
PACKAGES = {"accelerate": ("accelerate",), "hf_trainer": ("accelerate", "transformers")}
# Observed with accelerate 1.15 and transformers 5.24.
NO_FLOAT16 = "float16 on a CPU is not supported: the option is accepted, but training runs in float32 without a warning"
QUANTILES = {"10th percentile": 0.1, "median": 0.5}

# The network of configs/quickstart.yaml at half its width, whose loss falls within a few hundred steps.
SMALL = {"patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 4, "class_token": False, "global_pool": "avg"}
LEARNING = Task("learning", SMALL, steps=150, epochs=2, batch=32, lr=1e-3, layer_decay=None)
# With width 16 the overhead is not hidden by arithmetic; twelve blocks have the number of tensors of a real network.
TIMED = [
    Task(name, {"patch_size": 16, "embed_dim": 16, "depth": depth, "num_heads": 1}, record=False)
    for name, depth in (("1 block", 1), ("12 blocks", 12))
]


def compare_frameworks(
    output: Path,
    frameworks: Sequence[Framework] = get_args(Framework),
    precisions: Sequence[Precision] = get_args(Precision),
    rounds: int = 5,
    steps: int = 1000,
    device: str | None = None,
) -> int:
    """Compare the losses, accuracy, memory and overhead per step of the frameworks.

    Args:
        output: Folder for results.csv, results.md, chart.png and chart.svg; created, and must be empty.
        frameworks: Which to run. Plain PyTorch is always included, because the others are compared with it.
        precisions: For the comparison of losses, accuracy and memory. Steps are timed in 32-true.
        rounds: Number of timed runs. The frameworks take turns, so that a change in machine load affects all alike.
        steps: Steps per timed run.
        device: ``cpu`` or ``cuda``. Default: a GPU if there is one.

    Returns:
        The number of failed runs, without those that are not possible on this machine.

    Raises:
        MisconfigurationException: The folder is not empty, or there are too few steps.
    """
    require("steps", steps, (WARM_UP + 1) * WINDOW + 1)
    require("rounds", rounds, 1)
    if output.exists() and any(output.iterdir()):
        raise MisconfigurationException(f"--output {output} is not empty. Choose another folder.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    results = [*learn(frameworks, precisions, device), *time_steps(frameworks, rounds, steps, device)]
    write(results, output)
    print(f"\n{(output / 'results.md').read_text(encoding='utf-8')}\n{output}")
    return sum(result.reason.startswith(FAILED) for result in results)


def learn(frameworks: Sequence[Framework], precisions: Sequence[Precision], device: str) -> list[Result]:
    """Train a small network once with each precision and framework, for losses, accuracy and memory."""
    tasks = [replace(LEARNING, precision=precision, device=device) for precision in precisions]
    return [result for task in tasks for result in _take_turns(frameworks, [task], rounds=1)]


def time_steps(frameworks: Sequence[Framework], rounds: int, steps: int, device: str) -> list[Result]:
    """Time the steps of two tiny networks with each framework."""
    return _take_turns(frameworks, [replace(task, steps=steps, device=device) for task in TIMED], rounds)


def _take_turns(frameworks: Sequence[Framework], tasks: Sequence[Task], rounds: int) -> list[Result]:
    """Run every framework on every task in each round, plain PyTorch first."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        tasks = [replace(task, weights=f"{folder}/{task.name}.safetensors") for task in tasks]
        for task in tasks:
            task.write_weights()
        for number in range(rounds):
            for task in tasks:
                for framework in dict.fromkeys(["plain", *frameworks]):
                    result = Result(framework, task, number, unavailable_reason(framework, task))
                    results.append(result if result.reason else run_process(result, Path(folder) / "result.json"))
                    head = f"{task.name:9s} {task.precision:10s} round {number}  {NAMES[framework]:33s}"
                    median = results[-1].reason or f"{quantile(results[-1].windows, 0.5):.3f} ms per step"
                    print(f"{head}  {median}", flush=True)
    return results


def unavailable_reason(framework: str, task: Task) -> str:
    """Return why a framework cannot run a task on this machine; an empty string if it can."""
    missing = [name for name in PACKAGES.get(framework, ()) if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install 'vit_finetune[benchmark]'"
    without = framework in PACKAGES and task.device == "cpu" and task.precision == "16-mixed"
    return NO_FLOAT16 if without else ""


def overheads(results: Sequence[Result], task: str, q: float) -> dict[str, Bar]:
    """Return the time per step of each framework on one task.

    Args:
        results: All runs.
        task: Name of a timed task.
        q: Quantile over the windows; a low one leaves out the influence of other programs.

    Returns:
        Plain PyTorch in milliseconds, and the overhead of the others over it in microseconds; each over the windows
        of all rounds, with the range over single rounds. Empty without plain PyTorch.
    """
    rounds: dict[str, dict[int, list[float]]] = {}
    for result in results:
        if result.task.name == task and not result.reason:
            rounds.setdefault(result.framework, {})[result.round] = result.windows
    if "plain" not in rounds:
        return {}
    plain = rounds.pop("plain")
    base = quantile([*chain(*plain.values())], q)
    bases = {number: quantile(windows, q) for number, windows in plain.items()}
    bars = {"plain": Bar(base, min(bases.values()), max(bases.values()))}
    for name, windows in rounds.items():
        each = [(quantile(w, q) - bases[number]) * 1e3 for number, w in windows.items() if number in bases]
        if each:
            bars[name] = Bar((quantile([*chain(*windows.values())], q) - base) * 1e3, min(each), max(each))
    return bars


def quantile(values: Sequence[float], q: float) -> float:
    """Return the value below which this fraction of the values lies."""
    return sorted(values)[int(q * (len(values) - 1))]


def largest_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the largest difference between two sequences of losses; 0 if they are equal bit for bit."""
    return float(np.abs(np.subtract(left, right)).max())


def write(results: Sequence[Result], output: Path) -> None:
    """Write results.csv, results.md, chart.png and chart.svg."""
    rows = [_csv_row(result) for result in results]
    records.write_csv(output / "results.csv", list(rows[0]), rows)
    (output / "results.md").write_text(markdown(results), encoding="utf-8")
    panels = _panels(results)
    if panels:
        shown = [name for name in NAMES.values() if any(name in panel.bars for panel in panels)]
        title = "Overhead per step over plain PyTorch: 10th percentile and range over rounds"
        charts.save(output / "chart", title, panels, shown, [_origin()])


def _panels(results: Sequence[Result]) -> list[Panel]:
    panels = []
    for task in _timed(results):
        bars = {NAMES[name]: bar for name, bar in overheads(results, task, 0.1).items() if name != "plain"}
        panels += [Panel(f"{task}, µs", 0, bars)] if bars else []
    return panels


def _timed(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result.task.name for result in results if not result.task.record))


def _origin() -> str:
    packages = [f"{name} {version(name)}" for name in PACKAGES["hf_trainer"] if find_spec(name)]
    return "; ".join([*records.origin().values(), *packages])


def _csv_row(result: Result) -> dict[str, object]:
    task = result.task
    row = {"framework": result.framework, "task": task.name, "precision": task.precision, "round": result.round}
    row["reason"] = result.reason
    for name, q in QUANTILES.items():
        row[f"ms_per_step_{name.replace(' ', '_')}"] = quantile(result.windows, q) if result.windows else None
    row |= {"peak_memory_gb": None if result.reason else result.peak_memory_gb, "accuracy": result.accuracy}
    return row | {"last_loss": result.losses[-1] if result.losses else None}


def markdown(results: Sequence[Result]) -> str:
    """Return the text of results.md."""
    parts = ["# Six frameworks, one fine-tuning task", f"- {date.today()}; {_origin()}"]
    parts += ["## Losses, accuracy, memory", learning_table(results)]
    parts += ["## Overhead per step", overhead_table(results)]
    parts += ["![Overhead per step](chart.png)"] if _panels(results) else []
    reasons = dict.fromkeys(f"- {NAMES[r.framework]}, {r.task.precision}: {r.reason}" for r in results if r.reason)
    parts += ["## Skipped or failed", "\n".join(reasons)] if reasons else []
    return "\n\n".join([*parts, ""])


def learning_table(results: Sequence[Result]) -> str:
    """Return a Markdown table with one row per framework and precision."""
    found = [result for result in results if result.task.record and result.losses]
    plain = {result.task.precision: result.losses for result in found if result.framework == "plain"}
    rows = []
    for result in found:
        precision = result.task.precision
        off = largest_difference(result.losses, plain[precision]) if precision in plain else None
        shown = "?" if off is None else f"at most {off:.1e}" if off else "0, bit for bit"
        accuracy = "?" if result.accuracy is None else f"{result.accuracy:.1%}"
        numbers = (shown, f"{result.losses[-1]:.6f}", accuracy, f"{result.peak_memory_gb:.2f} GB")
        rows.append((NAMES[result.framework], precision, *numbers))
    header = ("Framework", "Precision", "Loss difference to plain PyTorch", "Last loss", "Accuracy", "Peak memory")
    return (
        f"{markdown_table(header, rows)}\n\nPeak memory is that of the process, with Lightning and timm imported in "
        "all of them; on a GPU the memory allocated there."
    )


def overhead_table(results: Sequence[Result]) -> str:
    """Return a Markdown table with one row per framework and two columns per network."""
    columns = {
        f"{task}, {name}": overheads(results, task, q) for task in _timed(results) for name, q in QUANTILES.items()
    }
    rows = []
    for framework, name in NAMES.items():
        if any(framework in bars for bars in columns.values()):
            cells = (_cell(framework, bars[framework]) if framework in bars else "" for bars in columns.values())
            rows.append((name, *cells))
    rounds = 1 + max(result.round for result in results)
    return (
        f"{markdown_table(('Framework', *columns), rows)}\n\nPlain PyTorch: time per step. Others: overhead over it. "
        f"Windows of {WINDOW} steps, 32-true, one thread; in parentheses the range over {rounds} rounds."
    )


def _cell(framework: str, bar: Bar) -> str:
    if framework == "plain":
        return f"{bar.value:.3f} ms ({bar.low:.3f} to {bar.high:.3f})"
    return f"{bar.value:+.0f} µs ({bar.low:+.0f} to {bar.high:+.0f})"
