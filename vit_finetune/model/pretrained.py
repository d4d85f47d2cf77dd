"""The weights that come with this package, and how their file is made from a checkpoint."""

import sys
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

BUNDLED = "embedded"  # what --model.weights calls them
PATH = Path(__file__).parent / "weights" / "contours.safetensors"


def incompatibility(net: nn.Module) -> str | None:
    """Says in a sentence why the embedded weights do not belong to a network, ``None`` if they do; reads no values.

    Args:
        net: A timm ViT, on any device, meta too. Image and patch size may differ: what depends on them is resampled.
    """
    from safetensors import safe_open

    def sizes(tensors: dict[str, list[int]]) -> dict[str, list[int] | None]:
        resampled = ("pos_embed", "patch_embed.proj.weight")
        return {key: None if key in resampled else size for key, size in tensors.items() if not key.startswith("head.")}

    with safe_open(PATH, "pt") as file:
        held = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 it is no mapping
    if sizes(held) == sizes({key: list(value.shape) for key, value in net.state_dict().items()}):
        return None
    return (
        f"--model.weights {BUNDLED}: these weights are made for the network of configs/quickstart.yaml. Take its "
        "--model.name and --model.timm_kwargs, or name a file of weights for this one."
    )


def strip(checkpoint: Path, target: Path) -> None:
    """Writes the backbone of a checkpoint in float16: no head, no optimizer, half the size.

    Input format, classes and training data of the head are gone with it: whoever loads the file brings a new head, and
    the mean and standard deviation that the network's name stands for.

    Raises:
        MisconfigurationException: The file is no checkpoint of this project, or the target exists.
    """
    from safetensors.torch import save_file

    if target.exists():
        raise MisconfigurationException(f"{target} exists; move it away or name another file")
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        preprocessing = content["vit_finetune"]["preprocessing"]
    except Exception as error:  # torch raises anything on files that are none of its own
        raise MisconfigurationException(f"{checkpoint} is no checkpoint of this project: {error}") from error
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
