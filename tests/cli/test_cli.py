"""The command line as its users type it."""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.conftest import TINY, only, scalars
from vit_finetune import __version__, main
from vit_finetune.cli.lightning_cli import ViTCLI
from vit_finetune.cli.main import parse


def printed_config(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([*args, "--print_config"])
    assert stop.value.code in (0, None)
    return yaml.safe_load(capsys.readouterr().out)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for args, expected in ((["--version"], f"vit-finetune {__version__}"), (["fit", "--help"], "Peak learning rate")):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == 0
        assert expected in capsys.readouterr().out


def test_no_advice_about_srun_on_a_login_node(
    folder_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning gives it in every run where the command exists."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.touch(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}{os.pathsep}{os.environ['PATH']}")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        main(["fit", *folder_args])
    assert [str(warning.message) for warning in seen if "srun" in str(warning.message)] == []


def test_help_explains_datasets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--data.help", "ImageFolder"])
    text = capsys.readouterr().out
    assert "--data.root" in text
    assert "Fraction of the training images of each class that forms the validation split" in re.sub(r"\s+", " ", text)


def test_help_of_every_command_opens_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    overview = re.sub(r"\s+", " ", capsys.readouterr().out)
    for name in ViTCLI.subcommands():
        with pytest.raises(SystemExit):
            main([name, "--help"])
        sentence = capsys.readouterr().out.split("\n\n")[1].replace("\n", " ")
        assert sentence.endswith(".") and sentence in overview
    assert "benchmark" in overview


def test_parse_returns_all_options() -> None:
    options = parse(["fit", "--model.lr=0.5", "--data=Shapes", "--trainer.max_epochs=2"])
    assert options["model"]["lr"] == 0.5 and options["data"]["class_path"].endswith("Shapes")
    assert options["trainer"]["max_epochs"] == 2 and options["matmul_precision"] == "highest"
    with pytest.raises(MisconfigurationException, match=r"unrecognized option --model\.lrr"):
        parse(["fit", "--model.lrr=0.5"])


@pytest.mark.slow
def test_completion_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--print_completion", "shtab-bash"])
    assert stop.value.code == 0 and "vit-finetune" in capsys.readouterr().out


def test_flat_options_reach_any_dataset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = printed_config(capsys, "fit", "--data.batch_size=5")
    assert config["data"]["class_path"] == "vit_finetune.CIFAR10"
    assert config["data"]["init_args"]["batch_size"] == 5
    config = printed_config(capsys, "fit", "--data=ImageFolder", "--data.root=photos")
    assert config["data"]["init_args"]["root"] == "photos"
    (tmp_path / "flat.yaml").write_text("data: {batch_size: 7}\n")
    assert printed_config(capsys, "fit", "--config=flat.yaml")["data"]["init_args"]["batch_size"] == 7


def test_overlays_later_ones_win(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("model: {lr: 0.1, drop_path: 0.2}\ndata: Shapes\n")
    (tmp_path / "two.yaml").write_text("model: {lr: 0.3}\ntrainer: {precision: bf16-mixed}\n")
    config = printed_config(capsys, "fit", "--config=one.yaml", "--config=two.yaml", "--model.min_lr=0.01")
    assert config["model"]["lr"] == 0.3 and config["model"]["drop_path"] == 0.2 and config["model"]["min_lr"] == 0.01
    assert config["data"]["class_path"].endswith("Shapes") and config["trainer"]["precision"] == "bf16-mixed"


def test_environment_variables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_FINETUNE_FIT__MODEL__LR", "0.5")
    assert printed_config(capsys, "fit")["model"]["lr"] == 0.5
    assert printed_config(capsys, "fit", "--model.lr=0.25")["model"]["lr"] == 0.25


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--model.freeze_backbon=1"],
            r"unrecognized option --model.freeze_backbon. Did you mean --model.freeze_backbone",
        ),
        (["--model.learning_rate=1"], r"unrecognized option --model.learning_rate. Options with .*: .*--model.lr,"),
        (["--data.batchsize=4"], r"unrecognized option --data.batchsize. Did you mean --data.batch_size"),
        (["--data=ImageFolder", "--data.rot=x"], r"unrecognized option --data.rot. Did you mean --data.root"),
        (
            ["--data=ImagFolder"],
            r"--data: expected one of: CIFAR10, CIFAR100, .*ImageFolder, .*Shapes.*; got 'ImagFolder'. Did you mean",
        ),
        (["--data.batch_size=many"], r"--data.batch_size: expected int; got 'many'"),
        (["--model.lr=fast"], r"--model.lr: expected float; got 'fast'"),
        (["--model.img_size=1.5"], r"--model.img_size: expected int or list\[int\] or null; got '1.5'"),
        (["--model.compile=maybe"], r"--model.compile: expected true or false; got 'maybe'"),
        (
            ["--trainer.precision=fp16"],
            r"--trainer.precision: expected one of: .*bf16-mixed.*; got 'fp16'. Did you .*bf16",
        ),
        (["--trainer.accelerator=gpux"], r"accelerator='gpux'.*Available names are"),
        (["--trainer.max_epoch=3"], r"unrecognized option --trainer.max_epoch. Did you mean --trainer.max_epochs"),
        (["--config=nosuch.yaml"], r"File does not exist: .*nosuch.yaml"),
        (["--best_checkpoint.mode=up"], r"`mode` can be min, max but got up"),
    ],
)
def test_mistakes_get_one_line(args: list[str], message: str, fails: Callable[..., str]) -> None:
    text = fails("fit", *args)
    assert re.search(message, text), text
    assert text.count("\n") == 1 and "Union" not in text and "<class" not in text


