"""Bundled weights: the file that comes with this package, and the command that makes it from a checkpoint."""

import sys
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from vit_finetune.errors import unreadable

BUNDLED = "embedded"  # value of --model.weights
PATH = Path(__file__).parent / "weights" / "contours.safetensors"


def incompatibility(net: nn.Module) -> str | None:
    """Return why the bundled weights do not fit a network, ``None`` if they do; only shapes are read.

    Args:
        net: A timm ViT on any device, also meta. Image and patch size may differ, since both are resampled.
    """
    from safetensors import safe_open

    def shapes(tensors: dict[str, list[int]]) -> dict[str, list[int] | None]:
        resampled = ("pos_embed", "patch_embed.proj.weight")
        kept = {key: shape for key, shape in tensors.items() if not key.startswith("head.")}
        return {key: None if key in resampled else shape for key, shape in kept.items()}

    with safe_open(PATH, "pt") as file:
        stored = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 not a mapping
    if shapes(stored) == shapes({key: list(value.shape) for key, value in net.state_dict().items()}):
        return None
    return (
        f"--model.weights {BUNDLED}: the bundled weights are made for the network of configs/quickstart.yaml. Use its "
        "--model.name and --model.timm_kwargs, or a file of weights for this network."
    )


def strip(checkpoint: Path, target: Path) -> None:
    """Write the backbone of a checkpoint in float16: without head and optimizer state, half the size.

    The file does not tell the input format and the classes: whoever loads it gets a new head, and the mean and
    standard deviation that belong to the name of the network.

    Raises:
        MisconfigurationException: The file is not a checkpoint of this project, or the target exists.
    """
    from safetensors.torch import save_file

    if target.exists():
        raise MisconfigurationException(f"{target} already exists; move it away or choose another file")
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        preprocessing = content["vit_finetune"]["preprocessing"]
    except Exception as error:  # torch raises all kinds of errors on files that are not checkpoints
        reason = unreadable(error)
        raise MisconfigurationException(f"{checkpoint} is not a checkpoint of this project: it {reason}") from error
    tensors = {
        key.removeprefix("net."): value.half().contiguous()
        for key, value in content["state_dict"].items()
        if key.startswith("net.") and not key.startswith("net.head.")
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target, {"format": "pt", **{key: str(value) for key, value in preprocessing.items()}})


if __name__ == "__main__":
    try:
        strip(Path(sys.argv[1]), Path(sys.argv[2]))
    except (IndexError, MisconfigurationException) as error:
        sys.exit(f"error: {error}. Usage: python -m vit_finetune.model.pretrained CHECKPOINT TARGET.safetensors")
