"""What ``export`` does: write a file, compare it with the checkpoint, and only then give it its name."""

import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

import vit_finetune
from vit_finetune.checkpoint import run_folder
from vit_finetune.data import ImageDataModule
from vit_finetune.errors import ExportMismatchError
from vit_finetune.export import model_card, verify
from vit_finetune.export.formats import FORMATS, Format, ModelMetadata
from vit_finetune.module import ViTClassifier


def export(
    configured: ViTClassifier,
    data: ImageDataModule,
    checkpoint: Path,
    name: str,
    output: Path | None,
    batch_sizes: tuple[int, ...],
) -> Path:
    """Exports a checkpoint into a folder of its own: the model file and a model card, ``README.md``.

    Args:
        configured: The model as the options describe it, without weights.
        data: Where the validation images come from.
        checkpoint: The weights.
        name: One of :data:`vit_finetune.export.formats.FORMATS`.
        output: The folder to make; by default in the run's folder ``export``, named after checkpoint and format.
        batch_sizes: Measure speed with these; empty for not at all.

    Returns:
        The folder.

    Raises:
        MisconfigurationException: A package or the validation images are missing, or the folder is there already.
        ExportMismatchError: The file's answers are not those of the checkpoint; nothing is left behind.
    """
    chosen = FORMATS[name]
    run = run_folder(checkpoint) or checkpoint.parent
    target = Path(os.path.relpath(output or run / "export" / f"{checkpoint.stem}-{name}"))
    _refuse(chosen, name, target, data, batch_sizes)
    model = load(checkpoint, configured)
    probabilities, labels = verify.reference(model, data)
    model.merge_lora()
    model.eval().requires_grad_(False)
    val = data.datasets["val"]
    images = val.images_at(torch.arange(min(32, len(val))))
    metadata = describe(model, tuple(images.shape[1:]))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unchecked-", dir=target.parent) as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        chosen.write(model, metadata, folder)
        infer = chosen.load(folder)
        verified = verify.compare(probabilities, labels, infer, data.val_dataloader())
        print(verified, flush=True)
        if not verified.holds:
            raise ExportMismatchError(f"The {name} file does not answer as {checkpoint} does; it was not kept.")
        speed = _measure(model, name, infer, images, batch_sizes)
        facts = model_card.CardInputs(model, data, checkpoint, name, chosen.file, metadata, verified, speed)
        (folder / "README.md").write_text(model_card.write(facts), encoding="utf-8", errors="backslashreplace")
        folder.rename(target)  # fails, and so keeps what is there, where another program was faster
    print(f"exported    {target / chosen.file}\nmodel card  {target / 'README.md'}", flush=True)
    return target


def _refuse(chosen: Format, name: str, target: Path, data: ImageDataModule, batch_sizes: tuple[int, ...]) -> None:
    """Says what stands in the way before any work is done."""
    if missing := chosen.missing():
        raise MisconfigurationException(
            f"--format {name} needs {', '.join(missing)}: pip install {shlex.quote('vit_finetune[export]')}"
        )
    if target.exists():
        raise MisconfigurationException(f"{target} is there already; remove it or name another folder with --output.")
    if min(batch_sizes, default=1) < 1:
        raise MisconfigurationException(f"--batch_sizes {list(batch_sizes)}: each must be at least 1.")
    if problem := data.missing():
        raise MisconfigurationException(
            f"export compares the file with the checkpoint on the validation images. {problem} Name the folder that "
            "has them here with --data.root."
        )


def load(checkpoint: Path, configured: ViTClassifier) -> ViTClassifier:
    """Loads the weights in float32 into the model that the options describe, without what only training needs."""
    options = {key: value for key, value in configured.hparams.items() if not key.startswith("_")}
    options |= {"compile": False, "grad_checkpointing": False}
    return type(configured).load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True, **options)


def describe(model: ViTClassifier, shape: tuple[int, ...]) -> ModelMetadata:
    """What the file promises, in plain values.

    Args:
        model: With its weights.
        shape: Channels, height and width of the stored images.
    """
    preprocessing: dict[str, Any] = model.preprocessing
    return {
        "class_names": model.class_names,
        "temperature": model.temperature,
        "preprocessing": {key: list(v) if isinstance(v, tuple) else v for key, v in preprocessing.items()},
        "input": {"name": "images", "dtype": "uint8", "shape": ["batch", *shape], "channels": "RGB"},
        "output": {"name": "probabilities", "dtype": "float32", "shape": ["batch", len(model.class_names or ())]},
        "architecture": model.hparams["name"],
        "vit_finetune": vit_finetune.__version__,
    }


def _measure(model: ViTClassifier, name: str, run: Any, images: Any, batch_sizes: tuple[int, ...]) -> str:
    if not batch_sizes:
        return ""
    from vit_finetune.export import latency

    speed = latency.measure(latency.variants(model) | {name: run}, images, batch_sizes)
    print(speed, flush=True)
    return speed
