"""The timm Vision Transformer: architecture, pretrained weights, input format, attention kernel."""

import difflib
from collections.abc import Sequence
from typing import Any

import timm
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from vit_finetune.model.config import ViTConfig
from vit_finetune.model.preprocess import Preprocess

HUB_TIMEOUT = 5.0  # seconds to wait for a response of the Hugging Face hub


def build(config: ViTConfig, num_classes: int, *, pretrained: bool = False) -> nn.Module:
    """Build the network, with random weights or with the pretrained weights of its name and a new head.

    Freezing, LoRA and gradient checkpointing are left to the caller.

    Raises:
        MisconfigurationException: The name is unknown, the options do not fit it, or the input size is not valid or
            not divisible by the patch size.
    """
    check_name(config.name)
    _check_size(config.img_size)
    name = current_name(config.name)
    options = dict(config.timm_kwargs)
    if config.img_size is not None:
        options["img_size"] = config.img_size
    try:
        net: nn.Module = timm.create_model(
            name, pretrained=pretrained, num_classes=num_classes, drop_path_rate=config.drop_path, **options
        )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        with torch.device("meta"):
            _check_architecture(name, timm.create_model(name))
        raise MisconfigurationException(
            f"timm cannot build {name} with --model.img_size {_shown(config.img_size)} and --model.timm_kwargs "
            f"{config.timm_kwargs}: {error}"
        ) from error
    _check_architecture(name, net)
    _check_patches(name, net)
    return net


def build_meta(config: ViTConfig, num_classes: int) -> nn.Module:
    """Build the network on the meta device, without values or memory; the backbone is frozen if the options say so.

    Raises:
        MisconfigurationException: See :func:`build`.
    """
    with torch.device("meta"):
        net = build(config, num_classes)
    if config.freeze_backbone:
        freeze_backbone(net)
    return net


def parameter_bytes(config: ViTConfig, num_classes: int = 1000) -> int:
    """Return the size of the parameters in float32; nothing is allocated.

    Raises:
        MisconfigurationException: See :func:`build`.
    """
    return 4 * sum(parameter.numel() for parameter in build_meta(config, num_classes).parameters())


def check_name(name: str) -> None:
    """Refuse names that timm does not know.

    Raises:
        MisconfigurationException: The message lists similar names.
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
    """Return timm's present name for a model that was renamed, such as ``vit_..._in21k``."""
    renamed = timm.models.get_deprecated_models("vision_transformer")
    return str(renamed.get(name, name))


def _check_architecture(name: str, net: nn.Module) -> None:
    if not hasattr(net, "patch_embed") or not hasattr(net, "blocks"):
        raise MisconfigurationException(f"--model.name {name} is not a Vision Transformer; try vit_small_patch16_224.")


def _check_size(size: int | Sequence[int] | None) -> None:
    sides = (size, 1) if isinstance(size, int) else (1, 1) if size is None else size
    if len(sides) != 2 or min(sides) < 1:
        raise MisconfigurationException(
            f"--model.img_size is {_shown(size)}; expected one positive number of pixels, or height and width such as "
            "[32, 64]."
        )


