"""Test images as points in TensorBoard's embedding projector."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.functional import interpolate
from typing_extensions import override

from vit_finetune.callbacks.tensorboard import tensorboard_loggers
from vit_finetune.errors import require
from vit_finetune.evaluation.metrics import PredictionCollector
from vit_finetune.formatting import free_path, one_line


class Projector(Callback):
    """Show test images in TensorBoard's tab PROJECTOR: the inputs of the head, reduced to 50 principal components.

    Args:
        images: Number of test images, evenly spaced over the test set, at most 2000; 0 for none. 500 take about 1 MB.
    """

    def __init__(self, images: int = 0) -> None:
        self.images = images
        require("--projector.images", images, 0, 2000)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from vit_finetune.model import vit

        net: Any = pl_module.net
        self._features: list[torch.Tensor] = []
        self._collected, head = PredictionCollector().to(pl_module.device), net.get_submodule(vit.head_names(net)[0])
        self._hook = head.register_forward_pre_hook(lambda module, args: self._features.append(args[0]))

    @override
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: object
    ) -> None:
        features = self._features.pop()[batch["index"] >= 0].float()  # without padding samples
        self._collected.update(torch.cat([features, outputs["logits"]], 1), outputs["labels"], outputs["index"])

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hook.remove()
        columns, labels, index = (values.cpu() for values in self._collected.predictions())
        if not trainer.is_global_zero:
            return
        rows = torch.linspace(0, len(index) - 1, min(self.images, len(index))).round().long()
        names, step, loader = pl_module.hparams["class_names"], trainer.global_step, trainer.test_dataloaders
        index, dataset = index[rows], loader.dataset  # type: ignore[union-attr]
        features, logits = columns[rows].tensor_split([-len(names)], 1)
        each = zip(labels[rows], logits.argmax(1), index, strict=True)
        texts = [[one_line(text) for text in (names[t], names[p], dataset.names[i])] for t, p, i in each]
        left, singular, _ = torch.linalg.svd(features - features.mean(0), full_matrices=False)
        points, header = (left * singular)[:, :50], ["true", "predicted", "path"]
        images = interpolate(dataset.images_at(index), (32, 32), mode="bilinear", antialias=True) / 255
        for logger in tensorboard_loggers(trainer):
            tag = free_path(Path(logger.log_dir) / f"{step:05d}" / "test").name  # keep the points of an earlier test
            logger.experiment.add_embedding(points, texts, images, step, tag, header)
