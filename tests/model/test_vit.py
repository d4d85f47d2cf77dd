"""Weights from files, sizes, freezing, speed switches."""

from pathlib import Path

import pytest
import timm
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import save_file

from tests.conftest import TINY_KWARGS, only, weights
from vit_finetune import ViTClassifier, main
from vit_finetune.model import vit

NAME = "vit_tiny_patch16_224"


def source(
    tmp_path: Path, suffix: str, img_size: int = 64, num_classes: int = 1000
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file of weights of the tiny network with another head and image size."""
    net = timm.create_model(NAME, img_size=img_size, num_classes=num_classes, **TINY_KWARGS)
    state = {key: torch.randn_like(value) for key, value in net.state_dict().items()}
    path = tmp_path / f"weights{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    return path, state


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_local_weights_of_another_size_and_head(tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture) -> None:
    path, state = source(tmp_path, suffix)
    net = vit.build(NAME, 3, 32, 0.0, TINY_KWARGS)
    head = net.head.weight.clone()
    with caplog.at_level("INFO"):
        vit.load_local_weights(net, str(path))
    assert torch.equal(net.blocks[1].mlp.fc1.weight, state["blocks.1.mlp.fc1.weight"])
    assert torch.equal(net.head.weight, head)
    assert net.pos_embed.shape == (1, 17, 24)  # 4 x 4 patches and the class token
    assert torch.equal(net.pos_embed[:, 0], state["pos_embed"][:, 0])
    assert "resampled from 65 to 17 tokens" in caplog.text and "head new, random" in caplog.text


def test_head_of_the_same_size_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, state = source(tmp_path, ".safetensors", img_size=32, num_classes=3)
    net = vit.build(NAME, 3, 32, 0.0, TINY_KWARGS)
    with caplog.at_level("INFO"):
        vit.load_local_weights(net, str(path))
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert "head taken over" in caplog.text


@pytest.mark.parametrize("change", [{"embed_dim": 48}, {"depth": 3}, {"patch_size": 4}])
def test_weights_of_another_architecture_are_refused(tmp_path: Path, change: dict[str, int]) -> None:
    path, _ = source(tmp_path, ".safetensors")
    net = vit.build(NAME, 3, 32, 0.0, {**TINY_KWARGS, **change})
    if "patch_size" in change:  # timm resamples patches, and so they fit
        vit.load_local_weights(net, str(path))
        return
    with pytest.raises(MisconfigurationException, match="do not fit this network"):
        vit.load_local_weights(net, str(path))


def test_file_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_text("<html>not found</html>")
    with pytest.raises(MisconfigurationException, match="cannot be read as weights"):
        vit.load_local_weights(vit.build(NAME, 3, 32, 0.0, TINY_KWARGS), str(tmp_path / "weights.safetensors"))


def test_fit_from_a_file_and_from_a_checkpoint(folder_args: list[str], tmp_path: Path) -> None:
    path, state = source(tmp_path, ".safetensors")
    main(["fit", *folder_args, f"--model.weights={path}", "--model.lr=0", "--model.min_lr=0"])
    first = only(tmp_path / "runs", "best-*.ckpt")
    assert torch.equal(weights(first)["net.blocks.0.attn.qkv.weight"], state["blocks.0.attn.qkv.weight"])
    # The same weights, their head included, start another experiment.
    main(["fit", *folder_args, f"--model.weights={first}", "--model.lr=0", "--model.min_lr=0", "--experiment=again"])
    second = only(tmp_path / "runs" / "again", "best-*.ckpt")
    assert torch.equal(weights(second)["net.head.weight"], weights(first)["net.head.weight"])


@pytest.mark.parametrize(
    ("name", "img_size", "message"),
    [
        ("vit_tiny_patch16_999", None, r"is not a timm model. Similar: vit_tiny_patch16_"),
        ("", None, "is not a timm model"),
        ("vit_tiny_patch16_224.augreg_in99k", None, r"no weights 'augreg_in99k', only .*augreg_in21k"),
        ("resnet18", None, "is no Vision Transformer"),
        (NAME, 30, r"img_size 30 is no multiple of the 16-pixel patches .*; use 16 or 32"),
    ],
)
def test_impossible_networks_are_refused(name: str, img_size: int | None, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        vit.build(name, 3, img_size, 0.0, None)


def test_unknown_timm_argument_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"timm_kwargs.*embed_dimm"):
        vit.build(NAME, 3, 32, 0.0, {"embed_dimm": 24})


def test_attention_kernel_follows_device_and_precision() -> None:
    net = vit.build(NAME, 3, 32, 0.0, TINY_KWARGS)
    for device, precision, fused in (
        ("cpu", "bf16-mixed", False),
        ("cpu", "32-true", True),
        ("cpu", "16-mixed", False),
        ("cuda", "bf16-mixed", True),
    ):
        vit.choose_attention(net, torch.device(device), precision)
        assert {block.attn.fused_attn for block in net.blocks} == {fused}


def test_frozen_backbone_stays_put_and_quiet(folder_args: list[str], tmp_path: Path) -> None:
    """Two epochs with validation and a resume: only the head moves, dropout in the backbone stays off."""
    frozen = [*folder_args, "--model.freeze_backbone=true", "--model.drop_path=0.5", "--model.lr=0.1"]
    frozen += ["--trainer.max_epochs=2", "--model.weight_decay=0.1"]
    path, state = source(tmp_path, ".safetensors", img_size=32)
    main(["fit", *frozen, f"--model.weights={path}"])
    last = only(tmp_path / "runs", "last.ckpt")
    main(["fit", *frozen, f"--ckpt_path={last}", "--trainer.max_epochs=3"])
    trained = weights(last)
    for key, value in trained.items():
        name = key.removeprefix("net.")
        assert name.startswith("head.") or torch.equal(value, state[name]), name
    full = torch.load(last, weights_only=True)
    assert sum(len(group["params"]) for group in full["optimizer_states"][0]["param_groups"]) == 2

    model = ViTClassifier.load_from_checkpoint(last)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    model.train()
    vit.freeze_backbone(model.net)
    features = [model.net.forward_features(model.preprocess(images)) for _ in range(2)]
    assert torch.equal(*features)


def test_compile_leaves_no_prefix() -> None:
    model = ViTClassifier(NAME, img_size=32, pretrained=False, timm_kwargs=TINY_KWARGS, class_names=["a"], compile=True)
    model.configure_model()
    assert not [key for key in model.state_dict() if "_orig_mod" in key]
