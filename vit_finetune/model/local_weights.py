"""Start from the weights of a local file: adapt them to the network, load them, and log what was adapted."""

import inspect
from contextlib import suppress
from pathlib import Path

import timm
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from vit_finetune.checkpoint import read_header
from vit_finetune.errors import unreadable
from vit_finetune.model import lora, pretrained
from vit_finetune.model.vit import head_names


def load(net: nn.Module, path: str) -> None:
    """Load weights from a file: ``.safetensors``, ``.pth``, a checkpoint of this project, or ``embedded``.

    Position embeddings are resampled to the size of the network. The head is loaded if the file has one for the same
    number of classes, and stays random otherwise.

    Raises:
        MisconfigurationException: The file cannot be read or belongs to another architecture.
    """
    source = f"--model.weights {path}"
    try:
        state = timm.models.load_state_dict(str(pretrained.PATH) if path == pretrained.BUNDLED else path)
    except Exception as error:  # the readers raise all kinds of errors on files that are not weights
        raise MisconfigurationException(f"{source} cannot be read as weights: it {unreadable(error)}") from error
    prefix, position = "net.", None
    if any(key.startswith(prefix) for key in state):
        state = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        state = lora.merge_state(state)
        position = _resample_position(net, state, Path(path))
    _load(net, state, source, position)


def _resample_position(net: nn.Module, state: dict[str, Tensor], checkpoint: Path) -> Tensor | None:
    """Resample the position embedding of a checkpoint by the input size stored in it.

    timm sees only the number of tokens, and takes that of another size for a square.

    Returns:
        The embedding for the grid of the network; ``None`` if the size is unknown, which leaves it to timm.
    """
    position, patches = state.get("pos_embed"), state.get("patch_embed.proj.weight")
    new = getattr(net.patch_embed, "grid_size", None)
    if position is None or position.ndim != 3 or patches is None or patches.ndim != 4 or new is None:
        return None
    with suppress(MisconfigurationException, KeyError):  # a file without this metadata
        height, width = read_header(checkpoint)["vit_finetune"]["preprocessing"]["size"]
        old = height // patches.shape[2], width // patches.shape[3]
        prefix = position.shape[1] - old[0] * old[1]
        resampled: Tensor = timm.layers.resample_abs_pos_embed(position, new, old, prefix)
        return resampled
    return None


def _load(net: nn.Module, state: dict[str, Tensor], source: str, position: Tensor | None) -> None:
    """Adapt a state dict to the network by timm's own conversion, load it, and log what was adapted."""
    heads = head_names(net)
    adapt = getattr(inspect.getmodule(type(net)), "checkpoint_filter_fn", None)
    before = state.get("pos_embed") if position is None else state.pop("pos_embed")
    try:
        state = adapt(state, net) if adapt else state
        if position is not None:
            state["pos_embed"] = position
        current = net.state_dict()
        for key in [key for key in state if key.startswith(heads)]:
            if key not in current or current[key].shape != state[key].shape:
                del state[key]
        result = net.load_state_dict(state, strict=False)
    except (RuntimeError, KeyError, AttributeError) as error:
        details = " ".join(line.strip() for line in str(error).splitlines()[:3])
        raise MisconfigurationException(f"{source} do not fit this network: {details}") from error
    missing = [key for key in result.missing_keys if not key.startswith(heads)]
    if missing:
        raise MisconfigurationException(
            f"{source} do not fit this network: {len(missing)} of {len(current)} tensors are missing, such as "
            f"{', '.join(missing[:3])}."
        )
    after = state.get("pos_embed")
    if before is not None and after is not None and before.shape != after.shape:
        rank_zero_info(f"position embedding resampled from {before.shape[1]} to {after.shape[1]} tokens")
    head = "newly initialized" if any(key.startswith(heads) for key in result.missing_keys) else "loaded"
    rank_zero_info(f"{source}: {len(state)} tensors loaded; head {head}")
