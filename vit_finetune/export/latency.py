"""Speed of answers on this machine: ``python -m vit_finetune export --ckpt_path best --benchmark true``.

A checkpoint as it is and compiled, and the file that was just exported from it, all from the same uint8 images to
probabilities, in float32 on the CPU with the same number of threads. Rounds are interleaved, so that what else the
machine does meets all of them.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vit_finetune import environment
from vit_finetune.formatting import median_range
from vit_finetune.module import ViTClassifier

ROUNDS = 5
SECONDS = 2.0  # per round and variant
LEAST_CALLS = 3  # per round and variant, however slow

InferenceFn = Callable[[Tensor], Tensor]


def variants(model: ViTClassifier) -> dict[str, InferenceFn]:
    """The model as it is and, where there is a C++ compiler, compiled."""

    def answer(net: nn.Module) -> InferenceFn:
        return lambda images: model.probabilities(net(model.preprocess(images)))

    assert model.net is not None
    found = {"eager": answer(model.net)}
    if environment.cpp_compiler():
        found["compiled"] = answer(torch.compile(model.net, dynamic=False))  # type: ignore[arg-type]
    return found


def measure(runners: dict[str, InferenceFn], images: Tensor, batch_sizes: Sequence[int]) -> str:
    """Measures each runner with each batch size.

    Args:
        runners: From uint8 images to probabilities.
        images: uint8, shape ``(B, 3, H, W)``; repeated to the batch sizes.
        batch_sizes: Images a call.

    Returns:
        A table: images per second over the rounds, percentiles of the time of a call, and the number of calls. Of
        few calls, the 99th percentile is about the slowest.
    """
    lines = [f"speed       {torch.get_num_threads()} threads, {ROUNDS} rounds of {SECONDS:g} s, median (range)"]
    for size in batch_sizes:
        batch = images.repeat(-(-size // len(images)), 1, 1, 1)[:size].contiguous()
        times = _times(runners, batch)
        for name, rounds in times.items():
            rates = median_range([size * len(calls) / sum(calls) for calls in rounds], 1)
            calls = np.concatenate(rounds)
            p50, p95, p99 = np.percentile(calls, (50, 95, 99)) * 1e3
            lines.append(
                f"batch {size:<5d} {name:12s} {rates:26s} images/s  "
                f"p50 {p50:.1f}  p95 {p95:.1f}  p99 {p99:.1f} ms  {len(calls)} calls"
            )
    return "\n".join(lines)


def _times(runners: dict[str, InferenceFn], batch: Tensor) -> dict[str, list[list[float]]]:
    """Seconds of each call, by runner and round."""
    times: dict[str, list[list[float]]] = {name: [] for name in runners}
    with torch.inference_mode():
        for run in runners.values():  # the first call compiles and the second one finds memory ready
            run(batch), run(batch)
        for _ in range(ROUNDS):
            for name, run in runners.items():
                times[name].append(_round(run, batch))
    return times


def _round(run: InferenceFn, batch: Tensor) -> list[float]:
    calls: list[float] = []
    while sum(calls) < SECONDS or len(calls) < LEAST_CALLS:
        start = time.perf_counter()
        run(batch)
        calls.append(time.perf_counter() - start)
    return calls
