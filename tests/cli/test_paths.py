"""A home folder and environment variables in options that hold a path, wherever the option comes from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.conftest import CPU, only
from vit_finetune import main
from vit_finetune.cli.main import parse


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, and $SCRATCH next to it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "home"


def test_a_run_in_the_home_folder_is_found_again(
    folder_args: list[str], home: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All files of the run are in one real folder; the variables are not needed to evaluate it."""
    monkeypatch.setenv("PHOTOS", str(tree.parent))
    Path("my.yaml").write_text("trainer: {default_root_dir: ~/vf}\ndata: {init_args: {root: '${PHOTOS}/images'}}\n")
    main(["fit", *folder_args[:-1], "--config=my.yaml"])
    run = home / "vf" / "my" / "version_0"
    best = only(run, "best-*.ckpt")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"]["init_args"]["root"] == str(tree) and config["trainer"]["default_root_dir"] == f"{home}/vf"
    assert torch.load(best, weights_only=True)["datamodule_hyper_parameters"]["root"] == str(tree)
    monkeypatch.delenv("PHOTOS")
    monkeypatch.setenv("VIT_FINETUNE_TEST__TRAINER__DEFAULT_ROOT_DIR", "$HOME/vf")
    main(["test", "--ckpt_path=best", *CPU])
    main(["predict", "--trainer.default_root_dir=~/vf", "--ckpt_path=~/vf/my/version_0/checkpoints/last.ckpt", *CPU])
    assert (run / "test.yaml").exists() and (run / "predictions.csv").exists()
    assert sorted(path.name for path in Path().iterdir()) == ["home", "images", "my.yaml"]


def test_path_options_are_expanded(home: Path) -> None:
    """Of the command, of classes, and in lists; whatever is not a path stays as it is."""
    Path("callbacks.yaml").write_text(
        "trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {dirpath: ~/c, filename: 'a$b'}}]}"
    )
    paths = ["--data=ImageFolder", "--data.root=~/x", "--model.weights=$HOME/w.pth", "--config=callbacks.yaml"]
    paths += ["--best_checkpoint.dirpath=${HOME}/b", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=~/logs"]
    others = ["--model.class_names=['$UNSET_CLASS','~']", "--experiment=$x", "--best_checkpoint.filename=$y"]
    options: Any = parse(["fit", *paths, *others])
    assert options["data"]["init_args"]["root"] == f"{home}/x" and options["model"]["weights"] == f"{home}/w.pth"
    assert options["trainer"]["logger"]["init_args"]["save_dir"] == f"{home}/logs"
    (callback,) = options["trainer"]["callbacks"]
    assert callback["init_args"]["dirpath"] == f"{home}/c" and callback["init_args"]["filename"] == "a$b"
    assert options["model"]["class_names"] == ["$UNSET_CLASS", "~"] and options["experiment"] == "$x"
    best = options["best_checkpoint"]
    assert best["dirpath"] == f"{home}/b" and best["filename"] == "$y"
    assert parse(["check-data", "--output=$SCRATCH/../home/o"])["output"] == f"{home.parent}/scratch/../home/o"


def test_config_files_are_found(home: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., str]) -> None:
    home.mkdir()
    (home / "a.yaml").write_text("model: {lr: 0.5}\n")
    for args in (["--config=$HOME/a.yaml"], ["-c", "~/a.yaml"], ["--config", "${HOME}/a.yaml"]):
        assert parse(["fit", *args])["model"]["lr"] == 0.5  # type: ignore[index]
    monkeypatch.setenv("VIT_FINETUNE_FIT__CONFIG", "$HOME/a.yaml")
    assert parse(["fit"])["model"]["lr"] == 0.5  # type: ignore[index]
    assert "--config $NOWHERE/a.yaml: the environment variable NOWHERE is not set" in fails(
        "fit", "--config=$NOWHERE/a.yaml"
    )


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["fit", "--data=ImageFolder", "--data.root=$NOWHERE/x"], "--data.root"),
        (["fit", "--config=a.yaml"], "--trainer.default_root_dir"),
        (["fit", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=${NOWHERE}"], "--trainer.logger.save_dir"),
        (["test", "--ckpt_path=$NOWHERE/last.ckpt"], "--ckpt_path"),
        (["benchmark", "--suite=a.yaml", "--output=$NOWHERE/x"], "--output"),
    ],
)
def test_unset_variable_is_an_error(args: list[str], option: str, fails: Callable[..., str]) -> None:
    Path("a.yaml").write_text("trainer: {default_root_dir: $NOWHERE/vf}\n")
    message = fails(*args)
    assert option in message and "the environment variable NOWHERE is not set" in message
    assert message.count("\n") == 1 and sorted(path.name for path in Path().iterdir()) == ["a.yaml"]


def test_benchmark_has_its_own_paths(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(suite: Path, output: Path) -> int:
        assert (suite, output) == (home / "quick.yaml", home / "results")
        output.mkdir(parents=True)
        (output / "results.md").write_text("done")
        return 0

    monkeypatch.setattr("vit_finetune.benchmark.runner.run", run)
    main(["benchmark", "--suite=$HOME/quick.yaml", "--output", "~/results"])
    assert (home / "results" / "results.md").exists()
