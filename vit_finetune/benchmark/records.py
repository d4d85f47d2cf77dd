"""Results of single runs, read from their event files and kept in ``results.csv``."""

import csv
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

import vit_finetune
from vit_finetune import environment
from vit_finetune.evaluation import runs

PACKAGES = ("python", "vit_finetune", "torch", "lightning", "timm")


@dataclass(frozen=True)
class Result:
    """Result of one run.

    Attributes:
        variant: Name.
        seed: Value of ``--seed_everything``.
        repeat: Counted from 0.
        status: ``done``, ``skipped`` (not possible on this machine) or ``failed``.
        reason: Why the run was skipped or failed.
        seconds: Duration of the process of ``fit``.
        cpu_seconds: Processor time of ``fit`` and its processes; other programs on the machine affect it less.
        train_seconds: From the first to the last step, including validation.
        first_step_seconds: Duration of the first step, including compilation and other warm-up.
        images_per_second: In steady state: median over logging intervals, without the first.
        tflops: 1e12 floating-point operations per second and device, in steady state.
        mfu: Fraction of the device's peak; ``None`` where the peak is unknown.
        data_time_fraction: Fraction of the time that training waited for data, in steady state.
        peak_memory_gb: Allocated on a GPU; resident in the first process, including libraries, on a CPU.
        trainable_parameters: Number of parameters that are trained.
        forecast_gb: Predicted memory without libraries, see :mod:`vit_finetune.model.memory`.
        val_acc: Of the best epoch.
        test_acc: With the weights of that epoch.
        run: Folder of the run.
        options: Hash of all options of the variant.
        date: Start of the run.
        machine: Processor and GPUs.
        versions: Versions of the packages that affect speed.
        commit: Commit of the project; ends with -dirty if files were changed.
    """

    variant: str
    seed: int
    repeat: int
    status: str = ""
    reason: str = ""
    seconds: float | None = None
    cpu_seconds: float | None = None
    train_seconds: float | None = None
    first_step_seconds: float | None = None
    images_per_second: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    data_time_fraction: float | None = None
    peak_memory_gb: float | None = None
    trainable_parameters: float | None = None
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
        """Identify the run within its suite."""
        return self.variant, self.seed, self.repeat

    @property
    def outcome(self) -> str:
        """Summarize the result for the terminal."""
        return f"{self.seconds:.1f} s" if self.seconds is not None else f"{self.status}: {self.reason}"

    @property
    def origin(self) -> str:
        """Machine, versions and commit on one line."""
        return f"{self.machine}; {self.versions}; commit {self.commit}"


def load(path: Path) -> list[Result]:
    """Read ``results.csv``; return an empty list if it does not exist.

    Raises:
        MisconfigurationException: The columns differ from those of :class:`Result`.
    """
    if not path.exists():
        return []
    types = {field.name: field.type for field in fields(Result)}
    with path.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        if table.fieldnames != list(types):
            raise MisconfigurationException(f"{path} has other columns than this version writes. Move the file away.")
        return [Result(**{name: _value(text, types[name]) for name, text in row.items()}) for row in table]


def _value(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind is int:
        return int(text)
    return float(text) if text else None


def store(path: Path, results: Iterable[Result]) -> None:
    """Write ``results.csv``."""
    write_csv(path, [field.name for field in fields(Result)], map(vars, results))


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a table atomically: a file that exists is replaced completely or stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(rows)
    os.replace(part, path)


def read_run(folder: Path) -> dict[str, float | None]:
    """Read the measured attributes of :class:`Result` from the event files of a run."""
    points = {tag: [point.value for point in curve] for tag, curve in runs.read_scalars(folder).items()}

    def highest(tag: str) -> float | None:
        return max(points.get(tag, []), default=None)

    def steady(tag: str) -> float | None:
        values = points.get(tag, [])
        return statistics.median(values[1:] or values) if values else None

    return {
        "train_seconds": highest("train/seconds"),
        "first_step_seconds": highest("train/first_step_seconds"),
        "images_per_second": steady("train/images_per_second"),
        "tflops": steady("train/tflops"),
        "mfu": steady("train/mfu"),
        "data_time_fraction": steady("train/data_time_fraction"),
        "peak_memory_gb": highest("train/peak_memory_gb"),
        "trainable_parameters": highest("memory/trainable_parameters"),
        "forecast_gb": highest("memory/forecast_gb"),
        "val_acc": highest("val/acc"),
        "test_acc": highest("test/acc"),
    }


def origin() -> dict[str, Any]:
    """Return the attributes ``machine``, ``versions`` and ``commit`` of :class:`Result`."""
    facts = environment.facts()
    return {
        "machine": f"{_processor()}, {facts['cpu']}; GPU {facts['gpu']}",
        "versions": ", ".join(f"{name} {facts[name]}" for name in PACKAGES),
        "commit": _commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit of the project's own repository, ``unknown`` if it is installed without one."""
    root = Path(vit_finetune.__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    if not (root / ".git").exists():
        return "unknown"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
