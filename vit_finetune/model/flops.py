"""Floating-point operations of a training step, and how many a device can do."""

import functools
import json
import re
from typing import Any

import torch

# Dense TFLOP/s by NVIDIA's data sheets (half of the figures that assume sparsity): float16 and bfloat16 with 32-bit
# sums, TF32, float32. The names are those of torch.cuda.get_device_name; the first that is contained in it counts.
# bfloat16 needs Ampere or later; V100 and T4 have float16 only. Lightning's own table (get_available_flops) does not
# know the name under which an H200 reports itself, and has sparse figures for it.
PEAK_TFLOPS: dict[str, tuple[float, float | None, float]] = {
    "B200": (2250, 1100, 75),  # HGX B200 data sheet, per GPU
    "H200 NVL": (835, 418, 60),  # H200 data sheet
    "H200": (989, 494, 67),  # H200 data sheet, SXM
    "H100 PCIe": (756, 378, 51),  # H100 data sheet
    "H100 NVL": (835, 418, 60),
    "H100": (989, 494, 67),  # SXM
    "A100": (312, 156, 19.5),  # A100 data sheet, SXM and PCIe
    "L40S": (362, 183, 91.6),  # L40S data sheet
    "RTX 4090": (165, 82.6, 82.6),  # Ada architecture white paper, appendix A
    "RTX 3090": (71, 35.6, 35.6),  # GA102 architecture white paper, table 9 (not the Ti)
    "V100-SXM2": (125, None, 15.7),  # V100 data sheet
    "T4": (65, None, 8.1),  # T4 data sheet
}
LOOKALIKES = ("MIG", "GB200", "RTX 3090 Ti", "RTX 4090 D", "RTX 4090 Laptop")


def flops_per_image(hparams: Any, num_classes: int) -> int:
    """Operations of the forward and backward pass for one image, an addition and a multiplication counted as two.

    Counted by :mod:`torch.utils.flop_counter` (matrix products, convolutions and attention) on the meta device. What a
    frozen backbone saves is left out; what gradient checkpointing computes twice counts once, as the definition of
    model FLOPs utilization (MFU) has it (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). With ``unfreeze_by`` the
    number is that of the epochs in which everything is trained.

    Args:
        hparams: The model's options.
        num_classes: Size of the head.
    """
    keys = ("name", "img_size", "drop_path", "timm_kwargs", "freeze_backbone", "lora_rank")
    return _flops_per_image(json.dumps({key: hparams[key] for key in keys}), num_classes)


@functools.lru_cache
def _flops_per_image(options: str, num_classes: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    from vit_finetune.model import lora, vit

    hparams = json.loads(options)
    net = vit.build_meta(hparams, num_classes)
    if hparams["lora_rank"]:
        lora.add(net, hparams["lora_rank"])
    vit.choose_attention(net, torch.device("cpu"), "16")  # matrix products; a fused kernel computes some twice
    config = vit.data_config(hparams["name"], hparams["img_size"], hparams["timm_kwargs"], None, None)
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, 3, *config["size"], device="meta")).sum().backward()
    total: int = counter.get_total_flops()
    return total


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Operations a second that the device's data sheet promises for matrix products, ``None`` where unknown.

    Args:
        device: Where training runs.
        precision: The Trainer's, such as ``bf16-mixed``; in 32 bits, the setting of ``--matmul_precision`` counts.
    """
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), precision, torch.get_float32_matmul_precision())


def peak_of(name: str, precision: str, matmul_precision: str = "highest") -> float | None:
    """The same by the device's name; ``matmul_precision`` is ``highest``, ``high`` or ``medium``."""
    # An A1000 is no A100, and a T400 no T4.
    known = next((peaks for part, peaks in PEAK_TFLOPS.items() if re.search(rf"{part}(?!\d)", name)), None)
    if known is None or any(part in name for part in LOOKALIKES):
        return None
    half, tf32, full = known
    if precision.startswith("bf16"):
        peak = half if tf32 else None
    elif precision.startswith("16"):
        peak = half
    elif precision.startswith("32"):
        peak = full if matmul_precision == "highest" or not tf32 else tf32
    else:
        peak = None
    return peak * 1e12 if peak else None
