"""What this machine has: devices, units for 16 bits, a compiler, versions."""

import os
import platform
import shutil
from importlib.metadata import version

import torch

import vit_finetune


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile needs on a CPU, ``None`` where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def has_native_bf16() -> bool:
    """Whether 16-bit matrix products are done in hardware by the device that ``--trainer.accelerator auto`` takes.

    On a CPU these are AVX512-BF16, AMX or Arm's BF16 instructions; without them bf16 is slower than 32 bits.
    """
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(bf16_instructions())


def bf16_instructions() -> list[str]:
    """The CPU's instructions for bf16, by PyTorch's names; empty too where PyTorch is too old to tell."""
    found: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return [unit for unit in ("avx512_bf16", "amx_bf16", "bf16") if found.get(unit)]


def describe() -> str:
    """Devices, precision units, compiler and versions, for a bug report."""
    return "\n".join(f"{name:13s} {value}" for name, value in facts().items())


def facts() -> dict[str, str]:
    """The same as pairs of name and value."""
    packages = ("lightning", "torch", "torchvision", "timm", "torchmetrics", "tensorboard", "jsonargparse", "numpy")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "vit_finetune": vit_finetune.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "cpu": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, bf16 {bf16_instructions()}",
        "gpu": f"{', '.join(gpus) or 'none'}" + (f", bf16: {has_native_bf16()}" if gpus else ""),
        "c++": cpp_compiler() or "none: --model.compile will not work on the CPU",
        **{name: version(name) for name in packages},
    }
