"""What TensorBoard shows beyond losses, accuracies and speed."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter

from vit_finetune.data.datasets import Batch
from vit_finetune.model.gradients import fp16_underflow_stats, total_norm

MOST_IMAGES = 16
USUAL_SCALE = 2.0**16  # where torch.amp.GradScaler starts
COLUMNS = 4  # images in a row; the tab IMAGES shows a figure about 350 pixels wide
DPI = 90  # a grid of eight noisy images stays below 400 kB
SIDE_BY_SIDE = {
    "training beside validation": {
        name: ["Multiline", [f"^train/{name}$", f"^val/{name}$"]] for name in ("loss", "acc")
    }
}


class TensorBoard(Callback):
    """Logs gradients, numbers of low precision, images and charts, each as rarely as it is worth.

    Args:
        gradient_norm: Log train/grad_norm at each logging step: the norm of all gradients together before clipping. Not
            known under the classic FSDP strategy.
        precision_every_n_steps: In 16-bit precision, log every so many steps which share of the gradients would be zero
            in float16, without a loss scale and with it (under precision/): 16-mixed's present one, otherwise 65536. 0
            for never.
        images_every_n_epochs: In epochs 0, N, 2N and so on and in the last, show a training batch as the network sees
            it, the validation images that were wrong with most confidence, the confusion matrix and the reliability
            diagram. 0 for never.
        images: Images of the batch and of the mistakes, up to so many each, at most 16.
        graph: Show the network as a graph of operations.
    """

    def __init__(
        self,
        gradient_norm: bool = True,
        precision_every_n_steps: int = 100,
        images_every_n_epochs: int = 10,
        images: int = 8,
        graph: bool = False,
    ) -> None:
        for name, value, most in (
            ("precision_every_n_steps", precision_every_n_steps, None),
            ("images_every_n_epochs", images_every_n_epochs, None),
            ("images", images, MOST_IMAGES),
        ):
            if value < 0 or (most is not None and value > most):
                limits = "at least 0" if most is None else f"between 0 and {most}"
                raise MisconfigurationException(f"--tensorboard.{name} is {value}; it must be {limits}.")
        self.gradient_norm = gradient_norm
        self.precision_every_n_steps = precision_every_n_steps
        self.images_every_n_epochs = images_every_n_epochs
        self.images = images
        self.graph = graph
        self._seen: list[Tensor] = []
        self._answers: tuple[Tensor, Tensor, Tensor] | None = None
        self._unhook: Callable[[], None] | None = None
        self._step = 0

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lays out training beside validation (tab CUSTOM SCALARS), and draws the graph if asked to."""
        for writer in _writers(trainer):
            writer.add_custom_scalars(SIDE_BY_SIDE)
            if self.graph:
                _draw_graph(writer, pl_module)

    # Numbers

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Logs what is due of gradients, rates and loss scale; in most steps nothing."""
        step = trainer.global_step
        low = (
            self.precision_every_n_steps and step % self.precision_every_n_steps == 0 and "16" in str(trainer.precision)
        )
        if not trainer.loggers or not (low or _logging_step(trainer)):
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if scaler is not None else 1.0
        # Fused optimizers take gradients as they come and divide by the loss scale themselves.
        held = scale if getattr(optimizer, "_step_supports_amp_scaling", False) else 1.0
        # The classic FSDP strategy gives each process a part of the gradients that does not say what it is a part of.
        whole = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy))
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        values: dict[str, float] = {}
        if _logging_step(trainer):
            values |= _rates(optimizer) | (_scaling(optimizer, scale, step) if scaler is not None else {})
            if whole and self.gradient_norm and gradients:
                values["train/grad_norm"] = float(total_norm(gradients)) / held
        if low and whole and gradients:
            names = ("zero_in_fp16", "zero_in_fp16_scaled", "inf_in_fp16_scaled")
            shares = fp16_underflow_stats(gradients, held, scale if scaler is not None else USUAL_SCALE).tolist()
            values |= {f"precision/{name}": share for name, share in zip(names, shares, strict=True)}
        for logger in trainer.loggers if values else []:
            logger.log_metrics(values, step)

    # Images

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        """Keeps what the first batch of an epoch looks like when it leaves the preprocessing."""
        if batch_idx == 0 and trainer.is_global_zero and self._due(trainer):
            hook = lambda module, args, output: self._seen.append(output[: self.images].detach())  # noqa: E731
            self._step = trainer.global_step  # batches that are accumulated belong to a step that is still to come
            self._unhook = pl_module.preprocess.register_forward_hook(hook).remove  # type: ignore[union-attr]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Shows that batch with its labels."""
        if self._unhook is None:
            return
        from vit_finetune.evaluation import plots

        self._unhook()
        self._unhook = None
        images = _as_images(self._seen.pop(), pl_module.preprocess)
        names: Any = pl_module.class_names
        captions = [names[label] for label in batch["label"][: len(images)].tolist()]
        for writer in _writers(trainer):
            _add(writer, "train/batch", plots.image_grid(images, captions, COLUMNS), self._step)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the answers before the module forgets them; all processes give theirs."""
        if not trainer.sanity_checking and trainer.is_last_batch and self._due(trainer):
            self._answers = pl_module.val_predictions.compute()  # type: ignore[union-attr,operator]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws confusion, reliability and the worst mistakes."""
        answers, self._answers = self._answers, None
        if answers is None or not trainer.is_global_zero:
            return
        from vit_finetune.evaluation.report import Report

        logits, labels, index = answers
        names, temperature = pl_module.class_names, pl_module.temperature
        dataset: Any = trainer.val_dataloaders.dataset  # type: ignore[union-attr]
        paths = [dataset.names[i] for i in index.tolist()]
        report = Report.from_logits(logits, labels, names, temperature, paths)  # type: ignore[arg-type]
        report = replace(report, mistakes=report.mistakes[: self.images])
        images = [dataset.images_at(index[[mistake.index]].cpu())[0] for mistake in report.mistakes]
        for writer in _writers(trainer):
            for name, figure in report.figures(images, COLUMNS).items():
                _add(writer, f"val/{name}", figure, trainer.global_step - 1)

    def _due(self, trainer: Trainer) -> bool:
        every, epoch = self.images_every_n_epochs, trainer.current_epoch
        due = bool(every and self.images) and (epoch % every == 0 or epoch + 1 == trainer.max_epochs)
        return due and any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)


