"""The commands: each is a method of the Trainer, whose docstring is the help of the command."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from vit_finetune import environment
from vit_finetune.cli import preflight, run_dir
from vit_finetune.data import ImageDataModule
from vit_finetune.formatting import free_path
from vit_finetune.model import memory
from vit_finetune.module import ViTClassifier


def extra_commands() -> list[str]:
    """Return the commands beyond those of Lightning; ``export`` only if its package has not been deleted."""
    export = ["export"] if find_spec("vit_finetune.export") else []
    return ["doctor", *export, "check-data", "tune"]


class ViTTrainer(run_dir.RunTrainer):
    """Lightning's Trainer, with all commands of this command line."""

    @override
    def fit(
        self,
        model: LightningModule,
        train_dataloaders: object = None,
        val_dataloaders: object = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = True,
    ) -> None:
        """Train a model and validate it after each epoch.

        Args:
            model: The model to train.
            train_dataloaders: Training data, without a datamodule.
            val_dataloaders: Validation data, without a datamodule.
            datamodule: The data.
            ckpt_path: Checkpoint to resume from: a file; best or last of the newest run; or restart, which is last if
                torchrun or SLURM restarted this job and nothing otherwise. Default: start a new run.
            weights_only: Load the checkpoint with torch.load(weights_only=True), which cannot run code.
        """
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)

    @override
    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: object = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = True,
    ) -> Any:
        """Evaluate a trained model on the validation split.

        Args:
            model: The model to evaluate.
            dataloaders: Validation data, without a datamodule.
            ckpt_path: The checkpoint: a file, or best or last of the newest run.
            verbose: Print the metrics.
            datamodule: The data.
            weights_only: Load the checkpoint with torch.load(weights_only=True), which cannot run code.
        """
        return super().validate(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    @override
    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: object = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = False,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = True,
    ) -> Any:
        """Evaluate a trained model on the test split and write a report.

        Args:
            model: The model to evaluate.
            dataloaders: Test data, without a datamodule.
            ckpt_path: The checkpoint: a file, or best or last of the newest run.
            verbose: Print Lightning's table of metrics besides the report.
            datamodule: The data.
            weights_only: Load the checkpoint with torch.load(weights_only=True), which cannot run code.
        """
        return super().test(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    @override
    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: object = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = False,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = True,
    ) -> Any:
        """Write the predictions of a trained model for each image to a CSV file.

        Args:
            model: The model.
            dataloaders: Images, without a datamodule.
            datamodule: The images.
            return_predictions: Return the predictions too, for use from Python.
            ckpt_path: The checkpoint: a file, or best or last of the newest run.
            weights_only: Load the checkpoint with torch.load(weights_only=True), which cannot run code.
        """
        return super().predict(model, dataloaders, datamodule, return_predictions, ckpt_path, weights_only)

    def doctor(self, model: ViTClassifier, datamodule: ImageDataModule, ckpt_path: str | None = None) -> None:
        """Describe this machine and check whether fit could run with these options.

        Args:
            model: The model that would be trained.
            datamodule: The data.
            ckpt_path: Checkpoint to resume from.
        """
        if not self.is_global_zero:
            return
        print(environment.describe(), flush=True)
        preflight.check_fit(self, model, datamodule, Path(ckpt_path) if ckpt_path else None)
        names = model.class_names or datamodule.class_names or range(10)  # a folder's classes are not known yet
        forecast = memory.of_fit(self, model.config, len(names), datamodule.batch_size)
        print(f"{'memory':13s} forecast per device: {forecast}")
        print("fit        no problems found", flush=True)

    def export(
        self,
        model: ViTClassifier,
        datamodule: ImageDataModule,
        ckpt_path: str | None = None,
        format: Literal["onnx", "torch_export", "timm"] = "onnx",
        output: str | None = None,
        benchmark: bool = False,
        batch_sizes: tuple[int, ...] = (1, 32),
    ) -> None:
        """Export a trained model to ONNX, torch.export or timm, with a model card.

        The exported model takes batches of uint8 images of the training size and returns calibrated probabilities;
        preprocessing, temperature and class names are included. The export is verified on every validation image
        in float32 on the CPU: it is kept only if it predicts the same class as the checkpoint, with probabilities
        that differ by less than 1e-4.

        Args:
            model: The trained model.
            datamodule: The data whose validation images are compared.
            ckpt_path: The checkpoint: a file, or best or last of the newest run.
            format: onnx for ONNX Runtime and others; torch_export for torch.export.load; timm for timm.create_model
                (only the network; preprocessing, temperature and class names are in its config.json).
            output: Folder to create. Default: export/ in the run folder, named after checkpoint and format.
            benchmark: Measure latency and throughput on this machine too, of the checkpoint and of the export. The
                checkpoint is compiled if there is a C++ compiler.
            batch_sizes: Batch sizes of the benchmark.
        """
        from vit_finetune.export.export import export

        assert ckpt_path is not None
        sizes = batch_sizes if benchmark else ()
        if self.is_global_zero:
            export(model, datamodule, Path(ckpt_path), format, Path(output) if output else None, sizes)

    def check_data(
        self,
        model: ViTClassifier,
        datamodule: ImageDataModule,
        ckpt_path: str | None = None,
        output: str | None = None,
    ) -> None:
        """Check a dataset for broken images, duplicates and other problems.

        Every image is decoded once. Problems stop a training or falsify its metrics: unreadable files, unknown
        classes, classes without images, and duplicates across splits or classes, or in data that is split at random.
        Notes may matter: files that are skipped, very small, elongated or large images, other duplicates, imbalanced
        classes. Two images are duplicates if all their pixels are equal. The exit code is 1 if there are problems,
        otherwise 0.

        Args:
            model: With a checkpoint, its classes are those that the images must have.
            datamodule: The images.
            ckpt_path: Trained model that the data is meant for.
            output: Folder to create for report.json and contact-sheet.png. Default: runs/check-data, with a number if
                it already exists.
        """
        from vit_finetune.cli import check_data, check_data_report

        if not self.is_global_zero:
            return
        folder = Path(output) if output else free_path(Path(self.default_root_dir) / "check-data")
        if folder.exists():
            raise MisconfigurationException(f"--output {folder} already exists. Choose another folder.")
        found = check_data.check(datamodule, model.class_names)
        print(check_data_report.terminal(found), flush=True)
        check_data_report.save(found, folder)
        print(f"\nproblems {found.problems}, notes {len(found.findings) - found.problems}; see {folder}", flush=True)
        if found.problems:
            raise SystemExit(1)

    def tune(
        self,
        model: ViTClassifier,
        datamodule: ImageDataModule,
        ckpt_path: str | None = None,
        what: Literal["lr", "batch_size"] = "lr",
        low: float = 1e-6,
        high: float = 1e-1,
        steps: int = 100,
        largest: int = 1024,
    ) -> None:
        """Find a learning rate or a batch size in short trial runs.

        The result is printed as an option to paste; the weights are discarded. The learning rate range test raises the
        learning rate at every step, plots the loss to lr.png in the folder of runs, and suggests a tenth of the
        learning rate with the lowest loss. The batch size is doubled until it no longer fits into GPU memory; on a
        CPU, set --largest.

        Args:
            model: The model to train.
            datamodule: The data.
            ckpt_path: Not supported: trials start like a new run, for example from --model.weights.
            what: Find lr or batch_size.
            low: Smallest learning rate to try.
            high: Largest learning rate to try.
            steps: Number of optimizer steps from low to high.
            largest: Largest batch size to try, a power of two.
        """
        from vit_finetune.cli import tune

        if ckpt_path:
            raise MisconfigurationException("tune starts a new run: use --model.weights instead of --ckpt_path.")
        if self.is_global_zero:
            preflight.check_fit(self, model, datamodule, None)
        if what == "batch_size":
            size = tune.find_batch_size(self, model, datamodule, largest)
            rank_zero_only(print)(f"--data.batch_size {size}", flush=True)
            return
        plot = free_path(Path(self.default_root_dir) / "lr.png")
        lr = tune.find_lr(self, model, datamodule, tune.LRRangeTest(low, high, steps), plot)
        rank_zero_only(print)(f"--model.lr {lr:.1e}    (plot: {plot})", flush=True)


# LightningCLI finds the method of a command by the command's name, which contains a hyphen.
setattr(ViTTrainer, "check-data", ViTTrainer.check_data)
