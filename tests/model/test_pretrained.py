"""Bundled weights: they fit the quickstart, a run starts from them, and the file can be made from a checkpoint."""

from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors import safe_open
from safetensors.torch import load_file

from tests.conftest import CPU, REPOSITORY, equal, only, weights
from vit_finetune import main
from vit_finetune.model import pretrained

QUICKSTART = f"--config={REPOSITORY / 'configs' / 'quickstart.yaml'}"
STEP = ["--trainer.max_steps=1", "--trainer.limit_val_batches=1", "--data.train_size=200", "--data.batch_size=4"]
ZERO_LR = ["fit", QUICKSTART, *CPU, *STEP, "--model.lr=0", "--model.min_lr=0"]


def backbone(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights without the head, by timm's names."""
    return {
        key.removeprefix("net."): value for key, value in weights(checkpoint).items() if not key.startswith("net.head.")
    }


def test_file_is_small_and_finite() -> None:
    assert pretrained.PATH.stat().st_size < 3_000_000
    tensors = load_file(pretrained.PATH)
    assert {value.dtype for value in tensors.values()} == {torch.float16}
    assert all(value.isfinite().all() for value in tensors.values())
    assert not [key for key in tensors if key.startswith("head")]
    with safe_open(pretrained.PATH, "pt") as file:
        assert file.metadata()["mean"] == file.metadata()["std"] == "(0.5, 0.5, 0.5)"


def test_quickstart_starts_from_bundled_weights(tmp_path: Path) -> None:
    main(ZERO_LR)
    start = backbone(only(tmp_path / "runs", "last.ckpt"))
    assert equal(start, {key: value.float() for key, value in load_file(pretrained.PATH).items()})


def test_null_starts_from_scratch(tmp_path: Path) -> None:
    main([*ZERO_LR, "--model.weights=null"])
    start = backbone(only(tmp_path / "runs", "last.ckpt"))
    assert not torch.allclose(start["pos_embed"], load_file(pretrained.PATH)["pos_embed"].float(), atol=1e-2)


@pytest.mark.parametrize(
    "change",
    ["timm_kwargs.embed_dim=96", "timm_kwargs.depth=5", "timm_kwargs.class_token=true", "freeze_backbone=true"],
)
def test_other_networks_are_refused_at_once(change: str, fails: Callable[..., str]) -> None:
    """Before images are drawn or downloaded; freezing parts of the right network is allowed."""
    options = ["--data=CIFAR10", "--data.download=false", f"--model.{change}"]
    message = fails("fit", QUICKSTART, *CPU, *options)
    assert "CIFAR-10 is missing" in message
    assert ("made for the network of configs/quickstart.yaml" in message) == ("timm_kwargs" in change)


def test_other_image_and_patch_sizes_fit(tmp_path: Path) -> None:
    main([*ZERO_LR, "--model.img_size=48", "--model.timm_kwargs.patch_size=4"])
    start, shipped = backbone(only(tmp_path / "runs", "last.ckpt")), load_file(pretrained.PATH)
    assert start["pos_embed"].shape == (1, 144, 128) and shipped["pos_embed"].shape == (1, 16, 128)
    assert torch.equal(start["blocks.3.mlp.fc2.weight"], shipped["blocks.3.mlp.fc2.weight"].float())


def test_strip_writes_a_file_to_start_from(tmp_path: Path) -> None:
    main([*ZERO_LR, "--model.weights=null"])
    checkpoint, target = only(tmp_path / "runs", "last.ckpt"), tmp_path / "new" / "mine.safetensors"
    pretrained.strip(checkpoint, target)
    main([*ZERO_LR, f"--model.weights={target}", "--experiment=again"])
    again = backbone(only(tmp_path / "runs" / "again", "last.ckpt"))
    assert equal(again, {key: value.half().float() for key, value in backbone(checkpoint).items()})
    with pytest.raises(MisconfigurationException, match="already exists"):
        pretrained.strip(checkpoint, target)
    with pytest.raises(MisconfigurationException, match="not a checkpoint of this project"):
        pretrained.strip(target, tmp_path / "other.safetensors")


def test_wheel_contains_the_file() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    files = {file.distribution_path for file in wheel.WheelBuilder(str(REPOSITORY)).recurse_included_files()}
    assert "vit_finetune/model/weights/contours.safetensors" in files
    assert resources.files("vit_finetune").joinpath("model", "weights", "contours.safetensors").is_file()
