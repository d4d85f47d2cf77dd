"""Low-rank adaptation: frozen weights plus small trained updates (Hu et al. 2021, arXiv:2106.09685), by peft."""

import importlib.util

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from vit_finetune.model.vit import head_names

SCALE = 2  # of the updates, as is usual: peft's alpha is this many times the rank
ADAPTED = r".*\.attn\.(qkv|proj)"  # timm's names of the attention's two matrices


def missing() -> str | None:
    """Says in a sentence that peft is not installed, ``None`` if it is."""
    if importlib.util.find_spec("peft") is None:
        return "--model.lora_rank needs peft: pip install 'vit_finetune[lora]'"
    return None


def add(net: nn.Module, rank: int) -> None:
    """Freezes the network but for its head and adds an update of that rank to each attention matrix, in place.

    The updates start at zero.

    Raises:
        MisconfigurationException: peft is missing, or the network has no such matrices.
    """
    if problem := missing():
        raise MisconfigurationException(problem)
    from peft import LoraConfig, inject_adapter_in_model

    try:
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=ADAPTED), net)
    except ValueError as error:  # another kind of attention, or a rank below one
        raise MisconfigurationException(f"--model.lora_rank {rank} does not fit this network: {error}") from error
    for name in head_names(net):
        net.get_submodule(name).requires_grad_(True)


def merge(net: nn.Module) -> None:
    """Adds the updates to the weights and takes the adapters out, in place; a plain timm network is left."""
    from peft.tuners.lora import LoraLayer

    for name, layer in list(net.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            net.set_submodule(name, layer.get_base_layer())


def merge_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same for the tensors of a checkpoint; those of a network without updates are returned as they are.

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
