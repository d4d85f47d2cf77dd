"""The timm Vision Transformer: architecture, weights, speed switches, input format."""

import difflib
import inspect
from typing import Any

import timm
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from vit_finetune.model import pretrained
from vit_finetune.model.preprocess import Preprocess

HUB_TIMEOUT = 5.0  # seconds without an answer after which the hub counts as out of reach


def build(
    name: str,
    num_classes: int,
    img_size: int | None,
    drop_path: float,
    timm_kwargs: dict[str, Any] | None,
    pretrained: bool = False,
) -> nn.Module:
    """Builds the network, with random weights or with those of its name and a new head.

    Raises:
        MisconfigurationException: The name is unknown, the options do not fit it, or the size is no multiple of the
            patch size.
    """
    check_name(name)
    name = current_name(name)
    options = dict(timm_kwargs or {})
    if img_size is not None:
        options["img_size"] = img_size
    try:
        net = timm.create_model(
            name, pretrained=pretrained, num_classes=num_classes, drop_path_rate=drop_path, **options
        )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        with torch.device("meta"):
            _require_vit(name, timm.create_model(name))
        raise MisconfigurationException(
            f"timm cannot build {name} with --model.img_size {img_size} and --model.timm_kwargs {options}: {error}"
        ) from error
    _require_vit(name, net)
    _check_patches(name, net)
    return net


def _require_vit(name: str, net: nn.Module) -> None:
    if not hasattr(net, "patch_embed") or not hasattr(net, "blocks"):
        raise MisconfigurationException(f"--model.name {name} is no Vision Transformer; try vit_small_patch16_224.")


def parameter_bytes(hparams: Any, num_classes: int = 1000) -> int:
    """Size of the weights in 32 bits, without allocating them; the options are checked by the way.

    Raises:
        MisconfigurationException: See :func:`build`.
    """
    return 4 * sum(parameter.numel() for parameter in build_meta(hparams, num_classes).parameters())


def build_meta(hparams: Any, num_classes: int) -> nn.Module:
    """Builds the network on the meta device, where tensors have shapes and no values: costs no memory.

    Raises:
        MisconfigurationException: See :func:`build`.
    """
    with torch.device("meta"):
        net = build(hparams["name"], num_classes, hparams["img_size"], hparams["drop_path"], hparams["timm_kwargs"])
    if hparams["freeze_backbone"]:
        freeze_backbone(net)
    return net


def check_name(name: str) -> None:
    """Refuses names that timm does not know.

    Raises:
        MisconfigurationException: Names similar ones.
    """
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture) and ":" not in name:
        near = difflib.get_close_matches(architecture, timm.list_models(), 4, 0.5)
        hint = f"Similar: {', '.join(near)}" if near else "timm.list_models('vit_*') lists the names"
        raise MisconfigurationException(f"--model.name {name!r} is not a timm model. {hint}.")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags and ":" not in name:
        raise MisconfigurationException(
            f"--model.name {name!r}: {architecture} has no weights {tag!r}, only {', '.join(tags) or 'none'}."
        )


def current_name(name: str) -> str:
    """The name that timm uses today for a model that older texts call otherwise, such as ``vit_..._in21k``."""
    moved = timm.models.get_deprecated_models("vision_transformer")
    return str(moved.get(name, name))


