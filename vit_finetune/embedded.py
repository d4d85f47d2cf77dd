"""The weights that come with this package, and how their file is made from a checkpoint."""

import sys
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

KEYWORD = "embedded"
PATH = Path(__file__).parent / "weights" / "contours.safetensors"


def weights_path(weights: str) -> Path:
    """Returns the file that ``--model.weights`` names, which is this package's own for ``embedded``."""
    return PATH if weights == KEYWORD else Path(weights)


def strip(checkpoint: Path, target: Path) -> None:
    """Writes the backbone of a checkpoint in float16: no head, no optimiser, half the size.

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
        sys.exit(f"error: {error}. Usage: python -m vit_finetune.embedded CHECKPOINT TARGET.safetensors")
