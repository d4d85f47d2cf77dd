"""Find the best or the last checkpoint of a run, and the metric that selects the best one."""

import math
import os
from pathlib import Path
from typing import TypedDict

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vit_finetune.checkpoint import read_header

KEYWORDS = {"best": "best-*.ckpt", "last": "last.ckpt"}
RUNS = "runs"
"""Default folder of all runs."""


class Monitored(TypedDict):
    """The metric that selects the best checkpoint, with its value when the file was saved."""

    metric: str
    mode: str
    value: float


def find(source: str | os.PathLike[str], runs: Path) -> Path:
    """Find the checkpoint to evaluate: of a folder, the best one of its newest run.

    Args:
        source: A checkpoint, a folder, or ``best`` or ``last`` of the newest run.
        runs: Folder of all runs.

    Raises:
        MisconfigurationException: There is no checkpoint.
    """
    keyword, folder = str(source), Path(source)
    if folder.is_file():
        return folder
    if keyword not in KEYWORDS and not folder.is_dir():
        raise MisconfigurationException(
            f"{folder}: no such file or folder. Expected a run folder, a checkpoint, best or last."
        )
    found = newest(runs, keyword) if keyword in KEYWORDS else newest(folder, "best") or newest(folder, "last")
    if (folder / "meta.pt").is_file() or (found and found.is_dir()):
        sharded = folder if (folder / "meta.pt").is_file() else found
        raise MisconfigurationException(
            f"{sharded} is a sharded checkpoint. Consolidate it first: python -m vit_finetune.checkpoint {sharded}"
        )
    if found is None and keyword in KEYWORDS:
        raise MisconfigurationException(f"no run in {runs} has {KEYWORDS[keyword]}. Train a model with fit first.")
    if found is None:
        raise MisconfigurationException(
            f"{folder} contains no checkpoint. Expected a run folder, a checkpoint, best or last."
        )
    rank_zero_info(f"checkpoint: {describe(found)}")
    return found


def newest(folder: Path, keyword: str) -> Path | None:
    """Return a checkpoint of the newest run at or below a folder: the run that was started or resumed last.

    Args:
        folder: Folder of runs, or a run folder.
        keyword: ``best``, by the monitored metric, or ``last``. Runs without such a checkpoint do not count.
    """
    runs: dict[Path, list[Path]] = {}
    for path in folder.rglob(KEYWORDS[keyword]):
        runs.setdefault(path.parent, []).append(path)
    return _best(max(runs.values(), key=_started)) if runs else None


def _started(checkpoints: list[Path]) -> tuple[float, float]:
    saved = max(map(modified, checkpoints))
    config = checkpoints[0].parent.parent / "config.yaml"
    return (modified(config) if config.is_file() else saved), saved


def _best(checkpoints: list[Path]) -> Path:
    """Return the best by the metric that the newest of the checkpoints monitors; if that is unknown, the newest."""
    newest_first = sorted(checkpoints, key=modified, reverse=True)
    if len(newest_first) == 1:
        return newest_first[0]
    stored = {path: monitored(path) for path in newest_first}
    reference = stored[newest_first[0]]
    if reference is None:
        return newest_first[0]
    values = {path: m["value"] for path, m in stored.items() if m is not None and m["metric"] == reference["metric"]}
    sign = -1 if reference["mode"] == "min" else 1
    finite = [path for path in reversed(values) if not math.isnan(values[path])]  # of equal ones, the earliest
    return max(finite, key=lambda path: sign * values[path], default=newest_first[0])


def modified(path: Path) -> float:
    """Return the time of the last change."""
    return path.stat().st_mtime


def monitored(path: Path) -> Monitored | None:
    """Return the monitored metric that a checkpoint stores, ``None`` if there is none."""
    try:
        stored: Monitored | None = read_header(path).get("vit_finetune", {}).get("monitored")
    except MisconfigurationException:  # damaged, or only weights
        return None
    return stored


def describe(path: Path) -> str:
    """Return the path of a checkpoint, followed by the value that made it the best one."""
    stored = None if path.name == KEYWORDS["last"] else monitored(path)
    return f"{path}, {stored['metric']} {stored['value']:.4f}" if stored else str(path)


def best_callback(trainer: Trainer) -> ModelCheckpoint | None:
    """Return the callback that saves the best checkpoint; the command line adds it after those of the user."""
    found = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return found[-1] if found else None


def monitored_now(trainer: Trainer) -> Monitored | None:
    """Return the monitored metric with its current value, to be stored in a checkpoint."""
    callback = best_callback(trainer)
    if callback is None or callback.monitor is None:
        return None
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    values = {"epoch": float(trainer.current_epoch), "step": float(trainer.global_step)} | values
    value = values.get(callback.monitor)
    return None if value is None else {"metric": callback.monitor, "mode": callback.mode, "value": value}