def _check_patches(name: str, net: Any) -> None:
    size, patch = net.patch_embed.img_size, net.patch_embed.patch_size
    if size is not None and any(s % p for s, p in zip(size, patch, strict=True)):
        below, above = (size[0] // patch[0]) * patch[0], (size[0] // patch[0] + 1) * patch[0]
        raise MisconfigurationException(
            f"--model.img_size {size[0]} is no multiple of the {patch[0]}-pixel patches of {name}; "
            f"use {below or above} or {above}."
        )


def data_config(
    name: str,
    img_size: int | None,
    timm_kwargs: dict[str, Any] | None,
    mean: list[float] | None,
    std: list[float] | None,
) -> dict[str, Any]:
    """Input format that the weights of this name were trained for, as timm records it.

    Args:
        name: timm name with or without a weight tag.
        img_size: Overrides the side in pixels.
        timm_kwargs: May hold ``img_size`` too.
        mean: Overrides the channel means.
        std: Overrides the channel deviations.

    Returns:
        ``size`` (height, width), ``mean``, ``std``, ``interpolation``; the arguments of :class:`Preprocess`.
    """
    check_name(name)
    known = timm.get_pretrained_cfg(current_name(name), allow_unregistered=True)
    config = timm.data.resolve_data_config(pretrained_cfg=known.to_dict() if known else {})
    side = img_size or (timm_kwargs or {}).get("img_size")
    size = (side, side) if isinstance(side, int) else tuple(side or config["input_size"][1:])
    interpolation = config["interpolation"] if config["interpolation"] in ("bilinear", "bicubic") else "bicubic"
    return {"size": size, "mean": mean or config["mean"], "std": std or config["std"], "interpolation": interpolation}


def preprocessing(config: dict[str, Any]) -> Preprocess:
    """Builds the module that brings stored images into the format of :func:`data_config`."""
    return Preprocess(**config)


def weights_unavailable_reason(name: str) -> str | None:
    """Says in a sentence why the pretrained weights of this name cannot be had, ``None`` if they can.

    Looks into the local cache of the hub first, then asks the hub once, with a short time limit; downloads nothing.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    known = timm.get_pretrained_cfg(current_name(name), allow_unregistered=True)
    if known is None or not known.has_weights:
        return f"there are no pretrained weights for --model.name {name}; set --model.pretrained false"
    if not known.hf_hub_id:
        return None  # an address outside the hub; the download itself has to tell
    filename = known.hf_hub_filename or "model.safetensors"
    if isinstance(try_to_load_from_cache(known.hf_hub_id, filename), str):
        return None
    try:
        get_hf_file_metadata(hf_hub_url(known.hf_hub_id, filename), timeout=HUB_TIMEOUT)
    except EntryNotFoundError:
        return None  # the hub answers; timm knows the other file names
    except Exception as error:  # each release of the hub client has its own family of network errors
        return (
            f"the pretrained weights of {name} are not in the local cache and the hub is out of reach ({error}). "
            "Name a local file with --model.weights FILE, train from scratch with --model.pretrained false, or set "
            "HF_HOME to a cache that holds them"
        )
    return None


def load_local_weights(net: nn.Module, path: str) -> None:
    """Fills the network from a file: ``.safetensors``, ``.pth``, a checkpoint of this project, or ``embedded``.

    Position embeddings are resampled to the network's size. The head is taken over if the file has one for the same
    number of classes, and stays random otherwise.

    Raises:
        MisconfigurationException: The file cannot be read or belongs to another architecture.
    """
    from vit_finetune.model import lora  # which imports this module

    try:
        state = timm.models.load_state_dict(str(pretrained.PATH) if path == pretrained.BUNDLED else path)
    except Exception as error:  # the readers raise anything on files that hold no weights
        raise MisconfigurationException(f"--model.weights {path} cannot be read as weights: {error}") from error
    prefix = "net."
    if any(key.startswith(prefix) for key in state):
        state = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        state = lora.merge_state(state)
    _load(net, state, f"--model.weights {path}")


def _load(net: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Fits a state dict to the network by timm's own conversion and loads it, saying what became of it."""
    heads = head_names(net)
    adapt = getattr(inspect.getmodule(type(net)), "checkpoint_filter_fn", None)
    before = state.get("pos_embed")
    try:
        state = adapt(state, net) if adapt else state
        current = net.state_dict()
        for key in [key for key in state if key.startswith(heads)]:
            if key not in current or current[key].shape != state[key].shape:
                del state[key]
        result = net.load_state_dict(state, strict=False)
    except (RuntimeError, KeyError, AttributeError) as error:
        raise MisconfigurationException(f"{source} do not fit this network: {_first_lines(error)}") from error
    missing = [key for key in result.missing_keys if not key.startswith(heads)]
    if missing:
        raise MisconfigurationException(
            f"{source} do not fit this network: {len(missing)} of {len(current)} tensors are missing, such as "
            f"{', '.join(missing[:3])}."
        )
    after = state.get("pos_embed")
    if before is not None and after is not None and before.shape != after.shape:
        rank_zero_info(f"position embedding resampled from {before.shape[1]} to {after.shape[1]} tokens")
    head = "new, random" if any(key.startswith(heads) for key in result.missing_keys) else "taken over"
    rank_zero_info(f"{source}: {len(state)} tensors loaded; head {head}")


def head_names(net: nn.Module) -> tuple[str, ...]:
    """Names of the layers that map features to logits."""
    classifier = net.pretrained_cfg.get("classifier") or "head"  # type: ignore[union-attr,operator]
    return (classifier,) if isinstance(classifier, str) else tuple(classifier)


def _first_lines(error: Exception, most: int = 3) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:most])


def freeze_backbone(net: nn.Module) -> None:
    """Leaves only the head trainable; the rest also stops dropping paths and units.

    Lightning keeps modules in evaluation mode that were so before ``fit``, after validation and on resume too.
    """
    net.requires_grad_(False).eval()
    for name in head_names(net):
        net.get_submodule(name).requires_grad_(True).train()


def choose_attention(net: nn.Module, device: torch.device, precision: str) -> None:
    """Switches timm's fused attention off where it is slow: in 16 bits on a CPU.

    Measured with ViT-Ti at 32 pixels, batch 32, bf16-mixed, one thread of an AMD EPYC with AVX512-BF16: a step takes
    450 ms with the fused kernel and 260 ms without; in fp32 both take 840 ms.
    """
    slow = device.type == "cpu" and "16" in precision
    for module in net.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", not slow and timm.layers.use_fused_attn())  # noqa: B010
