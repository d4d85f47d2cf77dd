"""Search for a learning rate or a batch size in short trial runs whose weights are discarded."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.tuner import Tuner
from numpy.typing import NDArray
from typing_extensions import override

from vit_finetune.data import ImageDataModule
from vit_finetune.errors import NonFiniteLossError
from vit_finetune.module import ViTClassifier

SMOOTHING = 0.9  # decay of the exponential moving average of the loss
DIVERGED = 3.0  # stop if the smoothed loss exceeds its minimum by this factor


class LRRangeTest(Callback):
    """Learning rate range test: raise the learning rate exponentially, record the loss (Smith 2015, arXiv:1506.01186).

    The learning rate replaces ``--model.lr`` and the schedule; layer decay and the factor of the head apply as usual.

    Args:
        low: First learning rate.
        high: Last learning rate.
        steps: Number of optimizer steps from low to high.

    Raises:
        MisconfigurationException: The range is empty.
    """

    def __init__(self, low: float, high: float, steps: int) -> None:
        if not 0 < low < high or steps < 2:
            raise MisconfigurationException(
                f"--low {low}, --high {high}, --steps {steps}: expected 0 < low < high and at least 2 steps."
            )
        self.schedule: list[float] = np.geomspace(low, high, steps).tolist()
        self.losses: list[float] = []

    @property
    def lrs(self) -> list[float]:
        """Learning rates that were tried."""
        return self.schedule[: len(self.losses)]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self.schedule[len(self.losses)] * group.get("lr_scale", 1.0)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == len(self.losses):  # gradients are still being accumulated
            return
        mean: Any = trainer.strategy.reduce(outputs["loss"], reduce_op="mean")
        loss = float(mean) * trainer.accumulate_grad_batches
        self.losses.append(loss)
        smoothed = smooth(self.losses)
        trainer.should_stop = not math.isfinite(loss) or smoothed[-1] > DIVERGED * smoothed.min()


def smooth(losses: list[float]) -> NDArray[np.float64]:
    """Return the exponential moving average of the losses, with bias correction."""
    mean, means = 0.0, []
    for step, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        means.append(mean / (1 - SMOOTHING**step))
    return np.array(means)


def suggest(lrs: list[float], losses: list[float]) -> float:
    """Return a tenth of the learning rate with the lowest smoothed loss; beyond that one the loss diverges.

    Raises:
        MisconfigurationException: The loss does not fall.
    """
    smoothed = smooth([loss for loss in losses if math.isfinite(loss)])
    least = int(smoothed.argmin()) if len(smoothed) else 0
    if least == 0:
        raise MisconfigurationException(
            "The loss does not fall at any learning rate; try another --low, --high or --steps."
        )
    return lrs[least] / 10


def find_lr(trainer: Trainer, model: ViTClassifier, data: ImageDataModule, sweep: LRRangeTest, plot: Path) -> float:
    """Train through all learning rates, plot the losses, and return the value for ``--model.lr``."""
    model.hparams["unfreeze_by"] = model.hparams["ema"] = None  # train all parameters from the start
    _only(trainer, [sweep], len(sweep.schedule))
    try:
        trainer.fit(model, datamodule=data)
    except NonFiniteLossError:
        trainer.should_stop = True  # larger learning rates need not be tried
    lr = suggest(sweep.lrs, sweep.losses)
    if trainer.is_global_zero:
        _draw(sweep, lr, plot)
    # Undo the scaling of lr_for_batch, which is applied again when the option is used.
    return lr * float(model.hparams["lr"]) / float(trainer.optimizers[0].param_groups[0]["initial_lr"])


def find_batch_size(trainer: Trainer, model: ViTClassifier, data: ImageDataModule, largest: int) -> int:
    """Double the batch size until it exceeds the memory, the dataset or ``largest``, with Lightning's Tuner.

    Raises:
        MisconfigurationException: ``largest`` is not a power of two.
    """
    if largest < 1 or largest & (largest - 1):
        raise MisconfigurationException(f"--largest {largest} is not a power of two, such as 256.")
    _only(trainer, [], -1)
    found = Tuner(trainer).scale_batch_size(
        model, datamodule=data, mode="power", init_val=1, steps_per_trial=3, max_val=largest + 1
    )
    return min(found or 1, largest)  # the Tuner may return twice the largest size tried


def _only(trainer: Trainer, callbacks: list[Callback], steps: int) -> None:
    """Reduce the run to its training steps, without validation and files."""
    trainer.callbacks, trainer.loggers = callbacks, []  # type: ignore[attr-defined]
    trainer.log_every_n_steps = 0  # type: ignore[attr-defined]
    trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
    if steps > 0:
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = -1, steps


def _draw(sweep: LRRangeTest, lr: float, plot: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6.4, 4), layout="constrained")).subplots()
    axes.plot(sweep.lrs, sweep.losses, color="0.75", linewidth=1, label="loss per step")
    axes.plot(sweep.lrs, smooth(sweep.losses), label="smoothed")
    axes.axvline(lr, color="tab:red", linestyle="--", label=f"suggestion: {lr:.1e}")
    axes.set(xscale="log", xlabel="learning rate (--model.lr)", ylabel="training loss")
    axes.set_ylim(top=1.1 * np.nanmax(sweep.losses[: max(2, len(sweep.losses) // 2)]))
    axes.legend()
    plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(plot, dpi=120)
