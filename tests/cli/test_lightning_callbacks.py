"""Every callback that Lightning has: it works with this project, or is refused with the alternative."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from lightning.pytorch import LightningModule, Trainer, callbacks

from tests.conftest import only
from vit_finetune import main
from vit_finetune.cli.run_callbacks import STEP_HOOKS, skip_empty_hooks
from vit_finetune.data.datasets import Batch

WORKS: dict[str, list[str]] = {
    "BasePredictionWriter": [],  # writes nothing in fit
    "Callback": [],
    "Checkpoint": [],
    "DeviceStatsMonitor": ["cpu_stats=true"],
    "EarlyStopping": ["monitor=val/loss"],
    "LambdaCallback": [],
    "LearningRateMonitor": [],
    "ModelCheckpoint": ["every_n_train_steps=2"],
    "ModelSummary": ["max_depth=2"],
    "ProgressBar": [],
    "RichModelSummary": ["max_depth=2"],
    "RichProgressBar": [],
    "SpikeDetection": ["warmup=100"],
    "TQDMProgressBar": [],
    "ThroughputMonitor": ["batch_size_fn=tests.cli.test_lightning_callbacks.batch_size"],
    "Timer": ["duration=00:01:00:00"],
}
REFUSED: dict[str, tuple[list[str], str]] = {
    "BackboneFinetuning": ([], "--model.unfreeze_by"),
    "BaseFinetuning": ([], "--model.freeze_backbone"),
    "BatchSizeFinder": ([], "tune --what batch_size"),
    "EMAWeightAveraging": ([], "--model.ema 0.999"),
    "GradientAccumulationScheduler": (["scheduling={0: 2, 1: 3}"], "--trainer.accumulate_grad_batches"),
    "LearningRateFinder": ([], "the command tune"),
    "ModelPruning": (["pruning_fn=l1_unstructured"], "torch.nn.utils.prune"),
    "OnExceptionCheckpoint": (["dirpath=saved"], "--last_checkpoint.every_n_steps"),
    "StochasticWeightAveraging": (["swa_lrs=1e-4"], "--model.ema 0.999"),
    "WeightAveraging": ([], "--model.ema 0.999"),
}


def batch_size(batch: Batch) -> int:
    return len(batch["label"])


class StepHooks(callbacks.Callback):
    """Records which callbacks of a run the Trainer calls for the hooks of a step."""

    called: ClassVar[dict[str, list[str]]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            hooks = [hook for hook in STEP_HOOKS if callable(getattr(callback, hook))]
            self.called[type(callback).__name__] = hooks


def test_hooks_of_a_step_that_do_nothing_are_skipped(folder_args: list[str]) -> None:
    """Each would cost some microseconds per step; those that are defined, also on an instance, are called."""
    seen: list[int] = []
    count = callbacks.LambdaCallback(on_train_batch_end=lambda *args: seen.append(args[-1]))
    skip_empty_hooks([count])
    assert callable(count.on_train_batch_end) and not callable(count.on_train_batch_start)
    main(["fit", *folder_args, f"--trainer.callbacks+={__name__}.StepHooks"])
    called = StepHooks.called
    assert called["ThroughputLogger"] == ["on_train_batch_end"]
    assert called["RunSummary"] == called["SaveConfig"] == called["StepHooks"] == called["StopReason"] == []
    assert "on_train_batch_end" in called["ResumeCheckpoint"]


def options(name: str, values: list[str]) -> list[str]:
    return [f"--trainer.callbacks+={name}", *(f"--trainer.callbacks.{value}" for value in values)]


def test_all_are_listed() -> None:
    """A callback of a later version of Lightning belongs in one of the two tables."""
    assert sorted([*WORKS, *REFUSED]) == sorted(callbacks.__all__)


def fit_and_resume(folder_args: list[str], folder: Path, names: list[str]) -> None:
    chosen = [option for name in names for option in options(name, WORKS[name])]
    main(["fit", *folder_args, *chosen])
    last = only(folder, "last.ckpt")
    config = only(folder, "config.yaml").read_text()
    assert only(folder, "best-*.ckpt") and all(name in config for name in names)
    if "SpikeDetection" not in names:  # see below
        main(["fit", *folder_args, *chosen, "--trainer.max_epochs=2", f"--ckpt_path={last}"])


def test_all_that_work_together(folder_args: list[str], tmp_path: Path) -> None:
    bars = {"ProgressBar", "RichProgressBar", "RichModelSummary", "SpikeDetection"}  # one of a kind in a run
    fit_and_resume(folder_args, tmp_path, [name for name in WORKS if name not in bars])


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_works(name: str, folder_args: list[str], tmp_path: Path) -> None:
    fit_and_resume(folder_args, tmp_path, [name])


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_the_alternative(name: str, folder_args: list[str], fails: Callable[..., str]) -> None:
    values, alternative = REFUSED[name]
    message = fails("fit", *folder_args, *options(name, values))
    assert name in message and alternative in message and "problems:" not in message
    assert not Path("runs").exists()


def test_model_summary_replaces_our_own(folder_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *folder_args])
    assert "GFLOPs per image" in capsys.readouterr().out
    main(["fit", *folder_args, *options("ModelSummary", [])])
    assert "GFLOPs per image" not in capsys.readouterr().out


def test_spike_detection_is_not_resumed(folder_args: list[str], tmp_path: Path, fails: Callable[..., str]) -> None:
    main(["fit", *folder_args])
    more = ["--trainer.max_epochs=2", f"--ckpt_path={only(tmp_path, 'last.ckpt')}"]
    assert "Resume without it" in fails("fit", *folder_args, *options("SpikeDetection", []), *more)


def test_spike_is_reported_in_one_line(folder_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    every_fall = options("SpikeDetection", ["mode=max", "rtol=0"])
    with pytest.raises(SystemExit) as stop:
        main(["fit", *folder_args, "--trainer.max_epochs=3", *every_fall])
    assert stop.value.code == 1 and "error: Training spike detected in batch" in capsys.readouterr().err


@pytest.mark.parametrize("own", [["--best_checkpoint.save_last=true"], options("ModelCheckpoint", ["save_last=true"])])
def test_last_checkpoint_is_not_overwritten(own: list[str], folder_args: list[str], fails: Callable[..., str]) -> None:
    assert "would overwrite last.ckpt" in fails("fit", *folder_args, *own)


def test_two_checkpoints_of_one_metric_are_refused(folder_args: list[str], fails: Callable[..., str]) -> None:
    """Lightning cannot tell their states apart; next to --best_checkpoint, one of the same metric works."""
    same = options("ModelCheckpoint", ["monitor=val/acc", "mode=max"])
    main(["fit", *folder_args, *same])
    message = fails("fit", *folder_args, *same, *same)
    assert "more than one stateful callback" in message and "Remove one of them" in message


def test_second_checkpoint_of_another_metric(folder_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The summary names the one that ``--ckpt_path best`` finds."""
    main(["fit", *folder_args, *options("ModelCheckpoint", ["monitor=val/loss", "mode=min"])])
    (best,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("best ")]
    assert "val/acc" in best and "best-epoch00" in best


def test_saving_in_one_process_of_several(folder_args: list[str], fails: Callable[..., str]) -> None:
    """It would wait for the others forever."""
    several = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    message = fails("fit", *folder_args, *several, "--best_checkpoint.save_on_exception=true")
    assert "waits for the other processes" in message


def test_device_stats_need_psutil(
    folder_args: list[str], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vit_finetune.cli.callback_conflicts.find_spec", lambda name: None)
    assert "pip install psutil" in fails("fit", *folder_args, *options("DeviceStatsMonitor", []))
