"""The tables that ``predict`` leaves behind."""

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from vit_finetune.data.datasets import Batch

Answers = tuple[Tensor, Tensor, Tensor]
"""Position in the set int64 ``(B,)``; the largest probabilities float32 ``(B, k)``; their classes int64 ``(B, k)``."""


class Row(NamedTuple):
    """What is known about one image: its classes, the most probable first, or why it cannot be read."""

    path: str
    top: list[tuple[str, float]]
    error: str | None


class PredictionWriter(Callback):
    """Writes a table and JSON lines: each image has one row, in the order of the data, on any number of processes.

    The table has the columns ``path``, ``class``, ``probability``, then ``class_2``, ``probability_2`` and so on, and
    ``error``, which says why a file could not be read. The JSON lines hold the same as ``path``, ``class``,
    ``probability``, ``top`` and ``error``. Both are UTF-8; bytes in a name that are no text are written as escapes.

    Args:
        top_k: How many classes a row tells, the most probable first; all of them if there are fewer.
        path: Where to write the table, for example answers.csv; the JSON lines get the same name with .jsonl. By
            default predictions.csv in the run's folder, or predictions-1.csv and so on if there is one already.
    """

    def __init__(self, top_k: int = 5, path: str | None = None) -> None:
        if top_k < 1:
            raise MisconfigurationException(f"--predictions.top_k is {top_k}; it must be at least 1.")
        self.top_k = top_k
        self.stem = _stem(path) if path else None
        if self.stem and (taken := [str(file) for file in _files(self.stem) if file.exists()]):
            raise MisconfigurationException(f"--predictions.path {path}: there is {' and '.join(taken)} already.")
        self._answers: list[Answers] = []
        self._errors: dict[int, str] = {}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts with an empty table."""
        self._answers, self._errors = [], {}

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps the largest probabilities of the batch."""
        top = outputs["probability"].topk(min(self.top_k, outputs["probability"].shape[1]))
        self._answers.append((outputs["index"].cpu(), top.values.cpu(), top.indices.cpu()))
        for index, error in zip(outputs["index"].tolist(), batch.get("error", ()), strict=False):
            if error is not None:
                self._errors[index] = error

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers the answers of all processes and writes them in order."""
        answers, errors = self._answers, self._errors
        if trainer.world_size > 1:
            parts: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(parts, (answers, errors))
            answers = [answer for part, _ in parts for answer in part]
            errors = {index: error for _, part in parts for index, error in part.items()}
        folder = Path(trainer.log_dir or ".")  # asks all processes, so outside the condition
        if trainer.is_global_zero:
            names = trainer.datamodule.datasets["predict"].names  # type: ignore[attr-defined]
            rows = list(_rows(answers, errors, names, pl_module.class_names or []))  # type: ignore[arg-type]
            files = write_tables(self.stem or _free_stem(folder / "predictions"), rows)
            unread = f", {len(errors)} of them unreadable" if errors else ""
            print(f"predictions  {len(rows)} images{unread}  {'  '.join(map(_text, files))}", flush=True)


def _rows(answers: list[Answers], errors: dict[int, str], names: list[str], classes: list[str]) -> Iterator[Row]:
    """Puts the answers in the order of the data, without fillers, and each image once."""
    if not answers:  # --trainer.limit_predict_batches 0
        return
    index, values, labels = (torch.cat(column) for column in zip(*answers, strict=True))
    shown = [name.encode(errors="surrogateescape").decode(errors="backslashreplace") for name in classes]
    last = -1
    for row in index.argsort(stable=True).tolist():
        position = int(index[row])
        if position > last:
            last = position
            error = errors.get(position)
            top = [] if error else [(shown[c], p) for c, p in zip(labels[row], values[row].tolist(), strict=True)]
            yield Row(_text(names[position]), top, error)


def write_tables(stem: Path, rows: list[Row]) -> tuple[Path, Path]:
    """Writes ``stem.csv`` and ``stem.jsonl``, probabilities with six digits behind the point; returns the two."""
    table, lines = _files(stem)
    table.parent.mkdir(parents=True, exist_ok=True)
    columns = max((len(row.top) for row in rows), default=0)
    more = [f"{name}_{number}" for number in range(2, columns + 1) for name in ("class", "probability")]
    with open(table, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "class", "probability", *more, "error"])
        for row in rows:
            cells = [cell for name, p in row.top for cell in (name, f"{p:.6f}")] or [""] * (2 + len(more))
            writer.writerow([row.path, *cells, row.error or ""])
    with open(lines, "w", encoding="utf-8") as file:
        for row in rows:
            top = [{"class": name, "probability": round(p, 6)} for name, p in row.top]
            best = top[0] if top else {"class": None, "probability": None}
            entry = {"path": row.path, **best, "top": top, "error": row.error}
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
    return table, lines


def _text(path: str | Path) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")


def _files(stem: Path) -> tuple[Path, Path]:
    return stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.jsonl")


def _stem(path: str) -> Path:
    asked = Path(path)
    return asked.with_suffix("") if asked.suffix.lower() in (".csv", ".jsonl") else asked


def _free_stem(stem: Path) -> Path:
    free, number = stem, 0
    while any(file.exists() for file in _files(free)):
        number += 1
        free = stem.with_name(f"{stem.name}-{number}")
    return free
