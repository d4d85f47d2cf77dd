"""The commands beyond those of Lightning's Trainer: each is a method, whose docstring is the command's help."""

from pathlib import Path
from typing import Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from vit_finetune.data import ImageDataModule
from vit_finetune.formatting import free_path
from vit_finetune.module import ViTClassifier

EXTRA_COMMANDS = ("doctor", "export", "check-data", "tune")


class ViTTrainer(Trainer):
    """Lightning's Trainer with more commands."""

    def doctor(self, model: ViTClassifier, datamodule: ImageDataModule, ckpt_path: str | None = None) -> None:
        """Print the machine and check a fit with these options without starting it.

        Args:
            model: The model that would be trained.
            datamodule: The data that it would be trained on.
            ckpt_path: The checkpoint that training would go on from.
        """

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
        """Write a trained model as a file for other programs, with a model card.

        The file takes uint8 images of the size that was trained on, any number at once, and returns calibrated
        probabilities; preprocessing, temperature and class names are inside. It is kept only if, for every validation
        image, it gives the class that the checkpoint gives, and probabilities within 1e-4. All of this runs in
        float32 on the CPU.

        Args:
            model: The model that was trained.
            datamodule: The data whose validation images are compared.
            ckpt_path: What to export: best or last of the newest run, or a file.
            format: onnx for onnxruntime and others; torch_export for torch.export.load; timm for timm.create_model,
                the bare network with the rest in its config.json.
            output: Folder to make. By default in the run's folder export, named after checkpoint and format.
            benchmark: Measure speed on this machine too: the checkpoint, compiled where there is a C++ compiler, and
                the file.
            batch_sizes: Images at once in the benchmark.
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
        """List what is wrong with the images, count them, and draw some of each class.

        Every image is decoded once. Problems are what a training refuses, or what makes its figures wrong: files that
        cannot be read, unknown classes, classes without images, equal images in several splits or classes, or where
        a random split can tear them apart. Notes are worth a look: images that are left out, tiny, long or huge,
        other copies, uneven classes. The exit code is 1 if
        there are problems, else 0. Images are equal if all their pixels are.

        Args:
            model: Tells the classes that the images must have, where a checkpoint is given.
            datamodule: The images.
            ckpt_path: A trained model that the data is meant for.
            output: Folder to make for report.json and contact-sheet.png. By default runs/check-data, with a number
                where that is taken.
        """
        from vit_finetune.cli import check_data, check_data_report

        if not self.is_global_zero:
            return
        folder = Path(output) if output else free_path(Path(self.default_root_dir) / "check-data")
        if folder.exists():
            raise MisconfigurationException(f"--output {folder} is there already; give a folder that is not.")
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
        """Find a learning rate or a batch size by short trials, and print the option to paste.

        The weights of the trials are thrown away. For the rate, one run raises it at every step; the loss is drawn
        into lr.png in the folder of runs, and a tenth of the rate where it is least is suggested. For the batch size,
        batches are doubled until they do not fit into the memory of a GPU any more; on a CPU set --largest.

        Args:
            model: The model that would be trained.
            datamodule: The data that it would be trained on.
            ckpt_path: Refused: trials start as a fresh fit does, from --model.weights for example.
            what: What to look for, lr or batch_size.
            low: Smallest learning rate to try.
            high: Largest learning rate to try.
            steps: Optimizer steps from low to high.
            largest: Largest batch size to try, a power of two.
        """
        from vit_finetune.cli import tune

        if what == "batch_size":
            size = tune.find_batch_size(self, model, datamodule, largest)
            rank_zero_only(print)(f"--data.batch_size {size}", flush=True)
            return
        image = free_path(Path(self.default_root_dir) / "lr.png")
        rate = tune.find_lr(self, model, datamodule, tune.LRRangeTest(low, high, steps), image)
        rank_zero_only(print)(f"--model.lr {rate:.1e}    (drawn in {image})", flush=True)


setattr(ViTTrainer, "check-data", ViTTrainer.check_data)  # commands are found by their name, which has a hyphen
