"""Gradient norms, float16 underflow statistics, images and charts for TensorBoard."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from vit_finetune.data.datasets import Batch
from vit_finetune.errors import require
from vit_finetune.model.gradients import fp16_underflow_stats, total_norm
from vit_finetune.model.precision import loss_scale, uses_16_bit
from vit_finetune.model.preprocess import Preprocess
from vit_finetune.module import ViTClassifier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_IMAGES = 16
INITIAL_SCALE = 2.0**16  # of torch.amp.GradScaler
COLUMNS = 4  # images per row; the tab IMAGES shows a figure about 350 pixels wide
DPI = 90  # keeps a grid of eight noisy images below 400 kB
LAYOUT = {
    "train and val": {name: ["Multiline", [f"^train/{name}$", f"^val/{name}$"]] for name in ("loss", "acc")},
}


def tensorboard_loggers(trainer: Trainer) -> list[TensorBoardLogger]:
    """Return the TensorBoard loggers of a Trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


class TensorBoard(Callback):
    """Log gradient norms, float16 underflow statistics, sample images and charts.

    Args:
        gradient_norm: Log train/grad_norm, the norm of all gradients before clipping, every log_every_n_steps. Not
            available with FSDPStrategy (FSDP1).
        precision_every_n_steps: In 16-bit precision, log every N steps which fraction of the gradients would be zero or
            infinite in float16, without and with a loss scale (precision/): that of 16-mixed, otherwise 65536. 0 for
            never.
        images_every_n_epochs: In epochs 0, N, 2N and so on, and in the last one, show a training batch as the network
            sees it, the most confident mistakes on validation images, the confusion matrix and the reliability diagram.
            0 for never.
        images: Number of images of the batch and of mistakes to show, at most 16 each.
    """

    def __init__(
        self,
        gradient_norm: bool = True,
        precision_every_n_steps: int = 100,
        images_every_n_epochs: int = 10,
        images: int = 8,
    ) -> None:
        require("--tensorboard.precision_every_n_steps", precision_every_n_steps, 0)
        require("--tensorboard.images_every_n_epochs", images_every_n_epochs, 0)
        require("--tensorboard.images", images, 0, MOST_IMAGES)
        self.gradient_norm = gradient_norm
        self.precision_every_n_steps = precision_every_n_steps
        self.images_every_n_epochs = images_every_n_epochs
        self.images = images
        self._inputs: list[Tensor] = []
        self._predictions: tuple[Tensor, Tensor, Tensor] | None = None
        self._remove_hook: Callable[[], None] | None = None
        self._step = 0

    @override
    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in tensorboard_loggers(trainer):
            logger.experiment.add_custom_scalars(LAYOUT)

    # Numbers

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        step, every = trainer.global_step, self.precision_every_n_steps
        underflow_due = bool(every) and step % every == 0 and uses_16_bit(trainer)
        logging_due = _logging_due(trainer)
        if not trainer.loggers or not (underflow_due or logging_due):
            return
        scale = loss_scale(trainer)
        # Private: with it, GradScaler leaves gradients scaled and the (fused) optimizer divides by the scale itself.
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        held = scale if scale and fused else 1.0
        # FSDP1 gives each process a flat piece of the gradients, without its place in the whole.
        complete = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy))
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        values: dict[str, float] = {}
        if logging_due:
            values |= _lowest_lr(optimizer) | ({} if scale is None else _loss_scaling(optimizer, scale, step))
            if complete and self.gradient_norm and gradients:
                values["train/grad_norm"] = float(total_norm(gradients)) / held
        if underflow_due and complete and gradients:
            names = ("zero_in_fp16", "zero_in_fp16_scaled", "inf_in_fp16_scaled")
            fractions = fp16_underflow_stats(gradients, held, scale or INITIAL_SCALE).tolist()
            values |= {f"precision/{name}": fraction for name, fraction in zip(names, fractions, strict=True)}
        for logger in trainer.loggers if values else []:
            logger.log_metrics(values, step)

    # Images

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 0 and trainer.is_global_zero and self._images_due(trainer):
            assert isinstance(pl_module, ViTClassifier)
            self._step = trainer.global_step  # with accumulation, that of the step which this batch is a part of
            self._remove_hook = pl_module.preprocess.register_forward_hook(self._keep_inputs).remove

    def _keep_inputs(self, module: nn.Module, args: object, output: Tensor) -> None:
        self._inputs.append(output[: self.images].detach())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        if self._remove_hook is None:
            return
        from vit_finetune.evaluation import plots

        assert isinstance(pl_module, ViTClassifier)
        self._remove_hook()
        self._remove_hook = None
        images, names = denormalize(self._inputs.pop(), pl_module.preprocess), pl_module.class_names or []
        captions = [names[label] for label in batch["label"][: len(images)].tolist()]
        _show(trainer, "train/batch", plots.image_grid(images, captions, COLUMNS), self._step)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.is_last_batch and self._images_due(trainer):
            assert isinstance(pl_module, ViTClassifier)
            self._predictions = pl_module.val_predictions.predictions()  # gathers, so all processes have to call it

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        predictions, self._predictions = self._predictions, None
        if predictions is None or not trainer.is_global_zero:
            return
        from vit_finetune.evaluation import report_writer
        from vit_finetune.evaluation.report import Report

        assert isinstance(pl_module, ViTClassifier)
        logits, labels, index = predictions
        loader: Any = trainer.val_dataloaders
        paths = [loader.dataset.names[i] for i in index.tolist()]
        report = Report.from_logits(logits, labels, pl_module.class_names or [], pl_module.temperature, paths)
        report = replace(report, mistakes=report.mistakes[: self.images])
        images = [loader.dataset.images_at(index[[mistake.index]].cpu())[0] for mistake in report.mistakes]
        for name, figure in report_writer.figures(report, images, COLUMNS).items():
            _show(trainer, f"val/{name}", figure, trainer.global_step - 1)

    def _images_due(self, trainer: Trainer) -> bool:
        every, epoch = self.images_every_n_epochs, trainer.current_epoch
        due = bool(every and self.images) and (epoch % every == 0 or epoch + 1 == trainer.max_epochs)
        return due and bool(tensorboard_loggers(trainer))


