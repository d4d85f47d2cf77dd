"""Inference speed on this machine: ``python -m vit_finetune export --ckpt_path best --benchmark true``.

Compares the checkpoint, eager and compiled, with the exported file: from the same uint8 images to probabilities, in
float32 on the CPU with the same number of threads. The variants take turns, so that other load on the machine affects
all of them.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vit_finetune import environment
from vit_finetune.export.formats import InferenceFn
from vit_finetune.formatting import median_range
from vit_finetune.module import ViTClassifier

ROUNDS = 5
SECONDS = 2.0  # per round and variant
MIN_CALLS = 3  # per round and variant, even if they take longer


def variants(model: ViTClassifier) -> dict[str, InferenceFn]:
    """Return the model as it is and, if there is a C++ compiler, compiled."""

    def infer(net: nn.Module) -> InferenceFn:
        return lambda images: model.probabilities(net(model.preprocess(images)))

    assert model.net is not None
    found = {"eager": infer(model.net)}
    if environment.cpp_compiler():
        compiled: nn.Module = torch.compile(model.net, dynamic=False)  # type: ignore[assignment]
        found["compiled"] = infer(compiled)
    return found


def measure(variants: dict[str, InferenceFn], images: Tensor, batch_sizes: Sequence[int]) -> str:
    """Measure each variant with each batch size.

    Args:
        variants: By name.
        images: uint8, shape ``(B, 3, H, W)``; repeated to fill a batch.
        batch_sizes: Images per call.

    Returns:
        A table: images per second, percentiles of the latency of a call, and the number of calls.
    """
    lines = [f"speed       {torch.get_num_threads()} threads, {ROUNDS} rounds of {SECONDS:g} s, median (min to max)"]
    for size in batch_sizes:
        batch = images.repeat(-(-size // len(images)), 1, 1, 1)[:size].contiguous()
        for name, rounds in _call_times(variants, batch).items():
            throughput = median_range([size * len(calls) / sum(calls) for calls in rounds], 1)
            calls = np.concatenate(rounds)
            p50, p95, p99 = np.percentile(calls, (50, 95, 99)) * 1e3
            lines.append(
                f"batch {size:<5d} {name:12s} {throughput:26s} images/s  "
                f"p50 {p50:.1f}  p95 {p95:.1f}  p99 {p99:.1f} ms  {len(calls)} calls"
            )
    return "\n".join(lines)


def _call_times(variants: dict[str, InferenceFn], batch: Tensor) -> dict[str, list[list[float]]]:
    """Return the seconds of each call, by variant and round."""
    times: dict[str, list[list[float]]] = {name: [] for name in variants}
    with torch.inference_mode():
        for infer in variants.values():  # warm up: the first call compiles, the second has its memory allocated
            infer(batch), infer(batch)
        for _ in range(ROUNDS):
            for name, infer in variants.items():
                times[name].append(_round(infer, batch))
    return times


def _round(infer: InferenceFn, batch: Tensor) -> list[float]:
    calls: list[float] = []
    while sum(calls) < SECONDS or len(calls) < MIN_CALLS:
        start = time.perf_counter()
        infer(batch)
        calls.append(time.perf_counter() - start)
    return calls
