"""Gradual unfreezing: the head first, then the blocks from the top down."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from typing_extensions import override

from vit_finetune.model.memory import ddp_options


class GradualUnfreeze(Callback):
    """Train the head alone in the first epoch; the blocks join from the top down, the patch embedding last.

    A new head sends large, meaningless gradients into the pretrained network; trained first, it does not (Howard and
    Ruder 2018, arXiv:1801.06146; Kumar et al. 2022, arXiv:2202.10054).

    What trains is a function of the epoch alone. All parameters are in the optimizer from the start; those without a
    gradient are not updated. A resumed run therefore needs nothing but its epoch, and learning rates, layer decay and
    schedule are those of any other run. Lightning's ``BackboneFinetuning`` adds parameter groups during training, with
    learning rates of their own.

    Args:
        by: Epoch, at least 1 and counted from 0, from which everything trains; in each epoch before, an equal part of
            the blocks joins.
    """

    def __init__(self, by: int) -> None:
        self.by = by

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._unfreeze(trainer, pl_module)  # a run that resumes within an epoch skips the start of that epoch

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._unfreeze(trainer, pl_module)

    def _unfreeze(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from vit_finetune.model.vit import head_names

        net: Any = pl_module.net
        fraction, blocks = min(1.0, trainer.current_epoch / self.by), list(net.blocks)
        net.requires_grad_(fraction == 1)
        for block in blocks[len(blocks) - round(fraction * len(blocks)) :]:
            block.requires_grad_(True)
        for name in head_names(net):
            net.get_submodule(name).requires_grad_(True)
        if fraction and hasattr(net, "norm"):
            net.norm.requires_grad_(True)


def ddp_conflict(strategy: Strategy) -> str | None:
    """Return why ``--model.unfreeze_by`` cannot run with this DDP strategy, ``None`` if it can.

    DDP waits for the gradient of every parameter that was trainable when it was set up; frozen ones never get one.
    """
    if isinstance(strategy, DDPStrategy) and not ddp_options(strategy).get("find_unused_parameters"):
        return (
            "--model.unfreeze_by leaves parameters without gradients, which plain DDP does not allow: use "
            "--trainer.strategy ddp_find_unused_parameters_true."
        )
    return None