def denormalize(inputs: Tensor, preprocess: Preprocess) -> Tensor:
    """Return the uint8 images ``(B, 3, H, W)`` of normalized ones; overshoot of the bicubic kernel is clipped."""
    mean, std = (inputs.new_tensor(values)[:, None, None].float() for values in (preprocess.mean, preprocess.std))
    return ((inputs.float() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8).cpu()


def _show(trainer: Trainer, tag: str, figure: "Figure", step: int) -> None:
    figure.set_dpi(DPI)
    for logger in tensorboard_loggers(trainer):
        logger.experiment.add_figure(tag, figure, step, close=False)


def _logging_due(trainer: Trainer) -> bool:
    """Return whether a logging interval ends with one of the batches of this optimizer step."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    done = trainer.fit_loop.batch_idx + 1
    crossed = bool(every) and done // every > (done - trainer.accumulate_grad_batches) // every
    return crossed or trainer.is_last_batch


def _lowest_lr(optimizer: Optimizer) -> dict[str, float]:
    """Return the lowest learning rate if layer decay gives several; train/lr is that of the head."""
    learning_rates = {group["lr"] for group in optimizer.param_groups}
    return {"train/lr_lowest": min(learning_rates)} if len(learning_rates) > 1 else {}


def _loss_scaling(optimizer: Optimizer, scale: float, step: int) -> dict[str, float]:
    """Return the loss scale and, if the optimizer counts its steps, how many were skipped because of overflow."""
    values = {"precision/loss_scale": scale}
    state: dict[str, Any] = next(iter(optimizer.state.values()), {"step": 0})  # without a first step, no state
    if "step" in state:
        values["precision/skipped_steps"] = step - float(state["step"])
    return values