@pytest.mark.parametrize("args", [["fitt"], []])
def test_mistyped_command(args: list[str], fails: Callable[..., str]) -> None:
    assert re.search("fit.*validate.*test.*predict", fails(*args))


def test_mistake_in_a_config_file(tmp_path: Path, fails: Callable[..., str]) -> None:
    (tmp_path / "wrong.yaml").write_text("model: {learning_rate: 0.1}\n")
    assert "learning_rate" in fails("fit", "--config=wrong.yaml")


@pytest.mark.parametrize("command", ["validate", "test", "predict", "export"])
def test_evaluation_needs_a_checkpoint(command: str, fails: Callable[..., str]) -> None:
    for given in ([], ["--ckpt_path=restart"]):
        assert f"{command} needs a trained model: --ckpt_path best, last, or a file" in fails(command, *TINY, *given)


def test_offline_start_names_everything_that_is_missing(
    fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    message = fails("fit", "--trainer.accelerator=cpu")
    assert "Found 2 problems:" in message
    for part in ("vit_base_patch16_224.augreg_in21k", "--model.weights FILE", "--model.pretrained false", "HF_HOME"):
        assert part in message
    for part in ("CIFAR-10 is missing", "--data.root data", "configs/quickstart.yaml"):
        assert part in message
    assert not Path("runs").exists() and not Path("data").exists()


def test_a_run_leaves_what_was_promised(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fit", *folder_args, "--trainer.max_epochs=2"])
    out = capsys.readouterr().out
    run = tmp_path / "runs" / "imagefolder" / "version_0"
    best = only(run, "best-*.ckpt")
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith("events")) == [
        "checkpoints",
        "config.yaml",
        "hparams.yaml",
    ]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [best.name, "last.ckpt"]
    assert re.fullmatch(r"best-epoch0[01]-acc[01]\.\d{4}\.ckpt", best.name)
    assert only(run, "events.*").stat().st_size > 0
    assert (
        f"best  val/acc {best.stem[-6:]} in epoch {best.stem[11]}  runs/imagefolder/version_0/checkpoints/{best.name}"
        in out
    )
    assert "next  python -m vit_finetune test --ckpt_path best" in out and "tensorboard --logdir runs" in out
    assert re.search(r"epoch 0/1 done  train/loss [\d.]+  train/acc [\d.]+  val/loss [\d.]+  val/acc [\d.]+", out)
    tags = scalars(run)
    for name in ("train/loss", "train/acc", "val/loss", "val/acc", "train/lr"):
        assert len(tags[name]) == 2, name
    for name in ("train/images_per_second", "train/peak_memory_gb", "train/loss_step", "train/acc_step"):
        assert len(tags[name]) >= 2, name
    assert len(tags["best/val/acc"]) == 1


def test_second_run_gets_its_own_folder(folder_args: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        main(["fit", *folder_args, "--experiment=mine", "--trainer.limit_train_batches=1"])
    assert sorted(path.name for path in (tmp_path / "runs" / "mine").iterdir()) == ["version_0", "version_1"]


def test_fixed_folder_is_not_overwritten(folder_args: list[str], tmp_path: Path, fails: Callable[..., str]) -> None:
    fixed = [*folder_args, "--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=logs"]
    fixed += ["--trainer.logger.version=one", "--trainer.limit_train_batches=1"]
    main(["fit", *fixed])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "logs").rglob("*")}
    assert "already contains a run" in fails("fit", *fixed)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "logs").rglob("*")}


def test_essential_callbacks_survive_the_users(folder_args: list[str], tmp_path: Path) -> None:
    stopping = ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val/loss"]
    main(["fit", *folder_args, *stopping])
    assert only(tmp_path, "last.ckpt") and only(tmp_path, "best-*.ckpt")


def test_switching_things_off(folder_args: list[str], tmp_path: Path) -> None:
    off = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    main(["fit", *folder_args, *off])
    assert not list(tmp_path.rglob("*.ckpt")) and not list(tmp_path.rglob("events*"))
    main(["fit", *folder_args, "--trainer.fast_dev_run=true"])
    assert not list(tmp_path.rglob("*.ckpt"))


def test_predict_leaves_a_table(folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import csv

    main(["fit", *folder_args, "--trainer.max_epochs=6", "--model.lr=0.01"])
    for number in ("", "-1"):
        main(["predict", "--ckpt_path=best", "--trainer.accelerator=cpu"])
        path = only(tmp_path, f"predictions{number}.csv")
        assert str(path.relative_to(tmp_path)) in capsys.readouterr().out
        rows = list(csv.DictReader(path.open(encoding="utf-8")))
        assert [row["path"] for row in rows] == [
            str(tmp_path / "images" / "test" / c / f"{i:02d}.png") for c in "abc" for i in range(3)
        ]
        for row in rows:
            parts = [float(row[f"probability{number}"]) for number in ("", "_2", "_3")]
            assert sum(parts) == pytest.approx(1, abs=1e-3) and parts == sorted(parts, reverse=True)
            assert {row[f"class{number}"] for number in ("", "_2", "_3")} == set("abc") and not row["error"]


def test_plain_lines_in_long_epochs(
    folder_args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vit_finetune.callbacks.progress.LINE_EVERY", 0.0)
    main(["fit", *folder_args, "--trainer.log_every_n_steps=1"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 0/0 step")]
    assert [line.split()[3] for line in lines] == [f"{step}/5" for step in range(1, 6)]
    assert all("train/loss_step" in line for line in lines)
