"""Report of a suite: tables in ``results.md``, charts, and both in TensorBoard."""

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_finetune.benchmark import charts
from vit_finetune.benchmark.charts import Bar, Panel
from vit_finetune.benchmark.records import Result
from vit_finetune.benchmark.suite import Variant
from vit_finetune.formatting import markdown_table, median_range


class Column(NamedTuple):
    """A column of the table: heading, attribute of a result, factor to the unit shown, digits."""

    heading: str
    name: str
    factor: float = 1
    digits: int = 0


COLUMNS = (
    Column("Process, s", "seconds", digits=1),
    Column("CPU time, s", "cpu_seconds", digits=1),
    Column("Training, s", "train_seconds", digits=1),
    Column("First step, s", "first_step_seconds", digits=1),
    Column("Images/s", "images_per_second"),
    Column("TFLOP/s per device", "tflops", digits=3),
    Column("MFU, %", "mfu", 100, 1),
    Column("Data time, %", "data_time_fraction", 100, 2),
    Column("Peak memory, GB", "peak_memory_gb", digits=3),
    Column("Trained parameters, M", "trainable_parameters", 1e-6, 3),
    Column("Forecast, GB", "forecast_gb", digits=3),
    Column("Validation accuracy, %", "val_acc", 100, 1),
    Column("Test accuracy, %", "test_acc", 100, 1),
)
CHARTED = ("seconds", "images_per_second", "test_acc", "peak_memory_gb")
EXPLANATION = """
Each value is the median, with the minimum and maximum over all seeds and repeats of a variant. Process is the duration
of `fit` as a process; the speedup is relative to the first variant in the table. CPU time is that of all processes and
threads of `fit`; other programs on the machine affect it less. Training starts at the first step.
Images/s, TFLOP/s, MFU and data time (the time that training waited for data) are steady-state values: medians over
logging intervals, without the first. MFU relates the operations of the network to the dense peak in the data sheet of
the device, where that is known. Peak memory is the memory allocated on a GPU; on a CPU it is the resident memory of the
first process, including libraries, which the forecast leaves out.
"""


def write(
    output: Path, name: str, variants: list[Variant], options: dict[str, dict[str, object]], results: list[Result]
) -> None:
    """Write ``results.md``, and once a run is done also the charts and the TensorBoard summary.

    Args:
        output: Folder of the results.
        name: Name of the suite.
        variants: In order.
        options: All options of each variant.
        results: All runs so far.
    """
    text = markdown(name, variants, options, results)
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.md").write_text(text, encoding="utf-8")
    done = _group(variants, results)
    if done:
        origins = list(dict.fromkeys(result.origin for runs in done.values() for result in runs))
        charts.save(output / "results", f"Suite {name}: median and range", _panels(done), list(done), origins)
        _to_tensorboard(output, text, done)


def _group(variants: list[Variant], results: list[Result]) -> dict[str, list[Result]]:
    """Return the completed runs of each variant that has any."""
    done = {
        variant.name: [r for r in results if r.variant == variant.name and r.status == "done"] for variant in variants
    }
    return {name: runs for name, runs in done.items() if runs}


def markdown(name: str, variants: list[Variant], options: dict[str, dict[str, object]], results: list[Result]) -> str:
    """Return the text of ``results.md``."""
    done = _group(variants, results)
    # Several lines if the suite was continued on another machine or commit.
    origins = "\n".join(dict.fromkeys(f"- {result.origin}" for result in results))
    parts = [f"# Suite {name}\n", origins, "", results_table(done), EXPLANATION, changes_table(variants, options, done)]
    missing = {(r.variant, r.status, r.reason): None for r in results if r.status != "done"}
    if missing:
        parts += ["\n## Skipped or failed\n", _to_markdown(["Variant", "Status", "Reason"], list(missing))]
    return "\n".join([*parts, ""])


