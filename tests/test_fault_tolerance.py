"""Runs that are killed, stopped or cut short, and resumed."""

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from tests.conftest import CPU, REPOSITORY, TINY_KWARGS, equal, make_tree, only, scalars, weights
from vit_finetune import checkpoint, main
from vit_finetune.callbacks import ResumeCheckpoint

LIMIT = 120  # seconds


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Three epochs of five steps, with every kind of randomness and a checkpoint every second step."""
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 1})
    model = ["--model.name=vit_tiny_patch16_224", "--model.pretrained=false", "--model.img_size=32"]
    model += [f"--model.timm_kwargs={TINY_KWARGS | {'proj_drop_rate': 0.2}}", "--model.drop_path=0.2"]
    data = ["--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=4"]
    return ["fit", *model, *data, *CPU, "--trainer.max_epochs=3", "--last_checkpoint.every_n_steps=2"]


class Killed(BaseException):
    """Stand-in for the moment at which a process is killed."""


@pytest.mark.parametrize(
    ("step", "more", "end"),
    [
        *((step, "--trainer.max_epochs=3", 15) for step in (3, 5, 7, 14)),
        (5, "--trainer.max_steps=13", 13),
        (3, "--trainer.val_check_interval=2", 15),
    ],
)
def test_run_killed_anywhere_ends_with_the_same_weights(
    step: int, more: str, end: int, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before a step in the middle or at the end of an epoch; the last checkpoint is one or two steps older."""
    options = [*options, more]
    main([*options, "--experiment=whole"])
    from vit_finetune import ViTClassifier

    train = ViTClassifier.training_step

    def dies(self: ViTClassifier, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step == step:
            raise Killed
        return train(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(ViTClassifier, "training_step", dies)
        with pytest.raises(Killed):
            main([*options, "--experiment=killed"])
    last = only(tmp_path / "runs" / "killed", "last.ckpt")
    saved = torch.load(last, weights_only=True)["global_step"]
    assert saved == max(step - step % 2, step - step % 5)
    main([*options, f"--ckpt_path={last}"])
    assert torch.load(last, weights_only=True)["global_step"] == end
    assert equal(weights(last), weights(only(tmp_path / "runs" / "whole", "last.ckpt")))
    # Both parts of the resumed run together have exactly the points of the uninterrupted run.
    points = {name: scalars(tmp_path / "runs" / name / "version_0") for name in ("killed", "whole")}
    for tag in ("train/loss", "train/acc", "val/loss"):
        # Of two event files written within the same second, the later one may be read first.
        points["killed"][tag].sort()
        assert [step for step, _ in points["killed"][tag]] == [step for step, _ in points["whole"][tag]], tag
        assert not any(math.isnan(value) for _, value in points["killed"][tag]), tag
    assert points["killed"]["val/loss"] == points["whole"]["val/loss"]
    assert all(value > 1 for _, value in points["killed"]["train/images_per_second"])
    assert all(0 < value < 60 for _, value in points["killed"]["train/first_step_seconds"])


@pytest.mark.parametrize("ending", ["killed in validation", "signal at the last step"])
def test_stopped_between_the_last_step_and_the_end_of_an_epoch(
    ending: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No epoch is skipped after resuming, even if a checkpoint was due at that step."""
    from vit_finetune import ViTClassifier

    hook = "validation_step" if ending == "killed in validation" else "training_step"
    step = getattr(ViTClassifier, hook)

    def stops(self: ViTClassifier, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if hook == "validation_step" and self.global_step == 10:
            raise Killed
        if hook == "training_step" and self.global_step == 9:
            signal.raise_signal(signal.SIGTERM)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(ViTClassifier, hook, stops)
        with pytest.raises((Killed, SystemExit)):
            main([*options, "--experiment=stopped"])
    main([*options, "--experiment=whole"])
    last, whole = (only(tmp_path / "runs" / name, "last.ckpt") for name in ("stopped", "whole"))
    main([*options, f"--ckpt_path={last}"])
    assert torch.load(last, weights_only=True)["global_step"] == 15
    assert equal(weights(last), weights(whole))


def test_signal_in_the_last_validation(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends as without the signal; there is nothing to resume."""
    from vit_finetune import ViTClassifier

    score = ViTClassifier.validation_step

    def receives(self: ViTClassifier, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        if self.global_step == 15:
            signal.raise_signal(signal.SIGTERM)
        score(self, batch, batch_idx)  # type: ignore[arg-type]

    monkeypatch.setattr(ViTClassifier, "validation_step", receives)
    main(options)
    assert torch.load(only(tmp_path, "last.ckpt"), weights_only=True)["global_step"] == 15


def test_progress_of_a_run_resumed_within_an_epoch(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*options, "--trainer.max_steps=8"])
    capsys.readouterr()
    main([*options, f"--ckpt_path={only(tmp_path, 'last.ckpt')}"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/2 done", "epoch 2/2 done"]


def test_time_limit_without_validation_loses_nothing(options: list[str], tmp_path: Path) -> None:
    """Stopped within the first epoch, without a validation that would save."""
    stop = ["--trainer.callbacks=tests.test_fault_tolerance.StopAtThird", "--trainer.limit_val_batches=0"]
    main([*options, *stop, "--last_checkpoint.every_n_steps=null"])
    last = only(tmp_path, "last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 3
    main([*options, "--trainer.limit_val_batches=0", f"--ckpt_path={last}"])
    main([*options, "--trainer.limit_val_batches=0", "--experiment=whole"])
    assert equal(weights(last), weights(only(tmp_path / "runs" / "whole", "last.ckpt")))


def test_signal_without_a_file_promises_none(
    options: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A trial run writes nothing, and weights alone cannot be resumed from."""
    from vit_finetune import ViTClassifier

    train = ViTClassifier.training_step

    def receives(self: ViTClassifier, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        signal.raise_signal(signal.SIGTERM)
        return train(self, batch, batch_idx)

    monkeypatch.setattr(ViTClassifier, "training_step", receives)
    for more, message in (
        ("--trainer.fast_dev_run=3", "after step 1: nothing was saved"),
        (
            "--last_checkpoint.save_weights_only=true",
            "saved the weights to runs/imagefolder/version_0/checkpoints/last",
        ),
    ):
        with pytest.raises(SystemExit), caplog.at_level("INFO"):
            main([*options, more])
        assert message in caplog.text and "To resume" not in caplog.text


@pytest.mark.parametrize("steps", [0, 1])
def test_message_about_a_nan_names_a_file_only_if_there_is_one(
    steps: int, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vit_finetune import ViTClassifier

    def breaks(self: ViTClassifier, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, target) * (math.nan if self.global_step == steps else 1)

    monkeypatch.setattr(ViTClassifier, "training_loss", breaks)
    with pytest.raises(SystemExit):
        main([*options, "--trainer.log_every_n_steps=1", "--last_checkpoint.every_n_steps=1"])
    error = capsys.readouterr().err
    last = "runs/imagefolder/version_0/checkpoints/last.ckpt"
    assert Path(last).exists() == (steps == 1)
    expected = (
        f"is kept; resume with --ckpt_path {last} and a lower --model.lr" if steps else "Start again with a lower"
    )
    assert expected in error and ("--ckpt_path" in error) == (steps == 1)


class StopAtThird(Callback):
    """Stop the run after three steps, as Lightning's Timer does."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 3


class TwoProcesses(SingleDeviceStrategy):
    """One process that reports two, and records the batches after which all processes agree."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.world_size = 2
        self.agreed: list[int] = []
        self.trainer: Trainer | None = None

    def reduce(self, tensor: Any, *args: Any, reduce_op: Any = None, **kwargs: Any) -> Any:
        assert self.trainer is not None
        if reduce_op == "max":  # not Lightning's comparison of the numbers of batches
            self.agreed.append(self.trainer.fit_loop.batch_idx)
        return tensor


class LongEpoch(BoringModel):
    """120 batches."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(RandomDataset(32, 120))


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8, 30])
def test_processes_agree_on_a_signal_within_ten_batches(accumulate: int, tmp_path: Path) -> None:
    """However many batches an optimizer step takes; only between steps, and at least every ten batches."""
    strategy = TwoProcesses()
    strategy.trainer = Trainer(
        strategy=strategy,
        callbacks=[ResumeCheckpoint()],
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    strategy.trainer.fit(LongEpoch())
    agreed = strategy.agreed
    assert all((batch + 1) % accumulate == 0 for batch in agreed)
    gaps = [after - before for before, after in zip([-1, *agreed], [*agreed, 119], strict=True)]
    assert max(gaps) <= max(10, accumulate) and len(agreed) <= 120 // 5


def start(
    options: list[str], folder: Path, launcher: tuple[str, ...] = (), variables: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start the command in a new process, or with torchrun and these options, and with these variables."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PL_", "MASTER_", "LOCAL_RANK", "NODE_RANK"))
    }
    environment |= {"PYTHONPATH": f"{REPOSITORY}:{folder}", "OMP_NUM_THREADS": "1", **(variables or {})}
    return subprocess.Popen(
        [
            sys.executable,
            *(("-m", "torch.distributed.run", *launcher) if launcher else ()),
            "-m",
            "vit_finetune",
            *options,
        ],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    """Wait until a condition holds, as long as the process runs."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_gone(group: int) -> None:
    """Wait until no process of the group is left."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("processes are left")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "seed"),
    [(devices, seed) for devices in (1, 2) for seed in (1, 2, 3)],
)
def test_kill_9_of_a_real_process(devices: int, seed: int, options: list[str], tmp_path: Path) -> None:
    """Killed at a random moment: the checkpoint is complete, and the resumed run ends with the same weights."""
    options = [*options, "--trainer.devices=2", "--trainer.strategy=ddp"] if devices == 2 else options
    start([*options, "--experiment=whole"], tmp_path).wait(LIMIT)
    process = start([*options, "--experiment=killed"], tmp_path)
    wait_for(process, lambda: list((tmp_path / "runs" / "killed").rglob("last.ckpt")))
    time.sleep(random.Random(seed).random() * 0.3)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(LIMIT)
    last, whole = (only(tmp_path / "runs" / name, "last.ckpt") for name in ("killed", "whole"))
    steps = [torch.load(path, weights_only=True)["global_step"] for path in (last, whole)]
    if steps[0] < steps[1]:  # otherwise it finished before it was killed
        assert start([*options, f"--ckpt_path={last}"], tmp_path).wait(LIMIT) == 0
    assert equal(weights(last), weights(whole))


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_end_with_their_code(
    number: signal.Signals, code: int, devices: int, options: list[str], tmp_path: Path
) -> None:
    """The step is finished, the state saved, the exit code not 0, and no process is left."""
    several = ["--trainer.devices=2", "--trainer.strategy=ddp"] if devices == 2 else []
    endless = [*options, *several, "--trainer.max_epochs=100000", "--last_checkpoint.every_n_steps=null"]
    process = start(endless, tmp_path)
    wait_for(process, lambda: list(tmp_path.rglob("last.ckpt")))
    time.sleep(0.1)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == code, output
    assert f"{number.name} after step" in output
    assert f"--ckpt_path {only(tmp_path, 'last.ckpt').relative_to(tmp_path)}" in output
    assert "Traceback" not in output
    wait_until_gone(process.pid)
    assert torch.load(only(tmp_path, "last.ckpt"), weights_only=True)["optimizer_states"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_handlers_are_restored(
    number: signal.Signals, code: int, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process that continues, such as that of a notebook, the next Ctrl+C must work as before."""
    from vit_finetune import ViTClassifier

    train = ViTClassifier.training_step

    def receives(self: ViTClassifier, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        signal.raise_signal(number)
        return train(self, batch, batch_idx)

    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        patch.setattr(ViTClassifier, "training_step", receives)
        with pytest.raises(SystemExit) as stop:
            main(options)
    assert stop.value.code == code
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    main([*options, "--trainer.max_epochs=1", "--experiment=whole"])  # also after a run that ends normally
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_slurm_job_saves_in_time_and_is_resumed(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1 before the end of the job; no file is left from which an unrelated job would resume."""
    from vit_finetune import ViTClassifier

    train = ViTClassifier.training_step

    def receives(self: ViTClassifier, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step == 6:
            signal.raise_signal(signal.SIGUSR1)
        return train(self, batch, batch_idx)

    ranks = {f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "NODEID", "STEP_ID")}
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", **ranks}.items():
        monkeypatch.setenv(name, value)
    options = [*options, "--ckpt_path=restart", "--last_checkpoint.every_n_steps=null"]
    with monkeypatch.context() as patch:
        patch.setattr(ViTClassifier, "training_step", receives)
        with pytest.raises(SystemExit) as stop:
            main(options)
    assert stop.value.code == 128 + signal.SIGUSR1 == 138
    last = only(tmp_path, "last.ckpt")
    assert list(tmp_path.rglob("*.ckpt")) and not list(tmp_path.rglob("hpc*"))
    assert torch.load(last, weights_only=True)["global_step"] == 7
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    main(options)
    assert torch.load(last, weights_only=True)["global_step"] == 15


def test_full_disk_leaves_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    io = checkpoint.AtomicCheckpointIO()
    io.save_checkpoint({"step": 1}, path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        io.save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_run_cut_by_max_steps_is_resumed_in_its_epoch(options: list[str], tmp_path: Path) -> None:
    main([*options, "--trainer.max_epochs=1", "--trainer.max_steps=3"])
    last = only(tmp_path, "last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 3
    main([*options, "--trainer.max_epochs=1", f"--ckpt_path={last}"])
    assert torch.load(last, weights_only=True)["global_step"] == 5


@pytest.mark.slow
def test_torchrun_restarts_all_processes_from_the_checkpoint(options: list[str], tmp_path: Path) -> None:
    """One of two processes is killed: torchrun restarts both, and the run ends with the same weights."""
    several = [*options, "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_epochs=60"]
    launcher = ("--standalone", "--nproc_per_node=2", "--max_restarts=2")
    assert start([*several, "--experiment=whole"], tmp_path, launcher).wait(LIMIT) == 0
    process = start([*several, "--experiment=killed", "--ckpt_path=restart"], tmp_path, launcher)
    wait_for(process, lambda: list((tmp_path / "runs" / "killed").rglob("last.ckpt")))
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    assert "checkpoint: " in output
    runs = [only(tmp_path / "runs" / name, "last.ckpt") for name in ("whole", "killed")]
    assert equal(*(weights(last) for last in runs))
