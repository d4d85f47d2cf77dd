"""Logged metrics and configurations of runs, as pandas data frames for notebooks and comparisons."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from vit_finetune.evaluation.metrics import direction

if TYPE_CHECKING:
    import pandas as pd

Source = str | os.PathLike[str]
EVENTS = "events.out.tfevents.*"


class Point(NamedTuple):
    """A logged value."""

    step: int
    value: float
    time: float
    """Seconds since 1970."""


def read_scalars(folder: Source) -> dict[str, list[Point]]:
    """Read all scalars from the event files of one run; needs no pandas.

    Args:
        folder: A run folder, or a single event file.

    Returns:
        Points by tag, such as ``val/acc``, in the order in which they were logged.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 1, "tensors": 1})
    events.Reload()
    return {
        tag: [Point(event.step, event.value, event.wall_time) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def scalars(*sources: Source) -> "pd.DataFrame":
    """Read all scalars of runs.

    Args:
        sources: Run folders, or folders that contain runs, such as ``runs``.

    Returns:
        A row for each value: ``run`` (experiment/version), ``tag`` (such as ``val/acc``), ``step`` (optimizer steps,
        from 0), ``value``, ``time`` (UTC). ``frame.pivot_table("value", "step", ["tag", "run"])`` makes columns.

    Raises:
        MisconfigurationException: A folder does not exist or contains no run.
    """
    pandas = _pandas()
    rows = [
        (name, tag, *point)
        for name, folder in _find(sources).items()
        for tag, points in read_scalars(folder).items()
        for point in points
    ]
    frame = pandas.DataFrame(rows, columns=["run", "tag", "step", "value", "time"])
    return frame.assign(time=pandas.to_datetime(frame["time"], unit="s"))


def runs(*sources: Source, options: Sequence[str] | None = None) -> "pd.DataFrame":
    """Compare the options and results of runs, the best run first.

    Args:
        sources: Run folders, or folders that contain runs, such as ``runs``.
        options: Options to show, such as ``model.lr``. By default those in which the runs differ.

    Returns:
        A row for each run, indexed by its name: ``started`` (UTC) and ``minutes``, from the first to the last training
        metric, including the pauses of a resumed run; the best value of the metric ``best_checkpoint.monitor`` and its
        ``step``; ``test/...`` if the run was tested; then a column for each option.

    Raises:
        MisconfigurationException: A folder does not exist or contains no run.
    """
    pandas = _pandas()
    folders = _find(sources)
    configs = {name: _read_config(folder) for name, folder in folders.items()}
    config = pandas.DataFrame(configs, dtype=object).T
    results = {name: _results(read_scalars(folder), configs[name]) for name, folder in folders.items()}
    if options is None:
        options = [name for name in config if len(set(map(str, config[name]))) > 1]
    table = pandas.DataFrame(results, dtype=object).T.join(config.reindex(columns=list(options))).infer_objects()
    metric, mode = _monitored(next(iter(configs.values())))
    return table.sort_values(metric, ascending=mode == "min") if metric in table else table


def _find(sources: Iterable[Source]) -> dict[str, Path]:
    """Return the run folders at or below the sources by their names."""
    found: dict[Path, None] = {}
    for source in sources:
        folders = {file.parent.resolve() for file in Path(source).rglob(EVENTS)}
        if not folders:
            raise MisconfigurationException(f"{source} contains no run: expected {EVENTS} in it or in a subfolder.")
        found.update(dict.fromkeys(sorted(folders, key=_natural)))
    return _named(list(found))


def _natural(folder: Path) -> tuple[str, int, str]:
    """Return a sort key with version_10 after version_9."""
    number = folder.name.rpartition("_")[2]
    return str(folder.parent), int(number) if number.isdigit() else -1, folder.name


def _named(folders: list[Path]) -> dict[str, Path]:
    """Name runs ``experiment/version``, as TensorBoard does with ``--logdir runs``; with more parents if ambiguous."""
    endings = {path: ["/".join(path.parts[-n:]) for n in range(2, len(path.parts) + 1)] for path in folders}
    counts = Counter(ending for names in endings.values() for ending in names)
    return {next(ending for ending in names if counts[ending] == 1): path for path, names in endings.items()}


def _read_config(folder: Path) -> dict[str, object]:
    """Return the options of a run as ``{"model.lr": 0.001, ...}``."""
    config = folder / "config.yaml"
    return dict(_flatten(yaml.safe_load(config.read_text(encoding="utf-8")))) if config.is_file() else {}


def _flatten(options: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in options.items():
        if isinstance(value, dict) and value:
            # data: {class_path: ..., init_args: {...}} gives data.class_path, data.batch_size, as on the command line.
            yield from _flatten(value, prefix if key == "init_args" else f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _monitored(options: dict[str, Any]) -> tuple[str, str]:
    """Return the metric that selects the best checkpoint, and ``max`` or ``min``."""
    metric = options.get("best_checkpoint.monitor") or "val/acc"
    return metric, options.get("best_checkpoint.mode") or direction(metric) or "max"


def _results(points: dict[str, list[Point]], options: dict[str, object]) -> dict[str, object]:
    results: dict[str, object] = {}
    times = [point.time for tag in points if tag.startswith("train/") for point in points[tag]]
    if times:
        started = datetime.fromtimestamp(min(times), timezone.utc).replace(tzinfo=None)
        results |= {"started": started, "minutes": (max(times) - min(times)) / 60}
    metric, mode = _monitored(options)
    if metric in points:
        best = (min if mode == "min" else max)(points[metric], key=lambda point: point.value)
        results |= {metric: best.value, "step": best.step}
    return results | {tag: points[tag][-1].value for tag in points if tag.startswith("test/")}


def _pandas() -> Any:
    try:
        import pandas as pd
    except ImportError as error:
        raise MisconfigurationException("Data frames need pandas: pip install 'vit_finetune[notebooks]'") from error
    return pd