def results_table(done: dict[str, list[Result]]) -> str:
    """Return one row per variant, with the speedup over the first; columns without values are left out."""
    columns = [c for c in COLUMNS if any(_values(runs, c.name) for runs in done.values())]
    headings = ["Variant", "Runs", *(column.heading for column in columns)]
    headings[3:3] = ["Speedup"]
    rows = []
    for name, runs in done.items():
        time, *others = [_cell(runs, column) for column in columns]
        base, own = _median(next(iter(done.values())), "seconds"), _median(runs, "seconds")
        rows.append([name, str(len(runs)), time, f"{base / own:.2f} x" if base and own else "", *others])
    return _to_markdown(headings, rows)


def changes_table(
    variants: list[Variant], options: dict[str, dict[str, object]], done: Mapping[str, list[Result]]
) -> str:
    """Return the options that each variant changes, and the effect on time, speed, memory and accuracy."""
    rows = []
    for variant in variants:
        base = variant.compared_with
        if base is not None:
            changed = "<br>".join(f"`{line}`" for line in changes(options[base], options[variant.name]))
            rows.append([variant.name, base, changed, delta(done.get(base, []), done.get(variant.name, []))])
    return "## Changes and their effect\n\n" + _to_markdown(["Variant", "Compared with", "Changes", "Delta"], rows)


def changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Return the options that differ, as ``option: old → new``."""
    old, new = _flatten(before), _flatten(after)
    lines = []
    for key in dict.fromkeys([*old, *new]):
        left, right = old.get(key), new.get(key)
        if left != right:
            lines.append(f"{key}: {_as_yaml(left)} → {_as_yaml(right)}")
    return lines


def _as_yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _flatten(options: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested options by their dotted names, lists as text."""
    flat: dict[str, object] = {}
    for key, value in options.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (str, int, float, type(None))) else str(value)
    return flat


def delta(base: list[Result], own: list[Result]) -> str:
    """Return the change in training time, images/s, memory and accuracy from one variant to another, by medians."""
    if not base or not own:
        return "not run"
    parts = []
    for label, name in (
        ("training time", "train_seconds"),
        ("images/s", "images_per_second"),
        ("memory", "peak_memory_gb"),
    ):
        old, new = _median(base, name), _median(own, name)
        if old and new:
            parts.append(f"{label} x {new / old:.2f}")
    old, new = _median(base, "test_acc"), _median(own, "test_acc")
    if old is not None and new is not None:
        parts.append(f"test accuracy {100 * (new - old):+.1f} points")
    return ", ".join(parts)


def _values(results: Sequence[Result], name: str) -> list[float]:
    return [value for result in results if (value := getattr(result, name)) is not None]


def _median(results: Sequence[Result], name: str) -> float | None:
    values = _values(results, name)
    return statistics.median(values) if values else None


def _scaled(results: Sequence[Result], column: Column) -> list[float]:
    return [column.factor * value for value in _values(results, column.name)]


def _cell(results: Sequence[Result], column: Column) -> str:
    values = _scaled(results, column)
    if len(values) == 1:
        return f"{values[0]:.{column.digits}f}"
    return median_range(values, column.digits) if values else ""


def _to_markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(headings, [[cell.replace("|", "\\|") for cell in row] for row in rows])


def _panels(done: dict[str, list[Result]]) -> list[Panel]:
    panels = []
    for column in (column for name in CHARTED for column in COLUMNS if column.name == name):
        bars = {name: Bar.of(values) for name, runs in done.items() if (values := _scaled(runs, column))}
        panels += [Panel(column.heading, min(column.digits, 2), bars)] if bars else []
    return panels


def _to_tensorboard(output: Path, text: str, done: dict[str, list[Result]]) -> None:
    """Write table and chart, and for each variant a curve over its runs; the runs have event files of their own."""
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    folder = output / "summary"
    shutil.rmtree(folder, ignore_errors=True)  # written again completely
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("suite/table", text)
        chart = np.asarray(Image.open(output / "results.png").convert("RGB"))
        writer.add_image("suite/chart", chart, dataformats="HWC")
    for name, runs in done.items():
        with SummaryWriter(str(folder / name.replace("/", "-"))) as writer:
            for number, result in enumerate(runs):
                for column in COLUMNS:
                    value = getattr(result, column.name)
                    if value is not None:
                        writer.add_scalar(f"suite/{column.name}", value, number)
