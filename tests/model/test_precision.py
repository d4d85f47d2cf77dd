"""Meaning of each precision that the Trainer accepts, compared with the plugins of Lightning."""

from typing import Any, get_args

import pytest
import torch
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT  # the list that the Trainer checks against
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision

from vit_finetune.model import precision

ACCEPTED = [str(value) for literal in get_args(_PRECISION_INPUT) for value in get_args(literal)]
F16, BF16, F32, F64, F8 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
MEANING = {  # type of the parameters, type of matrix products
    "16": (F32, F16),
    "16-mixed": (F32, F16),
    "16-true": (F16, F16),
    "32": (F32, F32),
    "32-true": (F32, F32),
    "64": (F64, F64),
    "64-true": (F64, F64),
    "bf16": (F32, BF16),
    "bf16-mixed": (F32, BF16),
    "bf16-true": (BF16, BF16),
    "transformer-engine": (BF16, F8),
    "transformer-engine-float16": (F16, F8),
}


def trainer(**options: Any) -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)


@pytest.mark.parametrize("name", sorted(set(ACCEPTED)))
def test_every_precision_of_the_trainer(name: str) -> None:
    parameters, compute = MEANING[name]
    assert (precision.parameter_dtype(name), precision.compute_dtype(name)) == (parameters, compute)
    assert precision.is_mixed(name) == (parameters == F32 != compute)
    if "transformer" in name:  # needs a library of its own
        return
    run = trainer(precision=name)
    plugin, actual = run.precision_plugin, precision.trainer_precision(run)
    net = plugin.convert_module(torch.nn.Linear(2, 2))
    assert net.weight.dtype == precision.parameter_dtype(actual)
    with plugin.forward_context():
        x = torch.ones(1, 2, dtype=net.weight.dtype)
        assert net(x).dtype == precision.compute_dtype(actual)
    assert precision.uses_16_bit(run) == (compute in (F16, BF16))
    # Lightning replaces float16 autocast on a CPU; elsewhere the Trainer runs in the precision that it was given.
    assert actual == {"16-mixed": "bf16-mixed"}.get(run.precision, run.precision)
    assert precision.loss_scale(run) is None


def test_a_plugin_decides() -> None:
    """float16 autocast with loss scaling on a CPU, as in configs/precision/16-mixed-cpu.yaml."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = trainer(plugins=MixedPrecision("16-mixed", "cpu", scaler))
    assert precision.trainer_precision(run) == "16-mixed" and precision.uses_16_bit(run)
    assert precision.loss_scale(run) == 1024.0


def test_unknown_precision_is_an_error() -> None:
    with pytest.raises(KeyError):
        precision.compute_dtype("8-true")
