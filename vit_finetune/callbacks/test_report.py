"""The report that ``test`` leaves behind."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from vit_finetune.data.datasets import Batch, ImageDataset
from vit_finetune.evaluation.metrics import PredictionCollector
from vit_finetune.formatting import free_path


class TestReport(Callback):
    """Prints the figures of a test and saves them, with charts, in the run's folder and in TensorBoard.

    The folder is ``test-report``: ``report.json``, ``report.md``, ``confusion.png``, ``reliability.png`` and, if there
    are mistakes, ``mistakes.png``. An older report is kept; the new one then gets a number. On several processes it is
    the report of all images, each counted once.
    """

    __test__ = False  # the name is no test's

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts with no answers."""
        self._outputs = PredictionCollector().to(pl_module.device)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps logits, labels and positions."""
        self._outputs.update(**outputs)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers the answers of all processes; the first one writes."""
        from vit_finetune.evaluation.report import Report
        from vit_finetune.evaluation.report_writer import terminal

        logits, labels, index = self._outputs.compute()
        folder = Path(trainer.log_dir or ".")  # asks all processes, so outside the condition
        if not trainer.is_global_zero:
            return
        dataset: ImageDataset = trainer.test_dataloaders.dataset  # type: ignore[union-attr]
        report = Report.from_logits(
            logits,
            labels,
            pl_module.class_names,  # type: ignore[arg-type]
            pl_module.temperature,  # type: ignore[arg-type]
            paths=[dataset.names[i] for i in index.tolist()],
            about=_about(trainer),
        )
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            print(terminal(report), flush=True)
            return
        worst = index[[mistake.index for mistake in report.mistakes]].cpu()
        images = [dataset.images_at(position[None])[0] for position in worst]
        folder = free_path(folder / "test-report")
        charts = report.save(folder, images)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_metrics(report.scalars(), trainer.global_step)
                for name, figure in charts.items():
                    logger.experiment.add_figure(f"test/{name}", figure, trainer.global_step)
        # Last: where the reader of a pipe has gone, the files are there.
        print(f"{terminal(report)}\nreport  {folder}", flush=True)


def _about(trainer: Trainer) -> dict[str, str]:
    data: Any = getattr(trainer, "datamodule", None)
    about = {"checkpoint": str(trainer.ckpt_path or "none"), "precision": str(trainer.precision)}
    if data is not None:
        root = f", {data.root}" if hasattr(data, "root") else ""
        about["data"] = f"{type(data).__name__}{root}"
    return about
