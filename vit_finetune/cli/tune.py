"""Finders of the learning rate and of the batch size: short trials whose weights are thrown away."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.tuner import Tuner

from vit_finetune.errors import NonFiniteLossError

MEMORY = 0.9  # share of the smoothed loss that stays at each step
DIVERGED = 3.0  # times the least smoothed loss: nothing is learned from still larger rates


class LRRangeTest(Callback):
    """Raises the learning rate from step to step by the same factor, and notes the loss (Smith 2015, arXiv:1506.01186).

    The rate is that of ``--model.lr``: layer decay and the head's factor apply as in a real run, the schedule does not.

    Args:
        low: First rate.
        high: Last rate.
        steps: Optimizer steps from one to the other.

    Raises:
        MisconfigurationException: The range is none.
    """

    def __init__(self, low: float, high: float, steps: int) -> None:
        if not 0 < low < high or steps < 2:
            raise MisconfigurationException(
                f"--low {low}, --high {high}, --steps {steps}: 0 < low < high, steps over 1."
            )
        self.all_rates: list[float] = np.geomspace(low, high, steps).tolist()
        self.losses: list[float] = []

    @property
    def rates(self) -> list[float]:
        """Rates that were tried."""
        return self.all_rates[: len(self.losses)]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Sets the rate after the schedule has set its own."""
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self.all_rates[len(self.losses)] * group.get("lr_scale", 1.0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the loss of an optimizer step; stops where it has left all reason."""
        if trainer.global_step == len(self.losses):  # gradients are still being accumulated
            return
        mean: Any = trainer.strategy.reduce(outputs["loss"], reduce_op="mean")
        loss = float(mean) * trainer.accumulate_grad_batches
        self.losses.append(loss)
        smoothed = smooth(self.losses)
        trainer.should_stop = not math.isfinite(loss) or smoothed[-1] > DIVERGED * smoothed.min()


def smooth(losses: list[float]) -> Any:
    """Exponential mean, freed of its bias towards zero; NumPy float64, as long as the list."""
    mean, means = 0.0, []
    for step, loss in enumerate(losses, 1):
        mean = MEMORY * mean + (1 - MEMORY) * loss
        means.append(mean / (1 - MEMORY**step))
    return np.array(means)


def suggest(rates: list[float], losses: list[float]) -> float:
    """A tenth of the rate at which the smoothed loss is least: beyond that rate training falls apart.

    Raises:
        MisconfigurationException: The loss does not fall.
    """
    smoothed = smooth([loss for loss in losses if math.isfinite(loss)])
    least = int(smoothed.argmin()) if len(smoothed) else 0
    if least == 0:
        raise MisconfigurationException("The loss falls at none of the rates tried: try other --low, --high, --steps.")
    return rates[least] / 10


def find_lr(trainer: Trainer, model: Any, data: Any, sweep: LRRangeTest, image: Path) -> float:
    """Trains once through all rates and draws the losses; returns the value for ``--model.lr``."""
    model.hparams["unfreeze_by"] = model.hparams["ema"] = None  # all that will be trained takes part, from the start
    _only(trainer, [sweep], len(sweep.all_rates))
    try:
        trainer.fit(model, datamodule=data)
    except NonFiniteLossError:
        trainer.should_stop = True  # the rates beyond need not be tried
    rate = suggest(sweep.rates, sweep.losses)
    if trainer.is_global_zero:
        _draw(sweep, rate, image)
    # What lr_for_batch makes of the option, it must not do twice.
    return rate * float(model.hparams["lr"]) / float(trainer.optimizers[0].param_groups[0]["initial_lr"])


def find_batch_size(trainer: Trainer, model: Any, data: Any, largest: int) -> int:
    """Doubles the batch until memory, the data or ``largest`` ends it; by Lightning's Tuner.

    Raises:
        MisconfigurationException: ``largest`` is no power of two.
    """
    if largest < 1 or largest & (largest - 1):
        raise MisconfigurationException(f"--largest {largest} is no power of two, such as 256.")
    _only(trainer, [], -1)
    found = Tuner(trainer).scale_batch_size(
        model, datamodule=data, mode="power", init_val=1, steps_per_trial=3, max_val=largest + 1
    )
    return min(found or 1, largest)  # beyond largest the Tuner returns a size that it has not tried


def _only(trainer: Trainer, callbacks: list[Callback], steps: int) -> None:
    """Leaves of the run nothing but its training steps: no validation, no files."""
    trainer.callbacks, trainer.loggers = callbacks, []  # type: ignore[attr-defined]
    trainer.log_every_n_steps = 0  # type: ignore[attr-defined]
    trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
    if steps > 0:
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = -1, steps


def _draw(sweep: LRRangeTest, rate: float, image: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6.4, 4), layout="constrained")).subplots()
    axes.plot(sweep.rates, sweep.losses, color="0.75", linewidth=1, label="loss of a step")
    axes.plot(sweep.rates, smooth(sweep.losses), label="smoothed")
    axes.axvline(rate, color="tab:red", linestyle="--", label=f"a tenth of the best: {rate:.1e}")
    axes.set(xscale="log", xlabel="learning rate (--model.lr)", ylabel="training loss")
    axes.set_ylim(top=1.1 * np.nanmax(sweep.losses[: max(2, len(sweep.losses) // 2)]))
    axes.legend()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=120)
