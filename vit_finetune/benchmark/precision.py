"""Speed of bf16-mixed over 32-true on this processor: ``python -m vit_finetune.benchmark.precision``.

ViT-Ti at 32 pixels, patch 4, batch 32, whole training steps with fused AdamW. The attention kernel is the one that a
run would choose; the table also shows the other one.
"""

import statistics
import time

import timm
import torch
import torch.nn.functional as F
from torch import nn

from vit_finetune.environment import bf16_instructions
from vit_finetune.formatting import median_range
from vit_finetune.model.optim import build_optimizer, parameter_rules
from vit_finetune.model.vit import build, choose_attention

BATCH = 32
STEPS = 4
ROUNDS = 5


def network(precision: str) -> nn.Module:
    """ViT-Ti for small images with the attention kernel of a run."""
    net = build("vit_tiny_patch16_224", 10, 32, 0.0, {"patch_size": 4}).train()
    choose_attention(net, torch.device("cpu"), precision)
    return net


def step_time(net: nn.Module, half: bool) -> float:
    """Mean seconds a training step over a few steps after one for warm-up."""
    optimizer = build_optimizer(net, parameter_rules(net, 0.05, None), "adamw", 1e-4, fused=True)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    start = 0.0
    for step in range(STEPS + 1):
        if step == 1:
            start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = net(images)
        optimizer.zero_grad()
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
    return (time.perf_counter() - start) / STEPS


def other_kernel(net: nn.Module) -> nn.Module:
    """The same network with the attention kernel that was not chosen."""
    for module in net.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", not module.fused_attn)  # noqa: B010
    return net


def measure() -> None:
    """Prints milliseconds a step and the speed over 32-true, medians over interleaved rounds."""
    variants = {
        "32-true": (network("32-true"), False),
        "bf16-mixed": (network("bf16-mixed"), True),
        "32-true, other attention kernel": (other_kernel(network("32-true")), False),
        "bf16-mixed, other attention kernel": (other_kernel(network("bf16-mixed")), True),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, (net, half) in variants.items():
            times[name].append(step_time(net, half))
    base = statistics.median(times["32-true"])
    for name, values in times.items():
        shown = median_range([value * 1e3 for value in values])
        print(f"{name:36s} {shown:20s} ms a step  {base / statistics.median(values):.2f} x")


if __name__ == "__main__":
    print(f"timm {timm.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads", bf16_instructions())
    measure()
