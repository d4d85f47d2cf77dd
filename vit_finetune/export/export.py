"""The order of an export: write the file, verify it against the checkpoint, and only then give it its final name."""

import os
import shlex
import tempfile
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

import vit_finetune
from vit_finetune.checkpoint import public_items, run_folder
from vit_finetune.data import ImageDataModule
from vit_finetune.errors import ExportMismatchError, require
from vit_finetune.export import latency, model_card, verify
from vit_finetune.export.formats import FORMATS, InferenceFn, ModelMetadata
from vit_finetune.module import ViTClassifier


def export(
    configured: ViTClassifier,
    data: ImageDataModule,
    checkpoint: Path,
    format: str,
    output: Path | None,
    batch_sizes: tuple[int, ...],
) -> Path:
    """Export a checkpoint to a new folder: the model file and a model card, ``README.md``.

    Args:
        configured: The model with its options, without weights.
        data: Provides the validation images.
        checkpoint: The weights.
        format: A key of :data:`vit_finetune.export.formats.FORMATS`.
        output: Folder to create; defaults to ``export/<checkpoint>-<format>`` in the run folder.
        batch_sizes: Batch sizes to measure the speed with; empty to measure nothing.

    Returns:
        The folder.

    Raises:
        MisconfigurationException: A package or the validation images are missing, or the folder already exists.
        ExportMismatchError: The predictions of the file differ from those of the checkpoint; the file is deleted.
    """
    run = run_folder(checkpoint) or checkpoint.parent
    target = Path(os.path.relpath(output or run / "export" / f"{checkpoint.stem}-{format}"))
    _check(format, target, data, batch_sizes)
    model = load(checkpoint, configured)
    data.input_size, data.known_classes, data.crop_pct = model.input_size, model.class_names, model.crop_pct
    probabilities, labels = verify.reference(model, data)
    model.merge_lora()
    model.eval().requires_grad_(False)
    images = data.datasets["val"].images_at(torch.arange(min(32, len(labels))))
    metadata = build_metadata(model, tuple(images.shape[1:]), data.eval_crop)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unverified-", dir=target.parent) as parent:
        folder = Path(parent) / target.name
        folder.mkdir()
        FORMATS[format].write(model, metadata, folder)
        infer = FORMATS[format].load(folder)
        verified = verify.compare(probabilities, labels, infer, data.val_dataloader())
        print(verified, flush=True)
        if not verified.passed:
            raise ExportMismatchError(f"The predictions of the {format} file differ from those of {checkpoint}.")
        speed = _measure(model, format, infer, images, batch_sizes)
        card = model_card.CardInputs(model, data, checkpoint, format, metadata, verified, speed)
        (folder / "README.md").write_text(model_card.write(card), encoding="utf-8", errors="backslashreplace")
        folder.rename(target)  # fails if another process has created the folder in the meantime
    print(f"exported    {target / FORMATS[format].file}\nmodel card  {target / 'README.md'}", flush=True)
    return target


def _check(format: str, target: Path, data: ImageDataModule, batch_sizes: tuple[int, ...]) -> None:
    """Raise a readable error for everything that would make the export fail later."""
    if missing := FORMATS[format].missing_packages():
        raise MisconfigurationException(
            f"--format {format} needs {', '.join(missing)}: pip install {shlex.quote('vit_finetune[export]')}"
        )
    if target.exists():
        raise MisconfigurationException(f"{target} already exists; remove it, or set another folder with --output.")
    for size in batch_sizes:
        require("--batch_sizes", size, 1)
    if reason := data.unavailable_reason():
        raise MisconfigurationException(
            f"export verifies the file on the validation images. {reason} Set that option to where the images are on "
            "this machine."
        )


def load(checkpoint: Path, configured: ViTClassifier) -> ViTClassifier:
    """Load the weights in float32 into the configured model, without options that a file cannot have."""
    if configured.hparams["tta"] is not None:
        rank_zero_warn(
            f"The file classifies each image once, without --model.tta {configured.hparams['tta']}. A temperature that "
            "was fitted with it is kept."
        )
    options = public_items(configured.hparams) | {"compile": False, "grad_checkpointing": False, "tta": None}
    return type(configured).from_checkpoint(checkpoint, **options)


def build_metadata(
    model: ViTClassifier, image_shape: tuple[int, ...], eval_crop: tuple[str, float] = ("crop", 1.0)
) -> ModelMetadata:
    """Describe the model in plain values.

    Args:
        model: With its weights.
        image_shape: Channels, height and width of the images that the file takes.
        eval_crop: See :attr:`vit_finetune.data.ImageDataModule.eval_crop`.
    """
    names, preprocessing = model.class_names or [], model.preprocessing
    return {
        "class_names": names,
        "temperature": model.temperature,
        "preprocessing": {
            "size": list(preprocessing["size"]),
            "mean": list(preprocessing["mean"]),
            "std": list(preprocessing["std"]),
            "interpolation": preprocessing["interpolation"],
            "resize": eval_crop[0],
            "crop_pct": eval_crop[1],
        },
        "input": {"name": "images", "dtype": "uint8", "shape": ["batch", *image_shape], "channels": "RGB"},
        "output": {"name": "probabilities", "dtype": "float32", "shape": ["batch", len(names)]},
        "architecture": model.config.name,
        "vit_finetune": vit_finetune.__version__,
    }


def _measure(
    model: ViTClassifier, format: str, infer: InferenceFn, images: Tensor, batch_sizes: tuple[int, ...]
) -> str:
    if not batch_sizes:
        return ""
    speed = latency.measure(latency.variants(model) | {format: infer}, images, batch_sizes)
    print(speed, flush=True)
    return speed
