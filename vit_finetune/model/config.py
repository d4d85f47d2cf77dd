"""Options of the network, as one immutable value."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class ViTConfig:
    """Architecture of a timm Vision Transformer, its input format, and the options that decide its cost.

    The fields are those of :class:`~vit_finetune.module.ViTClassifier` with the same names.

    Attributes:
        name: timm name, with or without the tag of pretrained weights.
        img_size: Side of the input in pixels, or height and width; ``None`` for that of the architecture.
        timm_kwargs: More arguments of ``timm.create_model``.
        mean: Channel means on a 0-1 scale; ``None`` for those the pretrained weights were trained with.
        std: Channel standard deviations on a 0-1 scale; ``None`` likewise.
        drop_path: Largest probability that a block is skipped in training.
        freeze_backbone: Train the head only.
        lora_rank: Rank of the LoRA updates; ``None`` for no LoRA.
        grad_checkpointing: Recompute activations in the backward pass.
        optimizer: timm name.
        ema: Decay of the EMA of the weights; ``None`` for no EMA.
    """

    name: str
    img_size: int | tuple[int, ...] | None = None
    timm_kwargs: dict[str, Any] = field(default_factory=dict, hash=False)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    drop_path: float = 0.0
    freeze_backbone: bool = False
    lora_rank: int | None = None
    grad_checkpointing: bool = False
    optimizer: str = "adamw"
    ema: float | None = None

    @classmethod
    def from_hparams(cls, hparams: Mapping[str, Any]) -> "ViTConfig":
        """Pick the fields from the hyperparameters of a model; those that are missing get their defaults."""
        known = {option.name: hparams[option.name] for option in fields(cls) if option.name in hparams}
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in known.items()
        }
        return cls(**values | {"timm_kwargs": dict(values.get("timm_kwargs") or {})})
