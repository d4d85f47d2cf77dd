"""Summary of the model that a run prints."""

from pathlib import Path

import pytest

from tests.conftest import TINY_KWARGS, only, weights
from vit_finetune import main
from vit_finetune.model.config import ViTConfig
from vit_finetune.model.flops import forward_flops


def summary(output: str) -> list[str]:
    lines = output.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("model  "))
    return lines[start : start + 2]


def test_parameters_and_flops(folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *folder_args, "--trainer.limit_train_batches=1"])
    printed = capsys.readouterr()
    output = printed.out + printed.err
    first, second = summary(printed.out)
    assert first == "model  vit_tiny_patch16_224  input 32 x 32  3 classes"
    count = sum(
        tensor.numel() for key, tensor in weights(only(tmp_path, "last.ckpt")).items() if key.startswith("net.")
    )
    config = ViTConfig("vit_tiny_patch16_224", 32, timm_kwargs=TINY_KWARGS)
    expected = f"{count / 1e3:.1f} K parameters ({count / 1e3:.1f} K trainable)"
    assert second.strip() == f"{expected}  {forward_flops(config, 3) / 1e9:.3g} GFLOPs per image (forward pass)"
    for unwanted in ("Total FLOPs", "eval mode", "MulticlassAccuracy", "val_metrics", "ModelSummary"):
        assert unwanted not in output


def test_frozen_backbone(folder_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *folder_args, "--model.freeze_backbone=true", "--trainer.limit_train_batches=1"])
    assert f"({24 * 3 + 3} trainable)" in summary(capsys.readouterr().out)[1]


def test_summary_can_be_disabled(folder_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *folder_args, "--trainer.enable_model_summary=false", "--trainer.limit_train_batches=1"])
    output = capsys.readouterr().out
    assert "GFLOPs" not in output and "arams" not in output
