"""What is refused before anything starts, and what only gets a word."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import lightning
import pytest
import torch

from tests.conftest import CPU, TINY, TINY_MODEL, make_tree, only
from tests.test_distributed import run
from vit_finetune import ViTClassifier, main
from vit_finetune.cli import failures, preflight
from vit_finetune.model.optim import lr_factor


def test_all_problems_at_once(folder_args: list[str], fails: Callable[..., str]) -> None:
    message = fails(
        "fit", *folder_args, "--data.root=nowhere", "--best_checkpoint.monitor=val_acc", "--model.weights=no.pth"
    )
    assert "3 things stand in the way" in message
    for part in (
        "nowhere is not a folder",
        "'val_acc', which is not logged. Allowed: train/loss",
        "no.pth: no such file",
    ):
        assert part in message
    assert not Path("runs").exists()


def test_early_stopping_needs_its_metric(folder_args: list[str], fails: Callable[..., str]) -> None:
    stopping = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss"]
    assert "EarlyStopping follows 'val_loss'" in fails("fit", *folder_args, *stopping)
    stopping[1] = "--trainer.callbacks.monitor=val/loss"
    assert "skips validation" in fails("fit", *folder_args, *stopping, "--trainer.limit_val_batches=0")


def test_validation_off_says_that_there_is_no_best(folder_args: list[str], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="there will be no best checkpoint"):
        main(["fit", *folder_args, "--trainer.limit_val_batches=0"])
    assert only(tmp_path, "last.ckpt") and not list(tmp_path.rglob("best-*"))


@pytest.mark.parametrize(("version", "word"), [("2.6.3", "malicious"), ("2.5.0", "run code by a checkpoint")])
def test_unsafe_lightning(
    version: str, word: str, folder_args: list[str], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning, "__version__", version)
    assert word in fails("fit", *folder_args)


def test_full_disk_and_unwritable_folder(
    folder_args: list[str], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: os.terminal_size((0, 0)) and type("Usage", (), {"free": 1000}))
        assert "checkpoints take" in fails("fit", *folder_args)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "cannot be written to" in fails("fit", *folder_args)


def test_compile_needs_a_compiler(
    folder_args: list[str], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "needs a C++ compiler" in fails("fit", *folder_args, "--model.compile=true")


def test_impossible_network_before_data(fails: Callable[..., str]) -> None:
    message = fails("fit", *TINY, "--model.img_size=30", "--data=ImageFolder", "--data.root=nowhere")
    assert "--model.img_size 30 is no multiple of the 8-pixel patches" in message
    assert "nowhere is not a folder" in message


def test_unknown_name_is_one_problem(folder_args: list[str], fails: Callable[..., str]) -> None:
    message = fails("fit", *folder_args, "--model.name=vit_tiny_patch16_999", "--model.pretrained=true")
    assert "is not a timm model" in message and "stand in the way" not in message


def test_old_gpu_gets_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = type("T", (), {"precision": "bf16-mixed"})()
    trainer.strategy = type("S", (), {"root_device": torch.device("cuda", 0)})()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.warns(UserWarning, match="Tesla T4 has no bf16 units: .*16-mixed is fast"):
        preflight._warn(trainer)


def test_doctor(folder_args: list[str], capsys: pytest.CaptureFixture[str], fails: Callable[..., str]) -> None:
    main(["doctor", *folder_args])
    out = capsys.readouterr().out
    for word in ("vit_finetune", "python", "cpu", "gpu", "torch", "nothing stands in the way"):
        assert word in out
    assert not Path("runs").exists()
    assert "nowhere is not a folder" in fails("doctor", *folder_args, "--data.root=nowhere")


@pytest.mark.parametrize(
    ("optimizer", "batch", "reference", "factor"),
    [("adamw", 256, None, 1.0), ("adamw", 256, 64, 2.0), ("sgd", 256, 64, 4.0), ("adamw", 64, 64, 1.0)],
)
def test_rate_factor(optimizer: str, batch: int, reference: int | None, factor: float) -> None:
    assert lr_factor(optimizer, batch, reference) == factor


def test_global_batch_is_said_and_scales_only_when_asked(
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


def test_loss_that_is_no_number_stops_the_run(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step, rate and precision are named, the code is 1, and the good checkpoint of the epoch before stays."""
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


def test_memory_error_without_words() -> None:
    assert failures.explain(MemoryError()) == failures.OUT_OF_MEMORY


def test_out_of_memory_names_the_ways_out(
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
def test_shards_are_refused_with_the_command_that_joins_them(tmp_path: Path, fails: Callable[..., str]) -> None:
    """Saved in parts by two processes, joined by one command, scored by one process."""
    import subprocess
    import sys

    from tests.conftest import REPOSITORY

    tree = make_tree(tmp_path / "images", {"train": 6, "val": 3})
    config = REPOSITORY / "configs" / "strategy" / "fsdp2.yaml"
    options = [*TINY_MODEL, "--data=ImageFolder", f"--data.root={tree}", "--trainer.accelerator=cpu"]
    sharded = [f"--config={config}", "--trainer.strategy.init_args.save_distributed_checkpoint=true"]
    run("fit", *sharded, *options, "--trainer.max_epochs=1", "--data.batch_size=3", folder=tmp_path)
    last = only(tmp_path, "last.ckpt")
    assert last.is_dir()
    message = fails("test", f"--ckpt_path={last}", *CPU)
    command = f"python -m vit_finetune.checkpoint {last}"
    assert command in message
    subprocess.run(
        [sys.executable, *command.split()[1:]], check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    main(["test", f"--ckpt_path={last.with_name('last-whole.ckpt')}", *CPU])
