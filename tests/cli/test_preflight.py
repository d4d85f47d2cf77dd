"""Checks before a run: errors, and warnings."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch

from tests.conftest import CPU, TINY, TINY_MODEL, make_tree, only, run_command
from vit_finetune import ViTClassifier, main
from vit_finetune.cli import preflight
from vit_finetune.cli.main import OUT_OF_MEMORY, explain
from vit_finetune.model.optim import lr_factor


def test_all_problems_at_once(folder_args: list[str], fails: Callable[..., str]) -> None:
    message = fails(
        "fit", *folder_args, "--data.root=nowhere", "--best_checkpoint.monitor=val_acc", "--model.weights=no.pth"
    )
    assert "Found 3 problems:" in message
    for part in (
        "nowhere is not a folder",
        "monitors 'val_acc', which is not logged. Expected one of: train/loss",
        "no.pth: no such file",
    ):
        assert part in message
    assert not Path("runs").exists()


def test_early_stopping_needs_its_metric(folder_args: list[str], fails: Callable[..., str]) -> None:
    stopping = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss"]
    assert "EarlyStopping monitors 'val_loss'" in fails("fit", *folder_args, *stopping)
    stopping[1] = "--trainer.callbacks.monitor=val/loss"
    assert "skips validation" in fails("fit", *folder_args, *stopping, "--trainer.limit_val_batches=0")


def test_validation_off_warns_that_there_is_no_best(folder_args: list[str], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="only the last checkpoint will be saved"):
        main(["fit", *folder_args, "--trainer.limit_val_batches=0"])
    assert only(tmp_path, "last.ckpt") and not list(tmp_path.rglob("best-*"))


def test_unfreezing_needs_another_ddp(folder_args: list[str], fails: Callable[..., str]) -> None:
    options = [*folder_args, "--model.unfreeze_by=2", "--trainer.max_epochs=3", "--trainer.strategy=ddp"]
    assert "--trainer.strategy ddp_find_unused_parameters_true" in fails("fit", *options)


@pytest.mark.parametrize(("version", "word"), [("2.6.3", "malicious"), ("2.5.0", "lets a checkpoint run code")])
def test_unsafe_lightning(
    version: str, word: str, folder_args: list[str], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning, "__version__", version)
    assert word in fails("fit", *folder_args)


def test_full_disk_and_unwritable_folder(
    folder_args: list[str], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        assert "checkpoints take" in fails("fit", *folder_args)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "is not writable" in fails("fit", *folder_args)


def test_compile_needs_a_compiler(
    folder_args: list[str], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "needs a C++ compiler" in fails("fit", *folder_args, "--model.compile=true")


def test_impossible_network_before_data(fails: Callable[..., str]) -> None:
    message = fails("fit", *TINY, "--model.img_size=30", "--data=ImageFolder", "--data.root=nowhere")
    assert "--model.img_size 30 is not divisible by" in message
    assert "nowhere is not a folder" in message


def test_unknown_name_is_one_problem(folder_args: list[str], fails: Callable[..., str]) -> None:
    message = fails("fit", *folder_args, "--model.name=vit_tiny_patch16_999", "--model.pretrained=true")
    assert "is not a timm model" in message and "problems:" not in message


def test_old_gpu_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.warns(UserWarning, match="Tesla T4 has no native bf16: .*16-mixed is fast"):
        preflight.warn_slow_bf16(torch.device("cuda", 0), "bf16-mixed")


def test_doctor(folder_args: list[str], capsys: pytest.CaptureFixture[str], fails: Callable[..., str]) -> None:
    main(["doctor", *folder_args])
    out = capsys.readouterr().out
    for word in ("vit_finetune", "python", "cpu", "gpu", "torch", "no problems found"):
        assert word in out
    assert not Path("runs").exists()
    assert "nowhere is not a folder" in fails("doctor", *folder_args, "--data.root=nowhere")


@pytest.mark.parametrize(
    ("optimizer", "batch", "reference", "factor"),
    [("adamw", 256, None, 1.0), ("adamw", 256, 64, 2.0), ("sgd", 256, 64, 4.0), ("adamw", 64, 64, 1.0)],
)
def test_lr_factor(optimizer: str, batch: int, reference: int | None, factor: float) -> None:
    assert lr_factor(optimizer, batch, reference) == factor


def test_global_batch_is_printed_and_scales_lr_only_if_set(
    folder_args: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        main(["fit", *folder_args, "--trainer.accumulate_grad_batches=2", "--model.lr=1e-3"])
        assert "global batch 8 = 4 per device x 1 x 2 accumulated; peak learning rate 0.001" in caplog.text
        main(["fit", *folder_args, "--model.lr=1e-3", "--model.lr_for_batch=16", "--experiment=scaled"])
        assert "global batch 4 = 4 per device x 1 x 1 accumulated; peak learning rate 0.0005" in caplog.text
    last = torch.load(only(tmp_path / "runs" / "scaled", "last.ckpt"), weights_only=True)
    rates = {group["initial_lr"] for group in last["optimizer_states"][0]["param_groups"]}
    assert rates == {0.0005}


def test_nonfinite_loss_stops_the_run(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names step, learning rate and precision; the exit code is 1; the last good checkpoint stays."""
    train = ViTClassifier.training_step

    def breaks(self: ViTClassifier, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step == 7:
            with torch.no_grad():
                self.net.head.weight.fill_(math.nan)
        return train(self, batch, batch_idx)

    monkeypatch.setattr(ViTClassifier, "training_step", breaks)
    with pytest.raises(SystemExit) as stop:
        main(["fit", *folder_args, "--trainer.max_epochs=3", "--last_checkpoint.every_n_steps=1"])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert "The training loss is not finite by step" in error and "precision 32-true" in error
    last = torch.load(only(tmp_path, "last.ckpt"), weights_only=True)
    assert last["global_step"] == 7 and last["state_dict"]["net.head.weight"].isfinite().all()


@pytest.mark.parametrize(
    "changed",
    [
        "--model.optimizer=sgd",
        "--model.freeze_backbone=true",
        "--model.layer_decay=null",
        "--model.head_lr_scale=3",
        "--model.weight_decay=0",
        "--model.layer_decay=1.0",
    ],
)
def test_resume_with_another_optimizer_is_refused(
    changed: str, folder_args: list[str], fails: Callable[..., str], tmp_path: Path
) -> None:
    main(["fit", *folder_args, "--trainer.max_steps=1"])
    last = only(tmp_path, "last.ckpt")
    option, value = changed.split("=")
    message = fails("fit", *folder_args, "--trainer.max_steps=2", f"--ckpt_path={last}", changed)
    value = {"true": "True", "null": "None"}.get(value, value)
    assert f"does not fit {option} {value}" in message and f"fit --model.weights {last}" in message


def test_memory_error_without_message() -> None:
    assert explain(MemoryError()) == OUT_OF_MEMORY


def test_out_of_memory_names_the_remedies(
    folder_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(ViTClassifier, "training_step", full)
    with pytest.raises(SystemExit) as stop:
        main(["fit", *folder_args])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    for way in ("bf16-mixed", "--data.batch_size", "accumulate_grad_batches", "grad_checkpointing", "20.00 GiB"):
        assert way in error


@pytest.mark.slow
def test_sharded_checkpoint_is_refused_with_the_command_that_consolidates_it(
    tmp_path: Path, fails: Callable[..., str]
) -> None:
    """Written by two processes, consolidated by one command, evaluated by one process."""
    import subprocess
    import sys

    from tests.conftest import REPOSITORY

    tree = make_tree(tmp_path / "images", {"train": 6, "val": 3})
    config = REPOSITORY / "configs" / "strategy" / "fsdp2.yaml"
    options = [*TINY_MODEL, "--data=ImageFolder", f"--data.root={tree}", "--trainer.accelerator=cpu"]
    sharded = [f"--config={config}", "--trainer.strategy.init_args.save_distributed_checkpoint=true"]
    run_command("fit", *sharded, *options, "--trainer.max_epochs=1", "--data.batch_size=3", folder=tmp_path)
    last = only(tmp_path, "last.ckpt")
    assert last.is_dir()
    message = fails("test", f"--ckpt_path={last}", *CPU)
    command = f"python -m vit_finetune.checkpoint {last}"
    assert command in message
    subprocess.run(
        [sys.executable, *command.split()[1:]], check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    main(["test", f"--ckpt_path={last.with_name('last-whole.ckpt')}", *CPU])
