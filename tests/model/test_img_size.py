"""Input that is not square: network, preprocessing, forecasts, weights of another shape, refused values."""

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

from tests.conftest import CPU, TINY_KWARGS, only, weights
from vit_finetune import ViTClassifier, main
from vit_finetune.model import flops, local_weights, memory, vit
from vit_finetune.model.config import ViTConfig

NAME = "vit_tiny_patch16_224"
WIDE = ViTConfig(NAME, (32, 64), TINY_KWARGS)


def test_network_and_preprocessing_are_of_that_size() -> None:
    module = ViTClassifier(NAME, (32, 64), pretrained=False, timm_kwargs=TINY_KWARGS, class_names=["a", "b"])  # type: ignore[arg-type]
    assert module.hparams["img_size"] == [32, 64] and module.input_size == (32, 64)
    module.configure_model()
    assert module.net.patch_embed.grid_size == (4, 8) and module.net.pos_embed.shape == (1, 33, 24)
    assert module(torch.zeros(2, 3, 20, 50, dtype=torch.uint8)).shape == (2, 2)


def test_forecasts_are_those_of_a_square_with_as_many_patches() -> None:
    """4 x 8 patches and 2 x 16 patches cost the same; a square of 4 x 4 patches costs less."""
    long, square = (ViTConfig(NAME, size, TINY_KWARGS) for size in ((16, 128), 32))
    assert flops.flops_per_image(WIDE, 3) == flops.flops_per_image(long, 3) > flops.flops_per_image(square, 3)
    forecasts = [memory.forecast(config, 3, 8) for config in (WIDE, long, square)]
    assert forecasts[0] == forecasts[1] and forecasts[0].activations > forecasts[2].activations


@pytest.fixture
def wide(folder_args: list[str], tmp_path: Path) -> Path:
    """A checkpoint for images of 32 by 128 pixels: 4 x 16 patches, as many as a square of 64 pixels."""
    main(["fit", *folder_args, "--model.img_size=[32, 128]"])
    return only(tmp_path / "runs", "best-*.ckpt")


def test_commands_take_the_size_from_the_checkpoint(wide: Path, fails: Callable[..., str]) -> None:
    stored = torch.load(wide, weights_only=True)
    assert stored["hyper_parameters"]["img_size"] == [32, 128]
    assert tuple(stored["vit_finetune"]["preprocessing"]["size"]) == (32, 128)
    main(["test", f"--ckpt_path={wide}", *CPU])
    assert ViTClassifier.load(wide).input_size == (32, 128)
    assert "does not match the network" in fails("test", f"--ckpt_path={wide}", *CPU, "--model.img_size=[128, 128]")


def test_weights_of_another_shape_are_resampled(wide: Path) -> None:
    """Also where the number of tokens is that of a square, or the same."""
    stored = weights(wide)["net.pos_embed"]
    for size in (64, (128, 32), (32, 64), (32, 128)):
        net = vit.build(ViTConfig(NAME, size, TINY_KWARGS), 3)
        local_weights.load(net, str(wide))
        expected = timm.layers.resample_abs_pos_embed(stored, net.patch_embed.grid_size, (4, 16), 1)
        torch.testing.assert_close(net.pos_embed.detach(), expected)
        assert torch.equal(net.pos_embed, stored) == (size == (32, 128))


def test_square_weights_fit_a_network_that_is_not_square(tmp_path: Path) -> None:
    square = timm.create_model(NAME, img_size=64, num_classes=3, **TINY_KWARGS)
    torch.save(square.state_dict(), tmp_path / "weights.pth")
    net = vit.build(WIDE, 3)
    local_weights.load(net, str(tmp_path / "weights.pth"))
    expected = timm.layers.resample_abs_pos_embed(square.pos_embed.detach(), (4, 8), (8, 8), 1)
    torch.testing.assert_close(net.pos_embed.detach(), expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[30, 64]", "--model.img_size [30, 64] is not divisible by the patch size 8 of vit_tiny_patch16_224; use [24"),
        ("[32]", "--model.img_size is [32]; expected one positive number of pixels, or height and width such as"),
        ("[32, 0]", "--model.img_size is [32, 0]; expected one positive number of pixels, or height and width"),
        ("0", "--model.img_size is 0; expected one positive number of pixels"),
        ("wide", "--model.img_size: expected int or list[int] or null; got 'wide'"),
    ],
)
def test_refused_sizes(value: str, message: str, folder_args: list[str], fails: Callable[..., str]) -> None:
    assert message in fails("fit", *folder_args, f"--model.img_size={value}")
