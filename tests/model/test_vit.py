"""The network: weights from files, sizes, refused options, freezing, attention kernel."""

from pathlib import Path

import pytest
import timm
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import save_file

from tests.conftest import TINY_KWARGS, only, weights
from vit_finetune import ViTClassifier, main
from vit_finetune.model import local_weights, vit
from vit_finetune.model.config import ViTConfig

NAME = "vit_tiny_patch16_224"
CONFIG = ViTConfig(NAME, 32, TINY_KWARGS)


def weights_file(
    tmp_path: Path, suffix: str, img_size: int = 64, num_classes: int = 1000
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write random weights of the tiny network with another head and image size; return their file and the weights."""
    net = timm.create_model(NAME, img_size=img_size, num_classes=num_classes, **TINY_KWARGS)
    state = {key: torch.randn_like(value) for key, value in net.state_dict().items()}
    path = tmp_path / f"weights{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    return path, state


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_local_weights_of_another_size_and_head(tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture) -> None:
    path, state = weights_file(tmp_path, suffix)
    net = vit.build(CONFIG, 3)
    head = net.head.weight.clone()
    with caplog.at_level("INFO"):
        local_weights.load(net, str(path))
    assert torch.equal(net.blocks[1].mlp.fc1.weight, state["blocks.1.mlp.fc1.weight"])
    assert torch.equal(net.head.weight, head)
    assert net.pos_embed.shape == (1, 17, 24)  # 4 x 4 patches and the class token
    assert torch.equal(net.pos_embed[:, 0], state["pos_embed"][:, 0])
    assert "resampled from 65 to 17 tokens" in caplog.text and "head newly initialized" in caplog.text


def test_head_of_the_same_size_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, state = weights_file(tmp_path, ".safetensors", img_size=32, num_classes=3)
    net = vit.build(CONFIG, 3)
    with caplog.at_level("INFO"):
        local_weights.load(net, str(path))
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert "head loaded" in caplog.text


@pytest.mark.parametrize("change", [{"embed_dim": 48}, {"depth": 3}, {"patch_size": 4}])
def test_weights_of_another_architecture_are_refused(tmp_path: Path, change: dict[str, int]) -> None:
    path, _ = weights_file(tmp_path, ".safetensors")
    net = vit.build(ViTConfig(NAME, 32, {**TINY_KWARGS, **change}), 3)
    if "patch_size" in change:  # timm resamples patches, and so they fit
        local_weights.load(net, str(path))
        return
    with pytest.raises(MisconfigurationException, match="do not fit this network"):
        local_weights.load(net, str(path))


def test_file_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_text("<html>not found</html>")
    with pytest.raises(MisconfigurationException, match="cannot be read as weights"):
        local_weights.load(vit.build(CONFIG, 3), str(tmp_path / "weights.safetensors"))


def test_fit_from_a_file_and_from_a_checkpoint(folder_args: list[str], tmp_path: Path) -> None:
    path, state = weights_file(tmp_path, ".safetensors")
    main(["fit", *folder_args, f"--model.weights={path}", "--model.lr=0", "--model.min_lr=0"])
    first = only(tmp_path / "runs", "best-*.ckpt")
    assert torch.equal(weights(first)["net.blocks.0.attn.qkv.weight"], state["blocks.0.attn.qkv.weight"])
    # Another experiment starts from all of these weights, including the head.
    main(["fit", *folder_args, f"--model.weights={first}", "--model.lr=0", "--model.min_lr=0", "--experiment=again"])
    second = only(tmp_path / "runs" / "again", "best-*.ckpt")
    assert torch.equal(weights(second)["net.head.weight"], weights(first)["net.head.weight"])


@pytest.mark.parametrize(
    ("name", "img_size", "message"),
    [
        ("vit_tiny_patch16_999", None, r"is not a timm model. Similar: vit_tiny_patch16_"),
        ("", None, "is not a timm model"),
        ("vit_tiny_patch16_224.augreg_in99k", None, r"no weights 'augreg_in99k', only .*augreg_in21k"),
        ("resnet18", None, "is not a Vision Transformer"),
        (NAME, 30, r"img_size 30 is not divisible by the patch size 16 of .*; use 16 or 32"),
        (NAME, 8, r"img_size 8 is not divisible by the patch size 16 of .*; use 16\."),
        (
            NAME,
            (30, 64),
            r"img_size \[30, 64\] is not divisible by the patch size 16 of .*; use \[16, 64\] or \[32, 64\]",
        ),
        (NAME, (32, 70), r"img_size \[32, 70\] is not divisible by .*; use \[32, 64\] or \[32, 80\]"),
        (
            NAME,
            0,
            r"--model.img_size is 0; expected one positive number of pixels, or height and width such as \[32, 64\]",
        ),
        (NAME, (32, -16), r"--model.img_size is \[32, -16\]; expected one positive"),
        (NAME, (), r"--model.img_size is \[\]; expected one positive"),
        (NAME, (32,), r"--model.img_size is \[32\]; expected one positive"),
        (NAME, (3, 32, 32), r"--model.img_size is \[3, 32, 32\]; expected one positive"),
    ],
)
def test_impossible_networks_are_refused(name: str, img_size: int | tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        vit.build(ViTConfig(name, img_size), 3)


def test_unknown_timm_argument_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"timm_kwargs.*embed_dimm"):
        vit.build(ViTConfig(NAME, 32, {"embed_dimm": 24}), 3)


def test_attention_kernel_follows_device_and_precision() -> None:
    net = vit.build(CONFIG, 3)
    for device, dtype, fused in (
        ("cpu", torch.bfloat16, False),
        ("cpu", torch.float32, True),
        ("cpu", torch.float16, False),
        ("cuda", torch.bfloat16, True),
    ):
        vit.set_attention_kernel(net, torch.device(device), dtype)
        assert {block.attn.fused_attn for block in net.blocks} == {fused}


def test_frozen_backbone_does_not_change(folder_args: list[str], tmp_path: Path) -> None:
    """Two epochs with validation and a resume: only the head changes, stochastic depth in the backbone stays off."""
    frozen = [*folder_args, "--model.freeze_backbone=true", "--model.drop_path=0.5", "--model.lr=0.1"]
    frozen += ["--trainer.max_epochs=2", "--model.weight_decay=0.1"]
    path, state = weights_file(tmp_path, ".safetensors", img_size=32)
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
