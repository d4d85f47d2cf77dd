"""Mean and standard deviation by model, and pixels compared with other implementations."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from vit_finetune import ViTClassifier
from vit_finetune.model.config import ViTConfig
from vit_finetune.model.preprocess import Preprocess, resize_matrix
from vit_finetune.model.vit import build_preprocess


@pytest.mark.parametrize(
    ("name", "white", "black"),
    [
        ("vit_tiny_patch16_224.augreg_in21k", (1.0, 1.0, 1.0), (-1.0, -1.0, -1.0)),
        ("deit_tiny_patch16_224", (2.2489, 2.4286, 2.6400), (-2.1179, -2.0357, -1.8044)),
        ("vit_base_patch16_clip_224.openai", (1.9303, 2.0749, 2.1459), (-1.7923, -1.7521, -1.4802)),
    ],
)
def test_constants_are_those_of_the_weights(name: str, white: tuple[float, ...], black: tuple[float, ...]) -> None:
    module = build_preprocess(ViTConfig(name))
    for value, expected in ((255, white), (0, black)):
        pixels = module(torch.full((1, 3, 32, 32), value, dtype=torch.uint8))
        assert pixels.shape == (1, 3, 224, 224)
        torch.testing.assert_close(pixels[0, :, 100, 100], torch.tensor(expected), atol=1e-3, rtol=0)


def test_given_constants_override_those_of_the_weights() -> None:
    model = ViTClassifier(img_size=64, mean=[0.1, 0.2, 0.3], std=[0.5, 0.5, 0.5])
    assert model.preprocessing["mean"] == (0.1, 0.2, 0.3)
    assert model.input_size == (64, 64)
    black = build_preprocess(model.config)(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    torch.testing.assert_close(black[0, :, 0, 0], torch.tensor([-0.2, -0.4, -0.6]))


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("source", [(32, 32), (50, 40), (300, 256)])
def test_matrices_equal_interpolate(mode: str, source: tuple[int, int]) -> None:
    pixels = torch.randint(0, 256, (2, 3, *source), dtype=torch.uint8)
    ours = Preprocess((224, 224), [0, 0, 0], [1 / 255] * 3, mode)(pixels)
    theirs = F.interpolate(pixels.float(), (224, 224), mode=mode, antialias=True)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)  # on a scale of 0 to 255


def test_pixels_against_pillow() -> None:
    """In fp32, differ by at most 0.3 on average and 8 at most, of 255; Pillow clips where the kernel overshoots."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(pixels).resize((8, 8), Image.Resampling.BOX).resize((32, 32)))
    theirs = torch.from_numpy(np.asarray(Image.fromarray(smooth).resize((224, 224), Image.Resampling.BICUBIC)).copy())
    batch = torch.from_numpy(smooth.copy()).permute(2, 0, 1)[None]
    module = Preprocess((224, 224), [0, 0, 0], [1 / 255] * 3)
    difference = (module(batch)[0].permute(1, 2, 0) - theirs).abs()
    assert difference.mean() <= 0.3 and difference.max() <= 8
    # bf16 has 8 significant bits, so it rounds more coarsely than Pillow.
    half = (module.bfloat16()(batch)[0].float().permute(1, 2, 0) - theirs).abs()
    assert half.mean() <= 0.6 and half.max() <= 9


def test_same_size_is_only_normalized() -> None:
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    out = Preprocess((32, 32), [0.5] * 3, [0.5] * 3)(pixels)
    torch.testing.assert_close(out, pixels / 127.5 - 1)


def test_matrix_made_in_inference_mode_serves_training() -> None:
    resize_matrix.cache_clear()
    module = Preprocess((16, 16), [0.5] * 3, [0.5] * 3)
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    with torch.inference_mode():
        module(pixels)
    weight = torch.nn.Parameter(torch.ones(()))
    (module(pixels) * weight).sum().backward()
    assert weight.grad is not None
