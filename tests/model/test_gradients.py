"""Counting what float16 loses, against real casts."""

import pytest
import torch

from vit_finetune.model.gradients import clip_norm, fp16_underflow_stats, total_norm


def values() -> torch.Tensor:
    """From 1e-14 to 1e7 on both sides of zero, zeros, and the edges of float16's rounding."""
    generator = torch.Generator().manual_seed(0)
    median_range = 10 ** (torch.rand(5000, generator=generator) * 21 - 14)
    edges = [2.0**-24, 2.0**-25, 2.0**-25 * (1 + 2**-23), 2.0**-41, 65504, 65519.99, 65520, 1e38, float("inf"), 0.0]
    both = torch.cat([median_range, torch.tensor(edges)])
    return torch.cat([both, -both])


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
@pytest.mark.parametrize("held", [1.0, 65536.0])
def test_shares_are_those_of_a_cast(scale: float, held: float) -> None:
    plain = values()
    plain = plain[torch.isfinite(plain * held) | torch.isinf(plain)]  # exact in float32 when multiplied
    expected = [
        (plain.half() == 0).float().mean(),
        ((plain * scale).half() == 0).float().mean(),
        (~(plain * scale).half().isfinite()).float().mean(),
    ]
    parts = (plain * held).split([100, 3000, len(plain) - 3100])
    assert fp16_underflow_stats(parts, held, scale).tolist() == pytest.approx(
        [float(share) for share in expected], abs=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shares_of_short_gradients(dtype: torch.dtype) -> None:
    short = values().to(dtype)
    shares = fp16_underflow_stats([short], 1.0, 65536.0).tolist()
    assert shares[0] == pytest.approx(float((short.half() == 0).float().mean()), abs=1e-7)
    assert shares[1] == pytest.approx(float(((short.float() * 65536).half() == 0).float().mean()), abs=1e-7)
    if dtype is torch.bfloat16:
        assert shares[2] == pytest.approx(float((~(short.float() * 65536).half().isfinite()).float().mean()), abs=1e-7)


def test_what_is_no_number_counts_as_overflow() -> None:
    assert fp16_underflow_stats([torch.tensor([float("nan"), 1.0])], 1.0, 1.0).tolist() == [0, 0, 0.5]


def test_total_norm_over_types() -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([[4.0]]), torch.tensor([12.0], dtype=torch.bfloat16)]
    assert float(total_norm(gradients)) == 13.0


def test_clipping_over_parts_equals_pytorch() -> None:
    """On whole tensors, where PyTorch can do it too: above the norm and below."""
    for most in (0.1, 1e6):
        nets = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
        for net in nets:
            torch.manual_seed(0)
            for parameter in net.parameters():
                parameter.grad = torch.randn_like(parameter)
        clip_norm([p.grad for p in nets[0].parameters() if p.grad is not None], most)
        torch.nn.utils.clip_grad_norm_(nets[1].parameters(), most)
        for ours, theirs in zip(*(net.parameters() for net in nets), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
