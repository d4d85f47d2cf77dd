"""Gradient statistics against real casts to float16, norms and clipping against PyTorch."""

import pytest
import torch

from vit_finetune.model.gradients import clip_norm, fp16_underflow_stats, total_norm


def values() -> torch.Tensor:
    """Return values from 1e-14 to 1e7 of both signs, zeros, and the limits of rounding to float16."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = 10 ** (torch.rand(5000, generator=generator) * 21 - 14)
    edges = [2.0**-24, 2.0**-25, 2.0**-25 * (1 + 2**-23), 2.0**-41, 65504, 65519.99, 65520, 1e38, float("inf"), 0.0]
    both = torch.cat([magnitudes, torch.tensor(edges)])
    return torch.cat([both, -both])


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
@pytest.mark.parametrize("current", [1.0, 65536.0])
def test_fractions_equal_those_of_a_cast(scale: float, current: float) -> None:
    plain = values()
    plain = plain[torch.isfinite(plain * current) | torch.isinf(plain)]  # exact in float32 when multiplied
    expected = [
        (plain.half() == 0).float().mean(),
        ((plain * scale).half() == 0).float().mean(),
        (~(plain * scale).half().isfinite()).float().mean(),
    ]
    parts = (plain * current).split([100, 3000, len(plain) - 3100])
    assert fp16_underflow_stats(parts, current, scale).tolist() == pytest.approx(
        [float(fraction) for fraction in expected], abs=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fractions_of_16_bit_gradients(dtype: torch.dtype) -> None:
    short = values().to(dtype)
    fractions = fp16_underflow_stats([short], 1.0, 65536.0).tolist()
    assert fractions[0] == pytest.approx(float((short.half() == 0).float().mean()), abs=1e-7)
    assert fractions[1] == pytest.approx(float(((short.float() * 65536).half() == 0).float().mean()), abs=1e-7)
    if dtype is torch.bfloat16:
        assert fractions[2] == pytest.approx(
            float((~(short.float() * 65536).half().isfinite()).float().mean()), abs=1e-7
        )


def test_nan_counts_as_overflow() -> None:
    assert fp16_underflow_stats([torch.tensor([float("nan"), 1.0])], 1.0, 1.0).tolist() == [0, 0, 0.5]


def test_total_norm_over_types() -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([[4.0]]), torch.tensor([12.0], dtype=torch.bfloat16)]
    assert float(total_norm(gradients)) == 13.0


def test_clipping_over_parts_equals_pytorch() -> None:
    """On whole tensors, which PyTorch can clip too, with a norm above and below the maximum."""
    for max_norm in (0.1, 1e6):
        nets = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
        for net in nets:
            torch.manual_seed(0)
            for parameter in net.parameters():
                parameter.grad = torch.randn_like(parameter)
        clip_norm([p.grad for p in nets[0].parameters() if p.grad is not None], max_norm)
        torch.nn.utils.clip_grad_norm_(nets[1].parameters(), max_norm)
        for ours, theirs in zip(*(net.parameters() for net in nets), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
