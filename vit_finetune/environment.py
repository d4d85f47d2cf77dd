"""Hardware and software of this machine: devices, bf16 support, C++ compiler, package versions."""

import os
import platform
import shutil
from importlib.metadata import version

import torch

import vit_finetune

PACKAGES = ("lightning", "torch", "torchvision", "timm", "torchmetrics", "tensorboard", "jsonargparse", "numpy")


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile uses on a CPU, ``None`` if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def has_native_bf16() -> bool:
    """Return True if the device of ``--trainer.accelerator auto`` multiplies bf16 matrices in hardware.

    On a CPU these are AVX512-BF16, AMX or Arm's BF16 instructions; without them bf16 is slower than float32.
    """
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(bf16_instructions())


def bf16_instructions() -> list[str]:
    """Return the bf16 instruction sets of the CPU by PyTorch's names; empty if PyTorch is too old to detect them."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return [name for name in ("avx512_bf16", "amx_bf16", "bf16") if capabilities.get(name)]


def describe() -> str:
    """Return hardware and versions as text, for a bug report."""
    return "\n".join(f"{name:13s} {value}" for name, value in facts().items())


def facts() -> dict[str, str]:
    """Return hardware and versions: ``vit_finetune``, ``python``, ``cpu``, ``gpu``, ``compiler``, and each package."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    bf16 = ", ".join(bf16_instructions()) or "not in hardware"
    return {
        "vit_finetune": vit_finetune.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "cpu": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, bf16: {bf16}",
        "gpu": ", ".join(gpus) + f", bf16: {'in hardware' if has_native_bf16() else 'emulated'}" if gpus else "none",
        "compiler": cpp_compiler() or "none (--model.compile does not work on the CPU)",
        **{name: version(name) for name in PACKAGES},
    }
