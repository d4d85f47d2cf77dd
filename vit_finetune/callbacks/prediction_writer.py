"""Tables of predictions that ``predict`` writes."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from typing_extensions import override

from vit_finetune.data.datasets import Batch
from vit_finetune.errors import require
from vit_finetune.formatting import free_path
from vit_finetune.module import ViTClassifier

SUFFIXES = (".csv", ".jsonl")


class TopK(NamedTuple):
    """Most probable classes of a batch."""

    position: Tensor
    """Position in the dataset, int64 ``(B,)``; -1 for padding samples."""
    probability: Tensor
    """float32 ``(B, k)``, in descending order."""
    label: Tensor
    """int64 ``(B, k)``."""


class Row(NamedTuple):
    """Prediction for one image: classes in order of probability, or the reason why the file cannot be read."""

    path: str
    top: list[tuple[str, float]]
    error: str | None


class PredictionWriter(BasePredictionWriter):
    """Write predictions as CSV and as JSON lines: one row per image, in the order of the data.

    The CSV has the columns ``path``, ``class``, ``probability``, then ``class_2``, ``probability_2`` and so on, and
    ``error``, the reason why a file cannot be read. The JSON lines have the keys ``path``, ``class``, ``probability``,
    ``top`` and ``error``. Both files are UTF-8; bytes of file names that are not text are escaped.

    Args:
        top_k: Number of classes per row, the most probable first; all classes if there are fewer.
        path: CSV file to write, for example predictions.csv; the JSON lines have the same name with .jsonl. By default
            predictions.csv in the run folder, or predictions-1.csv and so on if it already exists.
    """

    def __init__(self, top_k: int = 5, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        require("--predictions.top_k", top_k, 1)
        self.top_k = top_k
        self.stem = _stem(path) if path else None
        if self.stem and (existing := [str(file) for file in _files(self.stem) if file.exists()]):
            raise MisconfigurationException(
                f"--predictions.path {path}: {' and '.join(existing)} already exists; give another name."
            )
        self._predictions: list[TopK] = []
        self._errors: dict[int, str] = {}

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._predictions, self._errors = [], {}

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: dict[str, Tensor],
        batch_indices: object,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Keep the most probable classes of the batch; the files are written when all processes are done."""
        index, probability = prediction["index"].cpu(), prediction["probability"]
        top = probability.topk(min(self.top_k, probability.shape[1]))
        self._predictions.append(TopK(index, top.values.cpu(), top.indices.cpu()))
        for position, error in zip(index.tolist(), batch.get("error", ()), strict=False):
            if error is not None:
                self._errors[position] = error

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the predictions of all processes and write them in order."""
        assert isinstance(pl_module, ViTClassifier)
        predictions, errors = self._predictions, self._errors
        if trainer.world_size > 1:
            parts: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(parts, (predictions, errors))
            predictions = [batch for part, _ in parts for batch in part]
            errors = {position: error for _, part in parts for position, error in part.items()}
        folder = Path(trainer.log_dir or ".")  # log_dir is broadcast, so all processes have to ask for it
        if trainer.is_global_zero:
            loader: Any = trainer.predict_dataloaders
            rows = list(_rows(predictions, errors, loader.dataset.names, pl_module.class_names or []))
            files = write_tables(self.stem or free_path(folder / "predictions", SUFFIXES), rows)
            unreadable = f", {len(errors)} of them unreadable" if errors else ""
            print(f"predictions  {len(rows)} images{unreadable}  {'  '.join(map(_text, files))}", flush=True)


def _rows(predictions: list[TopK], errors: dict[int, str], names: list[str], classes: list[str]) -> Iterator[Row]:
    """Yield each image once, in the order of the data, without padding samples."""
    positions, probability, label = (torch.cat(column) for column in zip(*predictions, strict=True))
    shown = [_text(name) for name in classes]
    last = -1
    for row in positions.argsort(stable=True).tolist():
        position = int(positions[row])
        if position > last:
            last = position
            error = errors.get(position)
            best = zip(label[row].tolist(), probability[row].tolist(), strict=True)
            yield Row(_text(names[position]), [] if error else [(shown[c], p) for c, p in best], error)


def write_tables(stem: Path, rows: list[Row]) -> tuple[Path, Path]:
    """Write ``stem.csv`` and ``stem.jsonl``, probabilities with six decimal places; return the two paths."""
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


def _text(name: str | Path) -> str:
    """Escape bytes of a file or class name that are not text."""
    return str(name).encode(errors="surrogateescape").decode(errors="backslashreplace")


def _files(stem: Path) -> tuple[Path, Path]:
    csv_suffix, jsonl_suffix = SUFFIXES
    return stem.with_name(stem.name + csv_suffix), stem.with_name(stem.name + jsonl_suffix)


def _stem(path: str) -> Path:
    given = Path(path)
    return given.with_suffix("") if given.suffix.lower() in SUFFIXES else given
