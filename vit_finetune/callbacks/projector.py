"""The test images as points: TensorBoard's embedding projector."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from vit_finetune.data.datasets import Batch
from vit_finetune.evaluation.metrics import PredictionCollector
from vit_finetune.formatting import one_line

MOST_IMAGES = 2000
SIDE = 32  # pixels of an image in the projector
COMPONENTS = 50  # principal components that are kept: the file stays small and what tells classes apart is among them


class Projector(Callback):
    """With ``test``: what the network knows of the images, as points that lie close where it sees them alike.

    The points are the input of the head, reduced to their 50 principal components, with thumbnails, true and predicted
    classes and paths. Tab PROJECTOR of TensorBoard turns them around and runs PCA, t-SNE and UMAP on them.

    Args:
        images: Show up to so many test images, evenly chosen, at most 2000; 0 for none. 500 take about 1 MB.
    """

    def __init__(self, images: int = 0) -> None:
        if not 0 <= images <= MOST_IMAGES:
            raise MisconfigurationException(f"--projector.images is {images}; it must be between 0 and {MOST_IMAGES}.")
        self.images = images

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts to listen at the head."""
        from vit_finetune.model import vit

        net: Any = pl_module.net
        self._seen: list[Tensor] = []
        self._outputs = PredictionCollector().to(pl_module.device)
        head = net.get_submodule(vit.head_names(net)[0])
        self._hook = head.register_forward_pre_hook(lambda module, args: self._seen.append(args[0]))

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps what came by, fillers left out."""
        features = self._seen.pop()[batch["index"] >= 0].float()
        self._outputs.update(torch.cat([features, outputs["logits"]], 1), outputs["labels"], outputs["index"])

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers from all processes; the first one writes beside the event file."""
        self._hook.remove()
        together, labels, index = self._outputs.compute()
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        names: Any = pl_module.class_names
        chosen = torch.linspace(0, len(index) - 1, min(self.images, len(index)), device=index.device).round().long()
        together, labels, index = (values[chosen].cpu() for values in (together, labels, index))
        features, logits = together[:, : -len(names)], together[:, -len(names) :]
        images: Any = trainer.test_dataloaders.dataset  # type: ignore[union-attr]
        rows = [
            [one_line(text).replace("\t", " ") for text in (names[label], names[guess], images.names[position])]
            for label, guess, position in zip(labels.tolist(), logits.argmax(1).tolist(), index.tolist(), strict=True)
        ]
        thumbnails = torch.stack([_thumbnail(images.images_at(position[None])) for position in index])
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_embedding(
                    principal_components(features, COMPONENTS),
                    metadata=rows,
                    label_img=thumbnails,
                    global_step=trainer.global_step,
                    tag=_free_tag(Path(logger.log_dir), trainer.global_step),
                    metadata_header=["true", "predicted", "path"],
                )


def principal_components(features: Tensor, count: int) -> Tensor:
    """Turns points so that most of their spread lies along the first axes, and keeps those.

    Args:
        features: float32, shape ``(N, D)``.
        count: Axes to keep, if there are as many.

    Returns:
        float32, shape ``(N, min(count, N, D))``: distances between points are kept but for what the other axes held.
    """
    centerd = features - features.mean(0)
    axes: Tensor = torch.linalg.svd(centerd, full_matrices=False).Vh[:count]
    return centerd @ axes.T


def _thumbnail(images: Tensor) -> Tensor:
    """Shrinks or enlarges uint8 ``(1, 3, H, W)`` to float32 ``(3, 32, 32)`` on a 0-1 scale."""
    small = torch.nn.functional.interpolate(images.float() / 255, (SIDE, SIDE), mode="bilinear", antialias=True)
    return small[0]


def _free_tag(run: Path, step: int) -> str:
    """Folder names of the projector are ``<step>/<tag>``; an older one is kept."""
    number = 0
    while (run / f"{step:05d}" / (tag := f"test-{number}" if number else "test")).exists():
        number += 1
    return tag
