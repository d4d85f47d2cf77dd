"""Tables and files of the comparison; the chart is in ``chart.py``."""

import csv
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from vit_finetune import environment
from vit_finetune.benchmark.frameworks import chart
from vit_finetune.benchmark.frameworks.run import WINDOW
from vit_finetune.benchmark.frameworks.runs_of_frameworks import (
    NAMES,
    Cost,
    Run,
    costs,
    depths,
    done,
    largest_difference,
    lines_of_code,
    percentile,
)
from vit_finetune.benchmark.records import commit

SHARES = {"10th percentile": 0.1, "median": 0.5}


def write(runs: Sequence[Run], output: Path) -> None:
    """Writes results.csv, losses.csv, results.md, chart.png and chart.svg."""
    _write_csv(output / "results.csv", _result_rows(runs))
    _write_csv(output / "losses.csv", _loss_rows(runs))
    (output / "results.md").write_text(markdown(runs))
    labeled = {
        f"{depth} block{'s' * (depth != '1')}": {NAMES[name]: cost for name, cost in costs(runs, depth, 0.1).items()}
        for depth in depths(runs)
    }
    chart.draw(_curves(runs), labeled, list(NAMES.values()), output)


def _lines(framework: str) -> int:
    return lines_of_code(Path(__file__).with_name(f"{framework}.py"))


def markdown(runs: Sequence[Run]) -> str:
    """The report."""
    parts = [
        "# Five frameworks, one fine-tune",
        f"{date.today()}\n\n```\n{environment.describe()}\n{_more_versions()}\ncommit        {commit()}\n```",
    ]
    if any(run.task == "learning" for run in runs):
        parts += ["## Losses, accuracy, memory", learning_table(runs)]
    if depths(runs):
        parts += ["## What a step costs", cost_table(runs)]
    reasons = dict.fromkeys(f"- {NAMES[run.framework]}, {run.precision}: {run.reason}" for run in runs if run.reason)
    parts += ["## Not run", "\n".join(reasons)] if reasons else []
    return "\n\n".join([*parts, "![Loss curves and cost of a step](chart.png)", ""])


def learning_table(runs: Sequence[Run]) -> str:
    """One row for each framework and precision."""
    found = list(done(runs, "learning"))
    plain = {run.precision: measured.losses for run, measured in found if run.framework == "plain"}
    rows = [("Framework", "Lines of code", "Precision", "Losses off plain PyTorch", "Last loss", "Accuracy", "Peak")]
    for run, measured in found:
        off = largest_difference(measured.losses, plain[run.precision]) if run.precision in plain else None
        shown = "?" if off is None else f"at most {off:.1e}" if off else "0, bit for bit"
        accuracy = "?" if measured.accuracy is None else f"{measured.accuracy:.1%}"
        numbers = (shown, f"{measured.losses[-1]:.6f}", accuracy, f"{measured.peak_memory_gb:.2f} GB")
        rows.append((NAMES[run.framework], str(_lines(run.framework)), run.precision, *numbers))
    steps = max((len(losses) for losses in plain.values()), default=0)
    return (
        f"{_table(rows)}\n\n{steps} steps. Lines of code are those of the framework's own file. Peak is the largest "
        "memory of the process, with Lightning and timm loaded in all of them; on a GPU the largest allocated there."
    )


def cost_table(runs: Sequence[Run]) -> str:
    """One row for each framework, two columns for each depth."""
    head, columns = ["Framework"], []
    for depth in depths(runs):
        for name, share in SHARES.items():
            head.append(f"{depth} block{'s' * (depth != '1')}, {name}")
            columns.append(costs(runs, depth, share))
    rows = [tuple(head)]
    for framework in (name for name in NAMES if any(name in column for column in columns)):
        cells = (_show(framework, column[framework]) if framework in column else "" for column in columns)
        rows.append((NAMES[framework], *cells))
    rounds = 1 + max(run.round for run in runs)
    return (
        f"{_table(rows)}\n\nPlain PyTorch: milliseconds a step. Others: microseconds beyond it. Over windows of "
        f"{WINDOW} steps, 32-true, one thread; in brackets the least and the largest of {rounds} rounds in turns."
    )


def _show(framework: str, cost: Cost) -> str:
    if framework == "plain":
        return f"{cost.value:.3f} ms ({cost.low:.3f} to {cost.high:.3f})"
    return f"{cost.value:+.0f} µs ({cost.low:+.0f} to {cost.high:+.0f})"


def _curves(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """The losses by panel title and framework; the title says how far they are apart."""
    found: dict[str, dict[str, list[float]]] = {}
    for run, measured in done(runs, "learning"):
        found.setdefault(run.precision, {})[NAMES[run.framework]] = measured.losses
    curves = {}
    for precision, lines in found.items():
        plain = lines.get(NAMES["plain"])
        off = max((largest_difference(plain, losses) for losses in lines.values()), default=0) if plain else None
        apart = (
            "" if off is None else f"\nfarthest from plain PyTorch by {off:.1e}" if off else "\nall equal, bit for bit"
        )
        curves[f"{precision}{apart}"] = lines
    return curves


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))} |" for row in rows]
    return "\n".join([lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]])


def _more_versions() -> str:
    """Versions of what :func:`environment.describe` does not name."""
    found = {name: version(name) if find_spec(name) else "not installed" for name in ("accelerate", "transformers")}
    return "\n".join(f"{name:13s} {value}" for name, value in found.items())


def _result_rows(runs: Sequence[Run]) -> Iterator[dict[str, object]]:
    for run in runs:
        row: dict[str, object] = {"framework": run.framework, "lines_of_code": _lines(run.framework)}
        row |= {"task": run.task, "precision": run.precision, "round": run.round, "not_run": run.reason}
        m = run.measured
        row |= {f"ms_a_step_{key.replace(' ', '_')}": m and percentile(m.windows, s) for key, s in SHARES.items()}
        row |= {"peak_memory_gb": m and m.peak_memory_gb, "accuracy": m and m.accuracy}
        yield row | {"last_loss": m.losses[-1] if m and m.losses else None}


def _loss_rows(runs: Sequence[Run]) -> Iterator[dict[str, object]]:
    for run, measured in done(runs, "learning"):
        for step, loss in enumerate(measured.losses):
            yield {"framework": run.framework, "precision": run.precision, "step": step, "loss": loss}


def _write_csv(path: Path, rows: Iterator[dict[str, object]]) -> None:
    found = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]) if found else [])
        writer.writeheader()
        writer.writerows(found)
