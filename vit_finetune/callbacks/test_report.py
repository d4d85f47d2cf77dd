"""Report that ``test`` writes."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from vit_finetune.callbacks.tensorboard import tensorboard_loggers
from vit_finetune.data.datasets import Batch, ImageDataset
from vit_finetune.evaluation.metrics import PredictionCollector
from vit_finetune.formatting import free_path
from vit_finetune.module import ViTClassifier


class TestReport(Callback):
    """Print the metrics of a test; save them with charts in the run folder and in TensorBoard.

    The folder is ``test-report``, or ``test-report-1`` and so on if it already exists: ``report.html``, ``report.md``,
    ``report.json``, ``confusion.png``, ``reliability.png`` and, if there are mistakes, ``mistakes.png``. With several
    processes, it covers the images of all of them, each once.

    Args:
        command: The command that runs the test, stated in the report.
    """

    __test__ = False  # not a test class of pytest

    def __init__(self, command: str | None = None) -> None:
        self.command = command

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._collected = PredictionCollector().to(pl_module.device)

    @override
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, *_: int
    ) -> None:
        self._collected.update(**outputs)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the predictions of all processes and write the report on the first one."""
        from vit_finetune.evaluation import report_writer
        from vit_finetune.evaluation.report import Report

        assert isinstance(pl_module, ViTClassifier)
        logits, labels, index = self._collected.predictions()
        folder = Path(trainer.log_dir or ".")  # log_dir is broadcast, so all processes have to ask for it
        if not trainer.is_global_zero:
            return
        dataset: ImageDataset = trainer.test_dataloaders.dataset  # type: ignore[union-attr]
        paths = [dataset.names[i] for i in index.tolist()]
        names, temperature = pl_module.class_names or [], pl_module.temperature
        report = Report.from_logits(logits, labels, names, temperature, paths, about=self._about(trainer))
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            print(report_writer.terminal(report), flush=True)
            return
        positions = index[[mistake.index for mistake in report.mistakes]].cpu()
        images = [dataset.images_at(position[None])[0] for position in positions]
        folder = free_path(folder / "test-report")
        charts = report_writer.save(report, folder, images)
        for logger in trainer.loggers:
            logger.log_metrics(report.scalars(), trainer.global_step)
        for logger in tensorboard_loggers(trainer):
            for name, figure in charts.items():
                logger.experiment.add_figure(f"test/{name}", figure, trainer.global_step)
        # Print last: if the reader of a pipe has exited, the files are complete.
        print(f"{report_writer.terminal(report)}\nreport  {folder}", flush=True)

    def _about(self, trainer: Trainer) -> dict[str, str]:
        about = {"command": self.command} if self.command else {}
        about |= {"checkpoint": str(trainer.ckpt_path or "none"), "precision": str(trainer.precision)}
        data = getattr(trainer, "datamodule", None)
        if data is not None:
            place = getattr(data, "root", None) or getattr(data, "title", None)
            about["data"] = f"{type(data).__name__}, {place}" if place else type(data).__name__
        return about
