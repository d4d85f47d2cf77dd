"""LoRA: trainable parameters, and equal predictions after merging. Needs peft."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file

from tests.conftest import only, weights
from vit_finetune import ViTClassifier, main
from vit_finetune.model import lora
from vit_finetune.model.config import ViTConfig
from vit_finetune.model.vit import build, head_names


def test_missing_package_is_reported_before_training(
    folder_args: list[str], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'vit_finetune[lora]'" in fails("fit", *folder_args, "--model.lora_rank=4")
    with pytest.raises(MisconfigurationException, match="needs peft"):
        lora.add(torch.nn.Linear(1, 1), 4, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.lora_rank=0"], "--model.lora_rank is 0"),
        (["--model.lora_rank=4", "--model.freeze_backbone=true"], "exclude each other"),
        (["--model.lora_rank=4", "--model.unfreeze_by=1"], "exclude each other"),
    ],
)
def test_invalid_options_are_refused(
    folder_args: list[str], fails: Callable[..., str], options: list[str], message: str
) -> None:
    assert message in fails("fit", *folder_args, *options)


class TestWithPeft:
    """Tests that train with peft."""

    @pytest.fixture(autouse=True)
    def _peft(self) -> None:
        pytest.importorskip("peft")

    def test_trains_under_two_percent_of_a_vit_small(self) -> None:
        with torch.device("meta"):
            net = build(ViTConfig("vit_small_patch14_dinov2", img_size=98), 10)
            lora.add(net, 8, head_names(net))
        trained = {name: weight.numel() for name, weight in net.named_parameters() if weight.requires_grad}
        assert {name.split(".")[-3] for name in trained if "lora" in name} == {"lora_A", "lora_B"}
        assert {name for name in trained if "lora" not in name} == {"head.weight", "head.bias"}
        fraction = sum(trained.values()) / sum(weight.numel() for weight in net.parameters())
        assert 0.005 < fraction < 0.02

    def test_merged_equals_unmerged_and_is_a_plain_network(
        self, folder_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After training, from the checkpoint, to 1e-5; frozen weights did not change."""
        main(["fit", *folder_args, "--model.lora_rank=4", "--model.lr=0.01", "--model.layer_decay=null"])
        path = only(tmp_path, "last.ckpt")
        module = ViTClassifier.load_from_checkpoint(path).eval()
        images = torch.randint(0, 256, (8, 3, 40, 40), dtype=torch.uint8)
        with torch.no_grad():
            before = module(images)
            up = module.net.blocks[0].attn.qkv.lora_B["default"].weight  # type: ignore[union-attr,index]
            assert float(up.abs().max()) > 0  # it starts at zero
            module.merge_lora()
            after = module(images)
        assert torch.allclose(before, after, atol=1e-5) and float(before.std()) > 1e-3
        plain = build(module.config, 3)
        assert plain.state_dict().keys() == module.net.state_dict().keys()  # type: ignore[union-attr]
        assert [type(m) for m in plain.modules()] == [type(m) for m in module.net.modules()]  # type: ignore[union-attr]
        assert module.hparams["lora_rank"] is None
        main(["test", "--ckpt_path=best", "--trainer.accelerator=cpu"])
        main(["export", f"--ckpt_path={path}", "--format=timm"])
        assert load_file(only(tmp_path, "*.safetensors")).keys() == plain.state_dict().keys()
        state = weights(path)
        names = [name for name in state if "base_layer" in name or "mlp" in name]
        main(["fit", *folder_args, "--model.lora_rank=4", "--trainer.limit_train_batches=1", "--experiment=short"])
        short = weights(only(tmp_path / "runs" / "short", "last.ckpt"))
        assert names and all(torch.equal(state[name], short[name]) for name in names)

    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
    def test_precisions(self, folder_args: list[str], tmp_path: Path, precision: str) -> None:
        main(["fit", *folder_args, "--model.lora_rank=4", f"--trainer.precision={precision}", "--model.ema=0.9"])
        assert set(torch.load(only(tmp_path, "last.ckpt"), weights_only=True)["training_weights"]) == {
            name for name in weights(only(tmp_path, "last.ckpt")) if "lora" in name or "head" in name
        }

    def test_a_new_run_starts_from_the_merged_weights(self, folder_args: list[str], tmp_path: Path) -> None:
        main(["fit", *folder_args, "--model.lora_rank=4", "--model.lr=0.1", "--model.layer_decay=null"])
        last = only(tmp_path, "last.ckpt")
        frozen = ["--model.lr=0", "--model.min_lr=0", "--experiment=again"]
        main(["fit", *folder_args, f"--model.weights={last}", *frozen])
        module = ViTClassifier.load_from_checkpoint(last)
        module.merge_lora()
        again = weights(only(tmp_path / "runs" / "again", "last.ckpt"))
        for key, value in module.state_dict().items():
            assert torch.allclose(value, again[key], atol=1e-6), key
