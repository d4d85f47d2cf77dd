"""One row for each run of a suite, read from its event files and kept in ``results.csv``."""

import csv
import os
import statistics
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

import vit_finetune
from vit_finetune import environment

PACKAGES = ("python", "vit_finetune", "torch", "lightning", "timm")


@dataclass(frozen=True)
class Result:
    """A run.

    Attributes:
        variant: Name.
        seed: Of ``--seed_everything``.
        repeat: Counted from 0.
        status: ``done``, ``skipped`` (this machine cannot run it) or ``failed``.
        reason: Why it was skipped or failed.
        seconds: From the start of the process of ``fit`` to its end.
        train_seconds: From the first step to the last, with validation.
        first_step_seconds: Compilation and other warm-up is in it.
        images_per_second: Steady state: median over logging intervals, the first left out.
        tflops: 1e12 floating-point operations a second and device, in steady state.
        mfu: That as a share of the device's peak; ``None`` where it is not known.
        data_time_fraction: Share of the steady time in which training waited for data.
        peak_memory_gb: Allocated on a GPU; resident in the first process, libraries included, on a CPU.
        forecast_gb: See :mod:`vit_finetune.model.memory`; without libraries.
        val_acc: The best epoch's.
        test_acc: With the weights of that epoch.
        run: Folder of the run.
        options: Hash of all options of the variant.
        date: When it was begun.
        machine: Processor and GPUs.
        versions: Of what matters for speed.
        commit: Of the project; ends with -dirty where files were changed.
    """

    variant: str
    seed: int
    repeat: int
    status: str = ""
    reason: str = ""
    seconds: float | None = None
    train_seconds: float | None = None
    first_step_seconds: float | None = None
    images_per_second: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    data_time_fraction: float | None = None
    peak_memory_gb: float | None = None
    forecast_gb: float | None = None
    val_acc: float | None = None
    test_acc: float | None = None
    run: str = ""
    options: str = ""
    date: str = ""
    machine: str = ""
    versions: str = ""
    commit: str = ""

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells a run from the others of its suite."""
        return self.variant, self.seed, self.repeat

    @property
    def outcome(self) -> str:
        """A few words for the terminal."""
        return f"{self.seconds:.1f} s" if self.seconds is not None else f"{self.status}: {self.reason}"


def load(path: Path) -> list[Result]:
    """Reads ``results.csv``; nothing where there is none.

    Raises:
        MisconfigurationException: The table is not one of these.
    """
    if not path.exists():
        return []
    kinds = {field.name: field.type for field in fields(Result)}
    with path.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        if table.fieldnames != list(kinds):
            raise MisconfigurationException(f"{path} has other columns than this version writes. Move it away.")
        return [Result(**{name: _value(text, kinds[name]) for name, text in row.items()}) for row in table]


def _value(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind is int:
        return int(text)
    return float(text) if text else None


def store(path: Path, results: list[Result]) -> None:
    """Writes ``results.csv``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Result)])
        table.writeheader()
        table.writerows(vars(result) for result in results)
    os.replace(part, path)


def read_run(folder: Path) -> dict[str, Any]:
    """Takes the measured values out of the event files of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()

    def points(tag: str) -> list[float]:
        return [event.value for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []

    def steady(tag: str) -> float | None:
        values = points(tag)
        return statistics.median(values[1:] or values) if values else None

    return {
        "train_seconds": max(points("train/seconds"), default=None),
        "first_step_seconds": max(points("train/first_step_seconds"), default=None),
        "images_per_second": steady("train/images_per_second"),
        "tflops": steady("train/tflops"),
        "mfu": steady("train/mfu"),
        "data_time_fraction": steady("train/data_time_fraction"),
        "peak_memory_gb": max(points("train/peak_memory_gb"), default=None),
        "forecast_gb": max(points("memory/forecast_gb"), default=None),
        "val_acc": max(points("val/acc"), default=None),
        "test_acc": max(points("test/acc"), default=None),
    }


def origin() -> dict[str, Any]:
    """Machine, versions and commit."""
    facts = environment.facts()
    return {
        "machine": f"{_processor()}, {facts['cpu']}; GPU {facts['gpu']}",
        "versions": ", ".join(f"{name} {facts[name]}" for name in PACKAGES),
        "commit": commit(),
    }


def _processor() -> str:
    import platform

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit of the project's own repository, ``unknown`` where it is installed without one."""
    root = Path(vit_finetune.__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    if not (root / ".git").exists():
        return "unknown"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