def _check_patches(name: str, net: Any) -> None:
    size, patch = net.patch_embed.img_size, net.patch_embed.patch_size
    if size is not None and any(s % p for s, p in zip(size, patch, strict=True)):
        below = tuple(max(s // p, 1) * p for s, p in zip(size, patch, strict=True))
        above = tuple(-(-s // p) * p for s, p in zip(size, patch, strict=True))
        near = " or ".join(dict.fromkeys((_shown(below), _shown(above))))
        raise MisconfigurationException(
            f"--model.img_size {_shown(size)} is not divisible by the patch size {_shown(patch)} of {name}; use {near}."
        )


def _shown(size: int | Sequence[int] | None) -> str:
    """Return a size as it is typed: one number for a square."""
    if size is None or isinstance(size, int):
        return str(size)
    return str(size[0] if len(size) == 2 and size[0] == size[1] else list(size))


def head_names(net: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that map features to logits."""
    config: Any = net.pretrained_cfg
    classifier = config.get("classifier") or "head"
    return (classifier,) if isinstance(classifier, str) else tuple(classifier)


def freeze_backbone(net: nn.Module) -> None:
    """Freeze everything but the head, in place, and turn off dropout and stochastic depth in what is frozen.

    Lightning keeps the evaluation mode of the frozen modules in ``fit``, after validation and after resuming.
    """
    net.requires_grad_(False).eval()
    for name in head_names(net):
        net.get_submodule(name).requires_grad_(True).train()


def set_attention_kernel(net: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Turn timm's fused attention off where it is slow, in 16 bits on a CPU, and leave it on elsewhere.

    Measured with ViT-Ti at 32 pixels, batch 32, bf16-mixed, one thread of an AMD EPYC with AVX512-BF16: a step takes
    450 ms with the fused kernel and 260 ms without; in fp32 both take 840 ms.

    Args:
        net: A timm ViT.
        device: Device that the network runs on.
        dtype: Type of matrix products, see :func:`vit_finetune.model.precision.compute_dtype`.
    """
    slow = device.type == "cpu" and dtype in (torch.float16, torch.bfloat16)
    module: Any
    for module in net.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = not slow and timm.layers.use_fused_attn()


# Input format


def data_config(config: ViTConfig) -> dict[str, Any]:
    """Return the input format: that of the pretrained weights as recorded by timm, unless the options say otherwise.

    Returns:
        ``size`` (height, width), ``mean``, ``std``, ``interpolation``; the arguments of :class:`Preprocess`.
    """
    check_name(config.name)
    _check_size(config.img_size)
    default = _recorded_format(config)
    size = config.img_size or config.timm_kwargs.get("img_size")
    return {
        "size": (size, size) if isinstance(size, int) else tuple(size or default["input_size"][1:]),
        "mean": config.mean or default["mean"],
        "std": config.std or default["std"],
        "interpolation": "bilinear" if default["interpolation"] == "bilinear" else "bicubic",
    }


def crop_pct(config: ViTConfig) -> float:
    """Return the fraction of height and width that evaluation keeps of an image, recorded by timm for the weights."""
    kept: float = _recorded_format(config)["crop_pct"]
    return kept


def _recorded_format(config: ViTConfig) -> dict[str, Any]:
    """Return the data config that timm has for the pretrained weights, its defaults for other names."""
    known = timm.get_pretrained_cfg(current_name(config.name), allow_unregistered=True)
    return dict(timm.data.resolve_data_config(pretrained_cfg=known.to_dict() if known else {}))


def build_preprocess(config: ViTConfig) -> Preprocess:
    """Build the module that brings stored images into the format of :func:`data_config`."""
    return Preprocess(**data_config(config))


# Pretrained weights


def weights_unavailable_reason(name: str) -> str | None:
    """Return why the pretrained weights of a timm name cannot be loaded, ``None`` if they can.

    Look into the local cache, then send the Hugging Face hub one request with a short timeout; download nothing.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    known = timm.get_pretrained_cfg(current_name(name), allow_unregistered=True)
    if known is None or not known.has_weights:
        return f"There are no pretrained weights for --model.name {name}; set --model.pretrained false."
    if not known.hf_hub_id:
        return None  # hosted elsewhere: only the download can tell
    filename = known.hf_hub_filename or "model.safetensors"
    if isinstance(try_to_load_from_cache(known.hf_hub_id, filename), str):
        return None
    try:
        get_hf_file_metadata(hf_hub_url(known.hf_hub_id, filename), timeout=HUB_TIMEOUT)
    except EntryNotFoundError:
        return None  # the hub is reachable; timm tries other file names
    except Exception as error:  # each release of the hub client has its own hierarchy of network errors
        return (
            f"The pretrained weights of {name} are not in the local cache and the Hugging Face hub cannot be reached "
            f"({error}). Use a local file: --model.weights FILE, train from scratch: --model.pretrained false, or set "
            "HF_HOME to a cache that contains them."
        )
    return None
