"""Meaning of the Trainer's precisions, such as ``bf16-mixed``: data types, autocast, loss scaling."""

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import TransformerEnginePrecision

# Types of the parameters and of matrix products. Transformer Engine multiplies in 8-bit floats.
_DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "16-true": (torch.float16, torch.float16),
    "16-mixed": (torch.float32, torch.float16),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "32-true": (torch.float32, torch.float32),
    "64-true": (torch.float64, torch.float64),
    "transformer-engine": (torch.bfloat16, torch.float8_e4m3fn),
    "transformer-engine-float16": (torch.float16, torch.float8_e4m3fn),
}
_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}  # Lightning's short forms


def _canonical(precision: str) -> str:
    return _ALIASES.get(precision, precision)


def parameter_dtype(precision: str) -> torch.dtype:
    """Return the type of the parameters."""
    return _DTYPES[_canonical(precision)][0]


def compute_dtype(precision: str) -> torch.dtype:
    """Return the type of the operands of matrix products."""
    return _DTYPES[_canonical(precision)][1]


def is_mixed(precision: str) -> bool:
    """Return whether the forward pass runs under autocast, with float32 parameters."""
    return _canonical(precision) in ("16-mixed", "bf16-mixed")


def trainer_precision(trainer: Trainer) -> str:
    """Return the precision that a configured Trainer runs in, also if a plugin given by class decides it."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, TransformerEnginePrecision) and plugin.weights_dtype == torch.float16:
        return "transformer-engine-float16"  # the plugin reports "transformer-engine" for both
    return str(trainer.precision)


def uses_16_bit(trainer: Trainer) -> bool:
    """Return whether a configured Trainer computes in float16 or bfloat16."""
    return compute_dtype(trainer_precision(trainer)) in (torch.float16, torch.bfloat16)


def loss_scale(trainer: Trainer) -> float | None:
    """Return the current scale of the Trainer's ``GradScaler``, ``None`` without one; synchronizes with a GPU."""
    scaler = trainer.scaler
    return None if scaler is None else float(scaler.get_scale())
