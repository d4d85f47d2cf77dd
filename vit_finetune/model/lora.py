"""Low-rank adaptation (LoRA) by peft: frozen weights plus small trained updates (Hu et al. 2021, arXiv:2106.09685)."""

import importlib.util
from collections.abc import Iterable

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from vit_finetune.model.config import ViTConfig

SCALE = 2
"""Factor on the updates, in peft's terms ``lora_alpha / r``; 2 is a usual value."""
TARGET_MODULES = r".*\.attn\.(qkv|proj)"  # timm's names of the two linear layers of attention


def unavailable_reason() -> str | None:
    """Return why LoRA cannot be used, ``None`` if peft is installed."""
    if importlib.util.find_spec("peft") is None:
        return "--model.lora_rank needs peft: pip install 'vit_finetune[lora]'"
    return None


def add(net: nn.Module, rank: int, head_names: Iterable[str]) -> None:
    """Freeze the network except its head and add an update to the linear layers of attention, in place.

    The updates start at zero, so the output does not change.

    Args:
        net: A timm ViT.
        rank: Rank of the updates, at least 1.
        head_names: Submodules that stay trainable.

    Raises:
        MisconfigurationException: peft is missing, or the network has no such layers.
    """
    if reason := unavailable_reason():
        raise MisconfigurationException(reason)
    from peft import LoraConfig, inject_adapter_in_model

    try:
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=TARGET_MODULES), net)
    except ValueError as error:  # another kind of attention, or a rank below 1
        raise MisconfigurationException(f"--model.lora_rank {rank} does not fit this network: {error}") from error
    for name in head_names:
        net.get_submodule(name).requires_grad_(True)


def build_meta(config: ViTConfig, num_classes: int) -> nn.Module:
    """Build the network as it trains, with LoRA if the options say so, on the meta device; see ``vit.build_meta``."""
    from vit_finetune.model import vit

    net = vit.build_meta(config, num_classes)
    if config.lora_rank:
        add(net, config.lora_rank, vit.head_names(net))
    return net


def trainable_parameters(net: nn.Module) -> int:
    """Return the number of parameters that are trained; those that gradual unfreezing adds later count, too."""
    return sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)


def merge(net: nn.Module) -> None:
    """Add the updates to the weights and remove the adapters, in place; what remains is a plain timm network."""
    from peft.tuners.lora import LoraLayer

    for name, layer in list(net.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            net.set_submodule(name, layer.get_base_layer())


def merge_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the updates to the weights in a state dict; without LoRA, return the tensors unchanged.

    Args:
        state: Tensors by the names of the network's parameters.
    """
    merged = dict(state)
    for key in state:
        layer, found, _ = key.partition(".lora_A.")
        if found:
            down, up = merged.pop(key), merged.pop(key.replace(".lora_A.", ".lora_B."))
            weight = f"{layer}.base_layer.weight"
            merged[weight] = merged[weight] + SCALE * (up.float() @ down.float()).to(merged[weight].dtype)
    return {key.replace(".base_layer.", "."): value for key, value in merged.items()}