def _writers(trainer: Trainer) -> list[SummaryWriter]:
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def _logging_step(trainer: Trainer) -> bool:
    """Whether one of the batches that make up this optimizer step ends a logging interval."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    crossed = bool(every) and done // every > (done - trainer.accumulate_grad_batches) // every
    return crossed or trainer.is_last_batch


def _rates(optimizer: Optimizer) -> dict[str, float]:
    """The lowest rate where layer decay makes several; train/lr is the head's."""
    rates = {group["lr"] for group in optimizer.param_groups}
    return {"train/lr_lowest": min(rates)} if len(rates) > 1 else {}


def _scaling(optimizer: Optimizer, scale: float, step: int) -> dict[str, float]:
    """Loss scale and skipped steps: those that the optimizer has not counted, if it counts; a first one makes state."""
    values = {"precision/loss_scale": scale}
    state: dict[str, Any] = next(iter(optimizer.state.values()), {"step": 0})
    if "step" in state:
        values["precision/skipped_steps"] = step - float(state["step"])
    return values


def _as_images(inputs: Tensor, preprocess: Any) -> Tensor:
    """Undoes the normalization: uint8 ``(B, 3, H, W)``; what a cubic kernel overshot is cut off."""
    mean, std = (inputs.new_tensor(values)[:, None, None].float() for values in (preprocess.mean, preprocess.std))
    return ((inputs.float() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8).cpu()


def _add(writer: SummaryWriter, tag: str, figure: Any, step: int) -> None:
    figure.set_dpi(DPI)
    writer.add_figure(tag, figure, step, close=False)


def _draw_graph(writer: SummaryWriter, module: LightningModule) -> None:
    """Traces a copy on the CPU: the network itself may be sharded, compiled or in training mode."""
    from vit_finetune.model import vit

    h: Any = module.hparams
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's, about other uses of the trace than looking at it
        net = vit.build(h.name, len(h.class_names), h.img_size, 0.0, h.timm_kwargs).eval()
        writer.add_graph(net, torch.zeros(1, 3, *module.input_size))  # type: ignore[misc]
