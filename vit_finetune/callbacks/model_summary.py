"""Summary of the model that a run prints before it trains."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from typing_extensions import override

from vit_finetune.module import ViTClassifier


class NetworkSummary(ModelSummary):
    """Print name, input, parameters and forward FLOPs of the network in two lines.

    The table of Lightning's ``ModelSummary`` has a row for each metric, and no FLOPs, for which it would need an
    example batch. Here everything is computed on the meta device, so the numbers are those of the whole network under
    every strategy.
    """

    def __init__(self) -> None:
        super().__init__()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, ViTClassifier):
            super().on_fit_start(trainer, pl_module)
        elif trainer.is_global_zero:
            print(_describe(pl_module), flush=True)


def _describe(module: ViTClassifier) -> str:
    from vit_finetune.model import lora, vit
    from vit_finetune.model.flops import forward_flops

    config, classes = module.config, len(module.class_names or [])
    net = lora.build_meta(config, classes)
    height, width = vit.data_config(config)["size"]
    counts = sum(parameter.numel() for parameter in net.parameters()), lora.trainable_parameters(net)
    total, trained = (get_human_readable_count(count).strip() for count in counts)
    gigaflops = forward_flops(config, classes) / 1e9
    return (
        f"model  {config.name}  input {height} x {width}  {classes} classes\n"
        f"       {total} parameters ({trained} trainable)  {gigaflops:.3g} GFLOPs per image (forward pass)"
    )
