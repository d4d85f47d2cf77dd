"""What a suite came to: a table, what each variant changed and what that bought, charts, and all of it in TensorBoard."""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from vit_finetune.benchmark.records import Result
from vit_finetune.benchmark.suite import Variant
from vit_finetune.formatting import median_range


class Column(NamedTuple):
    """A column of the table: heading, attribute of a result, factor from its unit to the one shown, digits."""

    heading: str
    name: str
    factor: float = 1
    digits: int = 0


COLUMNS = (
    Column("Process, s", "seconds", digits=1),
    Column("Training, s", "train_seconds", digits=1),
    Column("First step, s", "first_step_seconds", digits=1),
    Column("Images/s", "images_per_second"),
    Column("TFLOP/s a device", "tflops", digits=3),
    Column("MFU, %", "mfu", 100, 1),
    Column("Data wait, %", "data_time_fraction", 100, 2),
    Column("Peak memory, GB", "peak_memory_gb", digits=3),
    Column("Forecast, GB", "forecast_gb", digits=3),
    Column("Validation accuracy, %", "val_acc", 100, 1),
    Column("Test accuracy, %", "test_acc", 100, 1),
)
EXPLANATION = """\
Each value is the median, with the least and the largest over all seeds and repeats of the variant. Process is `fit` from
its start to its end, and its ratio how many times as fast that was as the first variant of the table; training leaves out
what comes before the first step. Images/s, TFLOP/s, MFU and data wait are steady state: medians over logging
intervals, without the first. MFU counts the operations of the network against the dense peak of the device's data
sheet, where that is known. Peak memory is what was allocated on a GPU; on a CPU it is what the first process had
resident, the libraries included, which the forecast leaves out.
"""


def write(
    output: Path, name: str, variants: list[Variant], options: dict[str, dict[str, Any]], results: list[Result]
) -> None:
    """Writes ``results.md``, the charts and the TensorBoard summary; the latter two once a run is done.

    Args:
        output: Folder of the results.
        name: Of the suite.
        variants: In order.
        options: All options of each variant.
        results: All runs so far.
    """
    from vit_finetune.benchmark import charts

    done = [result for result in results if result.status == "done"]
    text = markdown(name, variants, options, results)
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.md").write_text(text, encoding="utf-8")
    if done:
        charts.save(
            output / "results", name, {variant.name: _of(variant, done) for variant in variants if _of(variant, done)}
        )
        _to_tensorboard(output, text, variants, done)


def markdown(name: str, variants: list[Variant], options: dict[str, dict[str, Any]], results: list[Result]) -> str:
    """The whole of ``results.md``."""
    done = [result for result in results if result.status == "done"]
    parts = [
        f"# Suite {name}\n",
        *_origins(results),
        table(variants, done),
        EXPLANATION,
        changes_table(variants, options, done),
    ]
    missing = {(r.variant, r.status, r.reason): None for r in results if r.status != "done"}
    if missing:
        rows = [[variant, status, reason] for variant, status, reason in missing]
        parts += ["## Not run, or failed\n", _table(["Variant", "What", "Reason"], rows)]
    return "\n".join(parts)


def _origins(results: list[Result]) -> list[str]:
    """Where the values come from; several lines where a suite was continued elsewhere or later."""
    lines = dict.fromkeys(f"- {r.machine}; {r.versions}; commit {r.commit}" for r in results)
    return ["\n".join(lines) + "\n"] if lines else []


def table(variants: list[Variant], done: list[Result]) -> str:
    """One row for each variant that was run, with the ratio to the first of them; columns without values are left out."""
    columns = [column for column in COLUMNS if any(getattr(result, column.name) is not None for result in done)]
    first = next((_of(variant, done) for variant in variants if _of(variant, done)), [])
    headings = ["Variant", "Runs", *(column.heading for column in columns)]
    headings[3:3] = ["Process, ratio"]
    rows = []
    for variant in variants:
        if mine := _of(variant, done):
            cells = [_cell(mine, column) for column in columns]
            rows.append([variant.name, str(len(mine)), cells[0], _times(first, mine, "seconds"), *cells[1:]])
    return _table(headings, rows)


def changes_table(variants: list[Variant], options: dict[str, dict[str, Any]], done: list[Result]) -> str:
    """What each variant changed against the one it builds on, and what that bought."""
    rows = []
    for variant in variants:
        if variant.compared_with is not None:
            changed = "<br>".join(
                f"`{line}`" for line in changes(options[variant.compared_with], options[variant.name])
            )
            base, mine = _named(variant.compared_with, done), _of(variant, done)
            rows.append([variant.name, variant.compared_with, changed, delta(base, mine)])
    return "## What each variant changes, and what that bought\n\n" + _table(
        ["Variant", "Against", "Changes", "Bought"], rows
    )


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Options that differ, as ``option: old → new``."""
    old, new = _flat(before), _flat(after)
    lines = []
    for key in dict.fromkeys([*old, *new]):
        left, right = (options.get(key) for options in (old, new))
        if left != right:
            lines.append(f"{key}: {_as_yaml(left)} → {_as_yaml(right)}")
    return lines


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names, lists as text."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (str, int, float, type(None))) else str(value)
    return flat


def delta(base: list[Result], mine: list[Result]) -> str:
    """Time, speed, memory and accuracy against another variant, by medians."""
    if not base or not mine:
        return "not run"
    parts = []
    for what, name in (
        ("training time", "train_seconds"),
        ("images/s", "images_per_second"),
        ("memory", "peak_memory_gb"),
    ):
        old, new = _median(base, name), _median(mine, name)
        if old and new:
            parts.append(f"{what} x {new / old:.2f}")
    old, new = _median(base, "test_acc"), _median(mine, "test_acc")
    if old is not None and new is not None:
        parts.append(f"test accuracy {100 * (new - old):+.1f} points")
    return ", ".join(parts)


def _times(first: list[Result], mine: list[Result], name: str) -> str:
    """How many times as fast as the first variant."""
    base, own = _median(first, name), _median(mine, name)
    return f"{base / own:.2f} x" if base and own else ""


def _of(variant: Variant, results: list[Result]) -> list[Result]:
    return _named(variant.name, results)


def _named(name: str, results: list[Result]) -> list[Result]:
    return [result for result in results if result.variant == name]


def values(results: list[Result], name: str) -> list[float]:
    """The values that were measured."""
    return [value for result in results if (value := getattr(result, name)) is not None]


def _median(results: list[Result], name: str) -> float | None:
    found = values(results, name)
    return statistics.median(found) if found else None


def _cell(results: list[Result], column: Column) -> str:
    found = [column.factor * value for value in values(results, column.name)]
    if len(found) == 1:
        return f"{found[0]:.{column.digits}f}"
    return median_range(found, column.digits) if found else ""


def _table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _to_tensorboard(output: Path, text: str, variants: list[Variant], done: list[Result]) -> None:
    """Table and charts, and for each variant a line over its runs; the runs have event files of their own."""
    from torch.utils.tensorboard import SummaryWriter

    folder = output / "summary"
    shutil.rmtree(folder, ignore_errors=True)  # all of it is written again
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("suite/table", text)
        writer.add_image("suite/chart", _pixels(output / "results.png"), dataformats="HWC")
    for variant in variants:
        with SummaryWriter(str(folder / variant.name.replace("/", "-"))) as writer:
            for number, result in enumerate(_of(variant, done)):
                for column in COLUMNS:
                    value = getattr(result, column.name)
                    if value is not None:
                        writer.add_scalar(f"suite/{column.name}", value, number)


def _pixels(path: Path) -> Any:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"))
