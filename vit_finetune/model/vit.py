"""The timm Vision Transformer: architecture, pretrained weights, input format, attention kernel."""

import difflib
import inspect
from typing import Any

import timm
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from vit_finetune.model import lora
from vit_finetune.model import pretrained as bundled
from vit_finetune.model.config import ViTConfig
from vit_finetune.model.preprocess import Preprocess

HUB_TIMEOUT = 5.0  # seconds to wait for a response of the Hugging Face hub


def build(config: ViTConfig, num_classes: int, *, pretrained: bool = False) -> nn.Module:
    """Build the network, with random weights or with the pretrained weights of its name and a new head.

    Freezing, LoRA and gradient checkpointing are left to the caller.

    Raises:
        MisconfigurationException: The name is unknown, the options do not fit it, or the input size is not divisible
            by the patch size.
    """
    check_name(config.name)
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
            f"timm cannot build {name} with --model.img_size {config.img_size} and --model.timm_kwargs "
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


def _check_patches(name: str, net: Any) -> None:
    size, patch = net.patch_embed.img_size, net.patch_embed.patch_size
    if size is not None and any(s % p for s, p in zip(size, patch, strict=True)):
        below, above = (size[0] // patch[0]) * patch[0], (size[0] // patch[0] + 1) * patch[0]
        raise MisconfigurationException(
            f"--model.img_size {size[0]} is not divisible by the patch size {patch[0]} of {name}; "
            f"use {below or above} or {above}."
        )


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
    known = timm.get_pretrained_cfg(current_name(config.name), allow_unregistered=True)
    default = timm.data.resolve_data_config(pretrained_cfg=known.to_dict() if known else {})
    side = config.img_size or config.timm_kwargs.get("img_size")
    return {
        "size": (side, side) if isinstance(side, int) else tuple(side or default["input_size"][1:]),
        "mean": config.mean or default["mean"],
        "std": config.std or default["std"],
        "interpolation": "bilinear" if default["interpolation"] == "bilinear" else "bicubic",
    }


def crop_pct(config: ViTConfig) -> float:
    """Return the fraction of height and width that evaluation keeps of an image, recorded by timm for the weights."""
    known = timm.get_pretrained_cfg(current_name(config.name), allow_unregistered=True)
    kept: float = timm.data.resolve_data_config(pretrained_cfg=known.to_dict() if known else {})["crop_pct"]
    return kept


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


def load_local_weights(net: nn.Module, path: str) -> None:
    """Load weights from a file: ``.safetensors``, ``.pth``, a checkpoint of this project, or ``embedded``.

    Position embeddings are resampled to the size of the network. The head is loaded if the file has one for the same
    number of classes, and stays random otherwise.

    Raises:
        MisconfigurationException: The file cannot be read or belongs to another architecture.
    """
    try:
        state = timm.models.load_state_dict(str(bundled.PATH) if path == bundled.BUNDLED else path)
    except Exception as error:  # the readers raise all kinds of errors on files that are not weights
        raise MisconfigurationException(f"--model.weights {path} cannot be read as weights: {error}") from error
    prefix = "net."
    if any(key.startswith(prefix) for key in state):
        state = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        state = lora.merge_state(state)
    _load(net, state, f"--model.weights {path}")


def _load(net: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Adapt a state dict to the network by timm's own conversion, load it, and log what was adapted."""
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
