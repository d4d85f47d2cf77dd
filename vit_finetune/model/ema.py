"""Moving average of the weights, which is what gets validated, kept and exported."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


class WeightEMA(Callback):
    """Keeps an exponential moving average of the trained weights, which stands in for them wherever they are judged.

    Validation, the best and the last checkpoint, and the module after training hold the average; ``last.ckpt`` holds
    the weights that training goes on with beside it. The average is kept in 32 bits at least, since 16 bits would lose
    its small steps, and in shards where the weights are.

    Early in training the average follows faster, or a short run would end on its first weights: at step t the decay is
    at most ``(1 + t) / (10 + t)``, as in TensorFlow's ``ExponentialMovingAverage``.

    Lightning's ``EMAWeightAveraging`` does not serve here: its average stays out of checkpoints that hold weights only,
    such as our best one, it waits for the device in each step, needs the network before the classes are known, and
    has neither 32-bit averages of 16-bit weights nor shards.

    Args:
        decay: Share of the average that stays at each optimizer step, from 0 to below 1.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        self._current: dict[str, Tensor] = {}  # the weights of training while the average is in their place
        self._step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts from the first weights, unless a checkpoint has brought an average."""
        weights = _trainable(pl_module).items()
        self._average = {name: self._average.get(name, _wide(weight)).to(weight.device) for name, weight in weights}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves the average after each optimizer step."""
        if trainer.global_step == self._step:  # gradients are still being accumulated
            return
        self._step = trainer.global_step
        moves = 1 - min(self.decay, (1 + self._step) / (10 + self._step))
        averages = [_local(average) for average in self._average.values()]
        weights = [_local(pl_module.get_parameter(name).detach()) for name in self._average]
        if averages:
            torch._foreach_lerp_(averages, [weight.to(averages[0].dtype) for weight in weights], moves)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the average in the place of the weights."""
        if trainer.state.fn == "fit":
            weights = _parameters(pl_module)
            self._current = {name: weights[name].clone() for name in self._average}
            _fill(pl_module, self._average)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the weights back."""
        _fill(pl_module, self._current)
        self._current = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the average in the module."""
        _fill(pl_module, self._average)

    def enter(self, checkpoint: dict[str, Any]) -> None:
        """Puts the average into a checkpoint; the weights of training go beside it if it is one to go on from.

        Called by the module, since callbacks are not asked about checkpoints that hold weights only.
        """
        state = checkpoint["state_dict"]
        training = {}
        for name, average in self._average.items():  # gathering shards takes all processes; one of them has the state
            value = average if isinstance(state.get(name), DTensor) else _gather(average)
            if name in state:
                training[name] = _gather(state[name])
                state[name] = value
        if "optimizer_states" in checkpoint:
            checkpoint["training_weights"] = training

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes the weights just loaded for the average, and goes on training with the others."""
        self._step = checkpoint["global_step"]
        self._average = {name: _wide(weight) for name, weight in _trainable(pl_module).items()}
        _fill(pl_module, checkpoint.get("training_weights", {}))


def _parameters(module: LightningModule) -> dict[str, Tensor]:
    """The weights by name, in shards where FSDP2 shards them: after an evaluation it keeps some of them whole."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return {name: weight.detach() for name, weight in module.named_parameters()}


def _trainable(module: LightningModule) -> dict[str, Tensor]:
    names = {name for name, weight in module.named_parameters() if weight.requires_grad}
    return {name: weight for name, weight in _parameters(module).items() if name in names}


def _wide(weight: Tensor) -> Tensor:
    """A copy in 32 bits or more."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)


def _gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    """This process's part, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fill(module: LightningModule, values: dict[str, Tensor]) -> None:
    """Copies tensors into the parameters of these names, whole ones into shards too."""
    weights = _parameters(module)
    for name, value in values.items():
        weight = weights[name]
        if isinstance(weight, DTensor) and not isinstance(value, DTensor):
            whole = value.to(weight.device, weight.dtype)
            weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements))
        else:
            weight.copy_(value)
