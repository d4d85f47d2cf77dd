"""The table that ``predict`` leaves behind."""

import csv
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from vit_finetune.data.pictures import Batch

Row = tuple[int, list[float]]


class PredictionWriter(Callback):
    """Writes ``predictions.csv`` into the run's folder: path, class, probability, and the probability of every class.

    Each picture has one row, in the order of the data, on any number of processes. An older table is kept; the new one
    then gets a number.
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts with an empty table."""
        self._rows = []

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps the batch's results as plain numbers."""
        self._rows += zip(outputs["index"].tolist(), outputs["probability"].tolist(), strict=True)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers the rows of all processes and writes them in order."""
        rows = self._rows
        if trainer.world_size > 1:
            parts: list[list[Row]] = [[] for _ in range(trainer.world_size)]
            dist.all_gather_object(parts, rows)
            rows = [row for part in parts for row in part]
        folder = Path(trainer.log_dir or ".")  # asks all processes, so outside the condition
        if trainer.is_global_zero:
            unique = {index: probability for index, probability in rows if index >= 0}
            names = trainer.datamodule.sets["predict"].names  # type: ignore[attr-defined]
            path = write_table(_free_name(folder), names, pl_module.class_names or [], unique)  # type: ignore[arg-type]
            print(f"predictions  {len(unique)} pictures  {path}", flush=True)


def write_table(path: Path, names: list[str], classes: list[str], rows: dict[int, list[float]]) -> Path:
    """Writes the table as UTF-8; bytes in a file name that are no text are written as escapes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "class", "probability", *(f"p({name})" for name in classes)])
        for index, probabilities in sorted(rows.items()):
            top = max(range(len(classes)), key=probabilities.__getitem__)
            numbers = [f"{p:.6f}" for p in (probabilities[top], *probabilities)]
            writer.writerow([names[index], classes[top], *numbers])
    return path


def _free_name(folder: Path) -> Path:
    path, number = folder / "predictions.csv", 0
    while path.exists():
        number += 1
        path = folder / f"predictions-{number}.csv"
    return path
