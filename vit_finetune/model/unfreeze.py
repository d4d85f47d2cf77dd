"""Head first, then the blocks from the top down."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from vit_finetune.model.vit import head_names


class GradualUnfreeze(Callback):
    """Trains the head alone in the first epoch; the blocks join from the top down, the embedding last.

    A new head sends large, meaningless gradients into the network below; trained first, it does not (Howard and Ruder
    2018, arXiv:1801.06146; Kumar et al. 2022, arXiv:2202.10054).

    What trains is a function of the epoch alone, and all parameters are in the optimizer from the start: one that gets
    no gradient is not touched. So a resumed run needs nothing but its epoch, and rates, layer decay and schedule are
    those of any other run; Lightning's ``BackboneFinetuning``, which adds parameter groups as it goes, would bring
    rates of its own.

    Args:
        by: Epoch, from 1, in which everything trains; until then each epoch adds an equal share of the blocks.
    """

    def __init__(self, by: int) -> None:
        self.by = by

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tells DDP, which otherwise waits for the gradient of every parameter, that some will have none."""
        if isinstance(trainer.strategy, DDPStrategy):
            trainer.strategy._ddp_kwargs["find_unused_parameters"] = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freezes in a run that goes on in the middle of an epoch, too."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets the epoch's share of the network train."""
        net: Any = pl_module.net
        share, blocks = min(1.0, trainer.current_epoch / self.by), list(net.blocks)
        net.requires_grad_(share == 1)
        for block in blocks[len(blocks) - round(share * len(blocks)) :]:
            block.requires_grad_(True)
        for name in head_names(net):
            net.get_submodule(name).requires_grad_(True)
        if share and hasattr(net, "norm"):
            net.norm.requires_grad_(True)
