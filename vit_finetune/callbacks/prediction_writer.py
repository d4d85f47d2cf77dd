"""Tables of predictions that ``predict`` writes."""

import os
import time
from itertools import repeat
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from typing_extensions import override

from vit_finetune.callbacks.prediction_tables import (
    SUFFIXES,
    PredictionTables,
    free_partial,
    merge_into,
    table_files,
)
from vit_finetune.data.datasets import Batch
from vit_finetune.errors import require
from vit_finetune.formatting import free_path
from vit_finetune.module import ViTClassifier


class PredictionWriter(BasePredictionWriter):
    """Write predictions as CSV and as JSON lines: one row per image, in the order of the data.

    The CSV has the columns ``path``, ``class``, ``probability``, then ``class_2``, ``probability_2`` and so on, and
    ``error``, the reason why a file cannot be read. The JSON lines have the keys ``path``, ``class``, ``probability``,
    ``top`` and ``error``. Both files are UTF-8; bytes of file names that are not text are escaped.

    Each batch is on disk as soon as it is finished. Until the end, the files are called ``predictions.partial.csv`` and
    ``predictions.partial.jsonl``; an interrupted run leaves them behind, and no later run changes them. With several
    processes, each writes files of its own, ``predictions.partial.rank0.csv`` and so on, which are merged at the end.

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
        if self.stem and (existing := [str(file) for file in table_files(self.stem) if file.exists()]):
            raise MisconfigurationException(
                f"--predictions.path {path}: {' and '.join(existing)} already exists; give another name."
            )
        self._tables: PredictionTables | None = None

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the files, so that a folder that cannot be written to is an error before the first image."""
        assert isinstance(pl_module, ViTClassifier)
        assert pl_module.class_names is not None
        self._classes = [_text(name) for name in pl_module.class_names]
        self._columns = min(self.top_k, len(self._classes))
        self._start = time.perf_counter()
        self._stem = self.stem or Path(trainer.log_dir or ".") / "predictions"  # log_dir is broadcast
        self._partial = self._stem
        if trainer.is_global_zero:
            self._partial, interrupted, rows = free_partial(self._stem)
            if interrupted:
                names = ", ".join(map(_text, interrupted))
                print(f"{names} with {rows} rows of an interrupted run is there and stays as it is", flush=True)
        self._partial = trainer.strategy.broadcast(self._partial)
        several = trainer.world_size > 1
        stem = self._part(trainer.global_rank) if several else self._partial
        self._tables = PredictionTables(stem, self._classes, self._columns, with_position=several)

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
        """Write the most probable classes of the batch's images."""
        assert self._tables is not None
        loader: Any = trainer.predict_dataloaders
        top = prediction["probability"].topk(self._columns)
        columns = prediction["index"].tolist(), top.indices.tolist(), top.values.tolist()
        for position, label, probability, error in zip(*columns, batch.get("error", repeat(None)), strict=False):
            if position >= 0:  # otherwise a padding sample
                self._tables.add(position, _text(loader.dataset.names[position]), label, probability, error)
        self._tables.flush()
        if seen := getattr(loader.batch_sampler, "seen_batch_indices", None):
            seen[batch_idx] = ()  # Lightning keeps the positions of all batches until the end

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._tables is None:
            return
        self._tables.close()
        if not self._tables.rows:  # nothing that would be worth keeping
            for file in self._tables.files:
                file.unlink()
        self._tables = None

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge the files of all processes and give them their final name."""
        assert self._tables is not None
        tables, self._tables = self._tables, None
        tables.close()
        seconds = time.perf_counter() - self._start
        trainer.strategy.barrier("predictions of all processes are complete")
        if not trainer.is_global_zero:
            return
        parts = [self._part(rank) for rank in range(trainer.world_size)] if trainer.world_size > 1 else []
        if parts:
            tables = PredictionTables(self._partial, self._classes, self._columns)
            merge_into(tables, parts)
            tables.close()
        final = table_files(free_path(self._stem, SUFFIXES))  # free unless another run has just taken it
        for source, target in zip(tables.files, final, strict=True):
            os.replace(source, target)
        for file in (file for part in parts for file in table_files(part)):
            file.unlink()
        unreadable = f", {tables.unreadable} of them unreadable" if tables.unreadable else ""
        speed = f"{tables.rows / seconds:.0f} images/s"
        print(f"predictions  {tables.rows} images{unreadable}  {speed}  {'  '.join(map(_text, final))}", flush=True)

    def _part(self, rank: int) -> Path:
        return self._partial.with_name(f"{self._partial.name}.rank{rank}")


def _text(name: str | Path) -> str:
    """Escape bytes of a file or class name that are not text."""
    return str(name).encode(errors="surrogateescape").decode(errors="backslashreplace")


def _stem(path: str) -> Path:
    given = Path(path)
    return given.with_suffix("") if given.suffix.lower() in SUFFIXES else given
