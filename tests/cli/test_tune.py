"""tune: what it prints, and that it leaves no other files."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from vit_finetune import ViTClassifier, main
from vit_finetune.cli import tune


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_lr_is_printed_and_plotted(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group has the learning rate of the test times its layer's factor; nothing is saved."""
    seen = []
    step = ViTClassifier.training_step

    def spy(self: ViTClassifier, *batch: Any) -> torch.Tensor:
        seen.append({g["lr_scale"]: g["lr"] for g in self.trainer.optimizers[0].param_groups})
        return step(self, *batch)

    monkeypatch.setattr(ViTClassifier, "training_step", spy)
    options = ["--low=1e-5", "--high=1e-3", "--steps=12", "--model.layer_decay=0.5", "--model.ema=0.9"]
    for _ in range(2):
        main(["tune", *folder_args, *options])
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("--model.lr ") and printed[-1].endswith("(plot: runs/lr-1.png)")
    assert printed[-2].split()[:2] == printed[-1].split()[:2]  # the same seed, the same result
    assert 1e-6 <= float(printed[-1].split()[1]) <= 1e-4
    assert files(tmp_path / "runs") == ["lr-1.png", "lr.png"]
    assert len(seen) == 24 and seen[:12] == seen[12:]
    for step, rates in enumerate(seen[:12]):
        rate = 1e-5 * 100 ** (step / 11)
        assert rates == {scale: pytest.approx(rate * scale) for scale in (1.0, 0.5, 0.25, 0.125)}


def test_printed_lr_is_for_the_option(folder_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With lr_for_batch the option is scaled once more when it is used."""
    results = []
    for extra in ([], ["--model.lr_for_batch=16"]):  # the batch is four, so learning rates are halved
        main(["tune", *folder_args, "--steps=12", "--low=1e-5", "--high=1e-3", *extra])
        results.append(float(capsys.readouterr().out.split()[-3]))
    assert results[1] == pytest.approx(2 * results[0], rel=0.05)


def test_accumulation_counts_optimizer_steps(folder_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["tune", *folder_args, "--steps=6", "--trainer.accumulate_grad_batches=2", "--low=1e-5", "--high=1e-3"])
    assert "--model.lr " in capsys.readouterr().out


def test_suggestion() -> None:
    rates = [10.0 ** (i / 10) for i in range(60)]
    losses = [2 - math.exp(-((i - 30) ** 2) / 100) for i in range(50)] + [math.nan] * 10
    assert rates[30] / 10 < tune.suggest(rates, losses) < rates[40] / 10  # smoothing comes a little late
    with pytest.raises(MisconfigurationException, match="does not fall at any"):
        tune.suggest(rates[:3], [1.0, 2.0, 3.0])


def test_sweep_ends_where_the_loss_explodes(folder_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["tune", *folder_args, "--steps=40", "--low=1e-4", "--high=1e8", "--model.optimizer=sgd"])
    assert float(capsys.readouterr().out.split()[-3]) < 1e6


def test_batch_size_doubles_up_to_the_limit(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["tune", *folder_args, "--what=batch_size", "--largest=8"])
    assert capsys.readouterr().out.splitlines()[-1] == "--data.batch_size 8"
    assert not (tmp_path / "runs").exists() or files(tmp_path / "runs") == []


def test_batch_size_stops_at_memory(
    folder_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than four images raise what CUDA raises."""
    forward = ViTClassifier.forward

    def limited(self: ViTClassifier, images: torch.Tensor) -> torch.Tensor:
        if len(images) > 4:
            raise RuntimeError("CUDA out of memory.")
        return forward(self, images)

    monkeypatch.setattr(ViTClassifier, "forward", limited)
    main(["tune", *folder_args, "--what=batch_size"])
    assert capsys.readouterr().out.splitlines()[-1] == "--data.batch_size 4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.ema=2"], "--model.ema is 2.0"),  # a check of fit
        (["--low=1"], "--low 1.0, --high 0.1"),
        (["--steps=1"], "--steps 1"),
        (["--what=batch_size", "--largest=100"], "--largest 100 is not a power of two"),
    ],
)
def test_nonsense_is_refused(
    folder_args: list[str], fails: Callable[..., str], options: list[str], message: str
) -> None:
    assert message in fails("tune", *folder_args, *options)


def test_checkpoint_is_refused(folder_args: list[str], fails: Callable[..., str]) -> None:
    main(["fit", *folder_args, "--trainer.limit_train_batches=1"])
    assert "--model.weights instead of --ckpt_path" in fails("tune", *folder_args, "--ckpt_path=last")
