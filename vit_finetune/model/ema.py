"""Exponential moving average (EMA) of the weights, which is validated, kept as best and last, and exported."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from vit_finetune.checkpoint import Checkpoint
from vit_finetune.model.gradients import full_tensor, local_tensor


class WeightEMA(Callback):
    """Keep an EMA of the trainable weights, and use it in their place for everything but training.

    During validation, in the best and the last checkpoint, and after training, the weights of the module are the EMA;
    ``last.ckpt`` also contains the weights that training resumes with. The EMA is kept in float32 or wider, since
    16 bits would lose its small steps, and sharded like the weights.

    Early in training the EMA follows faster, so that a short run does not end close to its initial weights: at step t
    the decay is at most ``(1 + t) / (10 + t)``, as in TensorFlow's ``ExponentialMovingAverage``.

    Lightning's ``EMAWeightAveraging`` does not fit: it leaves the EMA out of weights-only checkpoints such as our best
    one, synchronizes with the device in each step, needs the network before the classes are known, and supports
    neither a float32 EMA of 16-bit weights nor shards.

    Args:
        decay: Fraction of the EMA that remains at each optimizer step, at least 0 and below 1.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self._training_weights: dict[str, Tensor] = {}  # while the EMA is in their place
        self._step = 0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = _trainable(pl_module).items()  # of a resumed run, the EMA has been loaded already
        self.average = {name: self.average.get(name, _widen(weight)).to(weight.device) for name, weight in weights}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # gradients are still being accumulated
            return
        self._step = trainer.global_step
        decay = min(self.decay, (1 + self._step) / (10 + self._step))
        averages = [local_tensor(average) for average in self.average.values()]
        weights = [local_tensor(pl_module.get_parameter(name).detach()) for name in self.average]
        if averages:
            wide = [weight.to(averages[0].dtype) for weight in weights]
            get_ema_multi_avg_fn(decay)(averages, wide, self._step)

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            weights = _parameters(pl_module)
            self._training_weights = {name: weights[name].clone() for name in self.average}
            _copy_into(pl_module, self.average)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _copy_into(pl_module, self._training_weights)
        self._training_weights = {}

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _copy_into(pl_module, self.average)

    def save_to(self, checkpoint: Checkpoint) -> None:
        """Replace the weights of a checkpoint by the EMA; add the training weights if it has an optimizer state.

        Called by the module, since Lightning skips callbacks when it writes a weights-only checkpoint.
        """
        state = checkpoint["state_dict"]
        training = {}
        for name, average in self.average.items():  # all processes take part in gathering; one of them has the state
            value = average if isinstance(state.get(name), DTensor) else full_tensor(average)
            if name in state:
                training[name] = full_tensor(state[name])
                state[name] = value
        if "optimizer_states" in checkpoint:
            checkpoint["training_weights"] = training

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Checkpoint) -> None:
        self._step = checkpoint["global_step"]
        self.average = {name: _widen(weight) for name, weight in _trainable(pl_module).items()}
        _copy_into(pl_module, checkpoint.get("training_weights", {}))


def _parameters(module: LightningModule) -> dict[str, Tensor]:
    """Return the parameters by name, as shards where FSDP2 shards them: some stay gathered after an evaluation."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return {name: weight.detach() for name, weight in module.named_parameters()}


def _trainable(module: LightningModule) -> dict[str, Tensor]:
    names = {name for name, weight in module.named_parameters() if weight.requires_grad}
    return {name: weight for name, weight in _parameters(module).items() if name in names}


def _widen(weight: Tensor) -> Tensor:
    """Return a copy in float32 or wider."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)


def _copy_into(module: LightningModule, values: dict[str, Tensor]) -> None:
    """Copy tensors into the parameters of these names; whole tensors are sharded where the parameters are."""
    weights = _parameters(module)
    for name, value in values.items():
        weight = weights[name]
        if isinstance(weight, DTensor) and not isinstance(value, DTensor):
            whole = value.to(weight.device, weight.dtype)
            weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements))
        else:
            weight.copy_(value)
