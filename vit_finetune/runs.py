"""What runs came to, as pandas data frames: for notebooks and comparisons."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    import pandas as pd

Source = str | os.PathLike[str]
EVENTS = "events.out.tfevents.*"


def scalars(*sources: Source) -> "pd.DataFrame":
    """Reads everything that runs logged as numbers.

    Args:
        sources: Folders of runs, or folders below which runs lie, such as ``runs``.

    Returns:
        A row for each value: ``run`` (experiment/version), ``tag`` (such as ``val/acc``), ``step`` (optimizer steps,
        from 0), ``value``, ``time`` (UTC). ``frame.pivot_table("value", "step", ["tag", "run"])`` makes columns.

    Raises:
        MisconfigurationException: There is no such folder, or no run in it.
    """
    frame = _pandas().DataFrame(
        [(name, *row) for name, run in _runs(sources).items() for row in _read(run)],
        columns=["run", "tag", "step", "value", "time"],
    )
    return frame.assign(time=_pandas().to_datetime(frame["time"], unit="s"))


def runs(*sources: Source, options: Sequence[str] | None = None) -> "pd.DataFrame":
    """Compares runs: what was asked for and what came out, the best first.

    Args:
        sources: As for :func:`scalars`.
        options: The options to show, such as ``model.lr``. By default those in which the runs differ.

    Returns:
        A row for each run, indexed by its name: ``started`` (UTC) and ``minutes``, from the first logged training value
        to the last, pauses of a resumed run included; the best value of the metric that
        ``best_checkpoint.monitor`` follows, under its name, and the ``step`` it was reached at; ``test/...`` if the run
        was tested; then a column for each option.

    Raises:
        MisconfigurationException: There is no such folder, or no run in it.
    """
    pandas = _pandas()
    found = _runs(sources)
    asked = {name: _options(run) for name, run in found.items()}
    config = pandas.DataFrame(asked, dtype=object).T
    results = pandas.DataFrame({name: _result(run, asked[name]) for name, run in found.items()}, dtype=object).T
    if options is None:
        options = [name for name in config if len(set(map(str, config[name]))) > 1]
    table = results.join(config.reindex(columns=list(options))).infer_objects()
    metric, mode = _followed(next(iter(asked.values())))
    return table.sort_values(metric, ascending=mode == "min") if metric in table else table


def _runs(sources: Iterable[Source]) -> dict[str, Path]:
    """Folders with an event file at or below the sources by their names, in the order of their paths."""
    found: dict[Path, None] = {}
    for source in sources:
        events = Path(source).rglob(EVENTS)
        below = sorted({file.parent.resolve() for file in events}, key=_natural)
        if not below:
            raise MisconfigurationException(f"{source} holds no run: no {EVENTS} at or below it.")
        found.update(dict.fromkeys(below))
    return _named(list(found))


def _natural(run: Path) -> tuple[str, int, str]:
    """Puts version_10 behind version_9."""
    number = run.name.rpartition("_")[2]
    return str(run.parent), int(number) if number.isdigit() else -1, run.name


def _named(runs: list[Path]) -> dict[str, Path]:
    """``experiment/version``, as TensorBoard calls a run below ``--logdir runs``; longer where two are called so."""
    endings = {run: ["/".join(run.parts[-length:]) for length in range(2, len(run.parts) + 1)] for run in runs}
    counts = Counter(ending for some in endings.values() for ending in some)
    return {next(ending for ending in some if counts[ending] == 1): run for run, some in endings.items()}


def _read(run: Path) -> Iterator[tuple[str, int, float, float]]:
    """Tag, step, value and seconds since 1970 of every scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "images": 1, "tensors": 1})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            yield tag, event.step, event.value, event.wall_time


def _options(run: Path) -> dict[str, Any]:
    """What ran, as ``{"model.lr": 0.001, ...}``."""
    config = run / "config.yaml"
    return dict(_flatten(yaml.safe_load(config.read_text(encoding="utf-8")))) if config.is_file() else {}


def _flatten(options: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if isinstance(value, dict) and value:
            # data: {class_path: ..., init_args: {...}} reads data.class_path, data.batch_size, as on the command line.
            yield from _flatten(value, prefix if key == "init_args" else f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _followed(options: dict[str, Any]) -> tuple[str, str]:
    """The metric that decides which weights are best, and whether its ``max`` or ``min`` is wanted."""
    return options.get("best_checkpoint.monitor") or "val/acc", options.get("best_checkpoint.mode", "max")


def _result(run: Path, options: dict[str, Any]) -> dict[str, Any]:
    metric, mode = _followed(options)
    rows = list(_read(run))
    result: dict[str, Any] = {}
    times = [time for tag, _, _, time in rows if tag.startswith("train/")]
    if times:
        started = datetime.fromtimestamp(min(times), timezone.utc).replace(tzinfo=None)
        result |= {"started": started, "minutes": (max(times) - min(times)) / 60}
    values = [(value, step) for tag, step, value, _ in rows if tag == metric]
    if values:
        best = (min if mode == "min" else max)(values, key=lambda pair: pair[0])
        result |= dict(zip((metric, "step"), best, strict=True))
    return result | {tag: value for tag, _, value, _ in rows if tag.startswith("test/")}


def _pandas() -> Any:
    try:
        import pandas as pd
    except ImportError as error:
        raise MisconfigurationException("Data frames need pandas: pip install 'vit_finetune[notebooks]'") from error
    return pd
